"""Remove all position information from a model (NoPE)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Op, Param, Value, ops
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.layers import refuse_caches
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import attend
from ...edits.edit import backward_slice, replace_uses
from ..cleanup.dce import Dce


def find_position_values(graph: Graph) -> set[Value]:
    """Return the values that depend only on the input position_ids, on token counts (iota) and on parameters."""
    values: set[Value] = {v for name, v in graph.inputs.items() if name == "position_ids"}
    for node in graph.nodes:
        operands = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if node.op is ops.iota or (operands and operands <= values):
            values.update(node.outputs)
    return values


def find_position_tables(graph: Graph) -> list[Node]:
    """Return the `embedding` nodes that look up positions in a table that is a parameter of fixed length."""
    values = find_position_values(graph)
    lookups = [n for n in graph.nodes if n.op is ops.embedding and n.inputs[0] in values]
    return [n for n in lookups if isinstance(table := n.inputs[1], Param) and isinstance(table.shape[0], int)]


def find_first_row(node: Node) -> int | None:
    """Return the row of position 0 in the table of the position embedding `node`; None if it cannot be derived."""
    value, offset = node.inputs[0], 0
    while value is not None and (producer := value.producer) is not None and producer.op is not ops.iota:
        if producer.op is ops.affine and producer.attrs["by"] == 1 and float(producer.attrs["plus"]).is_integer():
            offset += int(producer.attrs["plus"])
        elif producer.op not in (ops.expand, ops.unsqueeze, ops.cast):
            return None
        value = producer.inputs[0]
    return offset


_SUMS = (ops.add, ops.add_norm)  # they add position embeddings to token embeddings
_MASKING = {ops.less, ops.less_equal, ops.equal, ops.where}  # a bias made with them may hide keys


class StripPositions(Pass):
    """Remove all positions (NoPE): rotations, added tables and sinusoids, and biases by distance.

    rope(x) becomes x; summands computed from positions alone are dropped; ALiBi and T5 biases are removed; relative
    attention (Shaw 2018) becomes plain attention. A causal decoder can still infer positions from the number of visible
    tokens, so it can be trained further without them; an encoder becomes a function of a set of tokens. The input
    position_ids is removed if it has no readers left.

    Condition: the model changes and needs further training. A bias that may be a mask (computed by comparisons) stays,
    and so do positions that other ops read. It is an error if there are caches.

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
        refuse_caches(graph, self.name)
        position_values = find_position_values(graph)
        for node in graph.nodes:
            remove = _REMOVALS.get(node.op)
            if remove is not None and remove(node):
                trace.record_rewrite(self.name, node.output.name)
            elif node.op in _SUMS:
                self._drop_summand(node, position_values, trace)
            elif node.op is ops.attention and (bias := node.operand("bias")) in position_values and bias is not None:
                if _MASKING & {n.op for n in backward_slice([bias], [])}:
                    trace.refuse(self.name, bias.name, "it is computed by comparisons and may be a mask")
                else:
                    node.set_input(node.op.operand_index("bias"), None)
                    trace.record_rewrite(self.name, node.output.name)
        if trace.rewrites[self.name]:
            _clean_up(graph)

    def _drop_summand(self, node: Node, position_values: set[Value], trace: Trace) -> None:
        """Remove the only summand of `node` in `position_values`, if there is one; refuse if the type would change."""
        (x, y), norms = node.inputs[:2], node.op is ops.add_norm
        assert x is not None and y is not None
        if (x in position_values) == (y in position_values) or not node.output.type.dtype.is_float:
            return
        content = y if x in position_values else x
        if content.type != node.output.type:
            trace.refuse(self.name, node.output.name, f"%{content.name} would no longer be of type {node.output.type}")
            return
        if norms:
            norm = ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm
            with node.graph.inserting(before=node):
                replace_uses(node.output, norm(content, *node.inputs[2:], eps=node.attrs["eps"]))
        trace.record_rewrite(self.name, node.output.name)
        node.outputs[-1].replace_uses(content)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs equal those of the graph before, with no rotations, and zeros for removed values."""
        inputs = equivalence.make_inputs(before)
        names = {n.output.name for n in after.nodes}
        values = find_position_values(before)
        references: dict[str, Callable[..., Any]] = {}
        for node in before.nodes:
            if node.op in _REFERENCES:
                references[node.output.name] = _REFERENCES[node.op]
            elif node.output in values and node.output.name not in names:
                results = (v for user in node.output.users for v in user.outputs)
                if not values.issuperset(results):
                    references[node.output.name] = partial(_return_zeros, node.op.reference)
        expected, remaining = equivalence.run_as(before, inputs, references), {n: inputs[n] for n in after.inputs}
        equivalence.check_close(expected, equivalence.run(after, remaining), EXACT)


def _drop_rope(node: Node) -> bool:
    node.output.replace_uses(node.required_operand("x"))
    return True


def _drop_linear_rope(node: Node) -> bool:
    rotated = node.operand("positions") is not None
    for name in ("positions", "frequencies"):
        if rotated:
            node.set_input(node.op.operand_index(name), None)
    return rotated


def _drop_relative(node: Node) -> bool:
    mask, heads = node.operand("key_mask"), node.attrs["heads"]
    with node.graph.inserting(before=node):
        y = ops.attention(*node.inputs[:3], None, mask, heads=heads, kv_heads=heads, causal=node.attrs["causal"])
    replace_uses(node.output, y)
    return True


_REMOVALS: dict[Op, Callable[[Node], bool]] = {
    ops.rope: _drop_rope,
    ops.linear_attention: _drop_linear_rope,
    ops.relative_attention: _drop_relative,
}


def _clean_up(graph: Graph) -> None:
    """Remove unused nodes and parameters, an unread position_ids, and graph.meta's maxima if no table is left."""
    Dce().run(graph, Trace())
    position_ids = graph.inputs.get("position_ids")
    if position_ids is not None and not position_ids.uses and not position_ids.is_output:
        del graph.inputs["position_ids"]
    if not find_position_tables(graph):
        for key in ("max_positions", "max_source_positions"):
            graph.meta.pop(key, None)


def _return_zeros(reference: Callable[..., Any], *operands: Array, **attrs: Any) -> Array:
    return np.zeros_like(reference(*operands, **attrs))


def _attend(q: Array, k: Array, v: Array, *tables: Array | None, heads: int, causal: bool, **attrs: Any) -> Array:
    mask = tables[5] if len(tables) > 5 else None
    remove: dict[str, Any] = {"scale": None, "softcap": None, "value_dim": None}
    return attend(lambda i, j: True, q, k, v, None, mask, heads=heads, kv_heads=heads, causal=causal, **remove)


def _attend_linearly(
    q: Array, k: Array, v: Array, mask: Array | None = None, *rotary: Array, heads: int, causal: bool, **attrs: Any
) -> Any:
    return ops.linear_attention.reference(q, k, v, mask, heads=heads, causal=causal)


_REFERENCES: dict[Op, Callable[..., Any]] = {
    ops.rope: lambda x, *rotary, **attrs: x,
    ops.linear_attention: _attend_linearly,
    ops.relative_attention: _attend,
}
