"""No positions: what tells tokens where they stand is taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Op, Value, ops
from weft.ir.recipes.readers import Array

from ...analysis.layers import need_early
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from ...core.trace import Trace
from ...edits.edit import backward_slice, replace_uses
from ..cleanup.dce import Dce
from .position_values import position_tables, positional

_ABSOLUTE = (ops.add, ops.add_norm)  # with them positions come into the text
_MASKING = {ops.less, ops.less_equal, ops.equal, ops.where}  # a bias made with them may hide keys


@dataclass(frozen=True)
class StripPositions(Pass):
    """Take out all positions: rotations, tables and sinusoids that are added, biases by distance (NoPE).

    rope(x) becomes x; what is made of positions alone and added to the text is no longer added; ALiBi and T5 biases are
    left out; relative attention (Shaw 2018) becomes plain attention. A causal decoder still tells positions by how many
    tokens it sees, which is why it can be trained on without them; an encoder becomes a function of a set of tokens.
    The input position_ids goes where nobody reads it any more.

    Condition: the model becomes another one, to be trained on. A bias that may be a mask (made by comparisons) stays,
    and so does what enters otherwise than by a sum.

    Source: Haviv 2022, arXiv:2203.16634; Kazemnejad 2023 (NoPE), arXiv:2305.19466.

    Example strip-positions::

        graph example {
          input %input_ids: i64[batch, seq]
          input %position_ids: i64[batch, seq]
          param %embed: f32[20, 8] = normal([20, 8], std=0.4, stream="e")
          param %table: f32[12, 8] = normal([12, 8], std=0.4, stream="p")
          %token: f32[batch, seq, 8] = embedding(%input_ids, %embed)
          %place: f32[batch, seq, 8] = embedding(%position_ids, %table)
          %x: f32[batch, seq, 8] = add(%token, %place)
          %y: f32[batch, seq, 8] = attention(%x, %x, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "strip-positions"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("insert-rope",)

    def run(self, graph: Graph, trace: Trace) -> None:
        need_early(graph, self.name)
        places = positional(graph)
        for node in graph.nodes:
            plain = _PLAIN.get(node.op)
            if plain is not None and plain(node):
                trace.fired(self.name, node.output.name)
            elif node.op in _ABSOLUTE:
                self._unsum(node, places, trace)
            elif node.op is ops.attention and (bias := node.operand("bias")) in places and bias is not None:
                if _MASKING & {n.op for n in backward_slice([bias], [])}:
                    trace.refuse(self.name, bias.name, "it is made by comparisons and may be a mask")
                else:
                    node.set_input(node.op.operand_index("bias"), None)
                    trace.fired(self.name, node.output.name)
        if trace.rewrites[self.name]:
            _clear(graph)

    def _unsum(self, node: Node, places: set[Value], trace: Trace) -> None:
        """Take the positions out of the sum `node`, if it has any."""
        (x, y), norms = node.inputs[:2], node.op is ops.add_norm
        assert x is not None and y is not None
        if (x in places) == (y in places) or not node.output.type.dtype.is_float:
            return
        text = y if x in places else x
        if text.type != node.output.type:
            trace.refuse(self.name, node.output.name, f"%{text.name} would no longer be of type {node.output.type}")
            return
        if norms:
            norm = ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm
            with node.graph.inserting(before=node):
                replace_uses(node.output, norm(text, *node.inputs[2:], eps=node.attrs["eps"]))
        trace.fired(self.name, node.output.name)
        node.outputs[-1].replace_uses(text)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """The model whose rotations turn by nothing and whose tables and biases of positions are zero."""
        inputs = equivalence.inputs(before)
        kept = {n.output.name for n in after.nodes}
        places = positional(before)
        meanings: dict[str, Callable[..., Any]] = {}
        for node in before.nodes:
            if node.op in _UNPLACED:
                meanings[node.output.name] = _UNPLACED[node.op]
            elif node.output in places and node.output.name not in kept and not places.issuperset(_read(node)):
                meanings[node.output.name] = partial(_nothing, node.op.reference)
        remaining = {name: inputs[name] for name in after.inputs}
        equivalence.same(equivalence.run_as(before, inputs, meanings), equivalence.run(after, remaining), EXACT)


def _unturned(node: Node) -> bool:
    assert node.inputs[0] is not None
    node.output.replace_uses(node.inputs[0])
    return True


def _unturned_linear(node: Node) -> bool:
    turned = node.operand("positions") is not None
    for name in ("positions", "frequencies"):
        if turned:
            node.set_input(node.op.operand_index(name), None)
    return turned


def _absolute(node: Node) -> bool:
    """Attention without the relative vectors of the node `relative_attention`."""
    mask, heads = node.operand("key_mask"), node.attrs["heads"]
    with node.graph.inserting(before=node):
        y = ops.attention(*node.inputs[:3], None, mask, heads=heads, kv_heads=heads, causal=node.attrs["causal"])
    replace_uses(node.output, y)
    return True


_PLAIN: dict[Op, Callable[[Node], bool]] = {
    ops.rope: _unturned,
    ops.linear_attention: _unturned_linear,
    ops.relative_attention: _absolute,
}


def _clear(graph: Graph) -> None:
    """Remove what nobody reads any more, the input position_ids and facts about tables among it."""
    Dce().run(graph, Trace())
    given = graph.inputs.get("position_ids")
    if given is not None and not given.uses and not given.is_output:
        del graph.inputs["position_ids"]
    if not position_tables(graph):
        for fact in ("max_positions", "max_source_positions"):
            graph.meta.pop(fact, None)


def _read(node: Node) -> list[Value]:
    """Return the values computed directly from `node`."""
    return [v for user in node.output.users for v in user.outputs]


def _nothing(reference: Callable[..., Any], *operands: Array, **attrs: Any) -> Array:
    return np.zeros_like(reference(*operands, **attrs))


def _unrelated(q: Array, k: Array, v: Array, *tables: Array | None, heads: int, causal: bool, **attrs: Any) -> Array:
    mask = tables[5] if len(tables) > 5 else None
    plain: dict[str, Any] = {"scale": None, "softcap": None, "value_dim": None}
    return attend(lambda i, j: True, q, k, v, None, mask, heads=heads, kv_heads=heads, causal=causal, **plain)


def _unturned_sums(
    q: Array, k: Array, v: Array, mask: Array | None = None, *turn: Array, heads: int, causal: bool, **attrs: Any
) -> Any:
    return ops.linear_attention.reference(q, k, v, mask, heads=heads, causal=causal)


_UNPLACED: dict[Op, Callable[..., Any]] = {
    ops.rope: lambda x, *turn, **attrs: x,
    ops.linear_attention: _unturned_sums,
    ops.relative_attention: _unrelated,
}
