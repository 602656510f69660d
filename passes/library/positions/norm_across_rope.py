"""Move norms of queries and keys across RoPE."""

from __future__ import annotations

from typing import Literal

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, ops
from weft.ir.recipes import Full
from weft.ir.recipes import Literal as LiteralRecipe

from ... import Pass, Trace
from ...edits.edit import erase_unused, replace_uses

_NORMS = (ops.rms_norm, ops.layer_norm)


class NormAcrossRope(Pass):
    """Move the RMSNorm of queries or keys across RoPE: to=behind puts it after the rotation, to=before ahead of it.

    A rotation R preserves lengths, so that R(x / rms(x)) = R x / rms(R x). A norm after the rotation suits caches of
    keys that are rotated but not normalized, and kernels that rotate before they normalize.

    Condition: the norm has no weight, or one that is equal within every pair: R diag(g) = diag(g) R. The pass refuses
    other weights, a LayerNorm (rotations do not preserve means), a rotation with an amplitude other than 1, which a
    norm after it would cancel, and values between norm and rotation that have other readers.

    Source: Su 2021, RoFormer (arXiv 2104.09864): rotations are orthogonal; Henry 2020, Query-Key Normalization
    (arXiv 2010.04245).

    Example norm-across-rope{to=behind}::

        graph example {
          input %q: f32[batch, seq, 16]
          input %at: i64[batch, seq]
          param %frequencies: f32[2] = rope_frequencies(4)
          %heads: f32[batch, seq, 4, 4] = reshape(%q, shape=[batch, seq, 4, 4])
          %normed: f32[batch, seq, 4, 4] = rms_norm(%heads)
          %joined: f32[batch, seq, 16] = reshape(%normed, shape=[batch, seq, 16])
          %rotated: f32[batch, seq, 16] = rope(%joined, %at, %frequencies, heads=4)
          output y = %rotated
        }
    """

    name = "norm-across-rope"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("fold-norm-scale",)
    to: Literal["behind", "before"] = "behind"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is not ops.rope:
                continue
            steps = _find_norm(node, before=self.to == "behind")
            if not steps:
                continue
            old, new = ([*steps, node], [node, *steps]) if self.to == "behind" else ([node, *steps], [*steps, node])
            if (reason := _find_obstacle(node, steps, old)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            trace.record_rewrite(self.name, node.output.name)
            _reorder_nodes(old, new)


def _find_norm(rotation: Node, before: bool) -> list[Node]:
    """Return the norm directly before `rotation` and the reshapes around it, in order; [] without a norm, or if these
    nodes change the type. Unless `before`, look after `rotation` instead, along values with a single use."""
    chain: list[Node] = []
    value = rotation.required_operand("x") if before else rotation.output
    while before or len(value.uses) == 1:
        node = value.producer if before else value.uses[0][0]
        if node is None or node.op not in (ops.reshape, *_NORMS):
            break
        if node.op in _NORMS and any(n.op in _NORMS for n in chain):
            break
        chain.insert(0 if before else len(chain), node)
        value = node.required_operand("x") if before else node.output
    start = value if before else rotation.output
    return chain if any(n.op in _NORMS for n in chain) and chain[-1].output.type == start.type else []


def _find_obstacle(rotation: Node, steps: list[Node], chain: list[Node]) -> str | None:
    """Return why the norm in `steps` cannot move across `rotation`, or None; `chain` has both, in graph order."""
    (norm,) = (n for n in steps if n.op in _NORMS)
    for node in chain[:-1]:
        if len(node.output.uses) > 1 or node.output.is_output:
            return f"%{node.output.name} is read by others too"
    if norm.op is ops.layer_norm:
        return "it is a LayerNorm: a rotation does not preserve the mean"
    if rotation.attrs["amplitude"] != 1:
        return f"the rotation's amplitude {rotation.attrs['amplitude']} would be cancelled by a norm after it"
    head_dim = rotation.output.width // rotation.attrs["heads"]
    if norm.output.width % head_dim:
        return f"it normalizes {norm.output.width} features, not heads of {head_dim}"
    weight = norm.operand("weight")
    if isinstance(weight, Param) and not _is_equal_in_pairs(weight.recipe, rotation, head_dim):
        return f"its weight %{weight.name} may differ within a rotary pair"
    return None if weight is None or isinstance(weight, Param) else f"its weight %{weight.name} is computed"


def _is_equal_in_pairs(weight: Recipe, rotation: Node, head_dim: int) -> bool:
    """Return whether `weight` is a fill, or a literal whose elements are equal within each pair of `rotation`."""
    if isinstance(weight, Full):
        return True
    frequencies = rotation.inputs[2]
    if not isinstance(weight, LiteralRecipe) or frequencies is None:
        return False
    pairs = frequencies.width
    rotary = np.array(weight.values).reshape(-1, head_dim)[:, : 2 * pairs]
    xy = rotary.reshape(-1, pairs, 2) if rotation.attrs["interleaved"] else rotary.reshape(-1, 2, pairs).swapaxes(1, 2)
    return bool((xy[..., 0] == xy[..., 1]).all())


def _reorder_nodes(old: list[Node], new: list[Node]) -> None:
    """Replace the chain of nodes `old` by the same nodes in the order `new`; each keeps the name of its output."""
    last, value = old[-1], old[0].required_operand("x")
    with last.graph.inserting(before=last):
        for node in new:
            value = node.op(value, *node.inputs[1:], **node.attrs)
            node.output.name, value.name = value.name, node.output.name
    replace_uses(last.output, value, rename=False)
    erase_unused(last.graph, old)
