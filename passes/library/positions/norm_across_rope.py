"""Norms of queries and keys on the other side of the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.recipes import Full
from weft.ir.recipes import Literal as Numbers

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import drop, replace_uses

_NORMS = (ops.rms_norm, ops.layer_norm)


@dataclass(frozen=True)
class NormAcrossRope(Pass):
    """Move the RMSNorm of queries or keys `to` behind the rotation, or to before it.

    A rotation R keeps lengths, so that R(x / rms(x)) = R x / rms(R x): where keys are cached turned but not normed, or
    a kernel turns before it norms, the norm stands behind.

    Condition: the norm has no weight, or one that is equal within every pair: R diag(g) = diag(g) R. Any other weight
    is refused (so is a LayerNorm: rotations do not keep means), and a rotation with an amplitude, which a norm behind
    it would divide away, and values between that something else reads.

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
          %turned: f32[batch, seq, 16] = rope(%joined, %at, %frequencies, heads=4)
          output y = %turned
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
            steps = _before(node) if self.to == "behind" else _behind(node)
            if not steps:
                continue
            now, then = ([*steps, node], [node, *steps]) if self.to == "behind" else ([node, *steps], [*steps, node])
            if (reason := _refusal(node, steps, now)) is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            trace.fired(self.name, node.output.name)
            _reorder(now, then)


def _before(rotation: Node) -> list[Node]:
    """The norm that makes what `rotation` turns, with the reshapes around it; in order."""
    chain: list[Node] = []
    value = rotation.inputs[0]
    while value is not None and (node := value.producer) is not None and node.op in (ops.reshape, *_NORMS):
        if node.op in _NORMS and any(n.op in _NORMS for n in chain):
            break
        chain.insert(0, node)
        value = node.inputs[0]
    return _one_norm(chain, chain[0].inputs[0] if chain else None)


def _behind(rotation: Node) -> list[Node]:
    """The norm that reads what `rotation` makes, with the reshapes around it; in order."""
    chain: list[Node] = []
    value = rotation.output
    while len(value.uses) == 1 and (node := value.uses[0][0]).op in (ops.reshape, *_NORMS):
        if node.op in _NORMS and any(n.op in _NORMS for n in chain):
            break
        chain.append(node)
        value = node.output
    return _one_norm(chain, rotation.output)


def _one_norm(steps: list[Node], start: Value | None) -> list[Node]:
    """`steps` if they hold a norm and lead from `start` to a value of its type, else nothing."""
    whole = start is not None and bool(steps) and steps[-1].output.type == start.type
    return steps if whole and any(n.op in _NORMS for n in steps) else []


def _refusal(rotation: Node, steps: list[Node], chain: list[Node]) -> str | None:
    """Say why the norm among `steps` cannot move across `rotation`, given their whole `chain`; None if it can."""
    (norm,) = (n for n in steps if n.op in _NORMS)
    for node in chain[:-1]:
        if len(node.output.uses) > 1 or node.output.is_output:
            return f"%{node.output.name} is read by others too"
    if norm.op is ops.layer_norm:
        return "it is a LayerNorm: a rotation does not keep the mean"
    if rotation.attrs["amplitude"] != 1:
        return f"the rotation's amplitude {rotation.attrs['amplitude']} would be normed away, or be none before"
    each = rotation.output.width // rotation.attrs["heads"]
    if norm.output.width % each:
        return f"it norms {norm.output.width} numbers, not heads of {each}"
    weight = norm.operand("weight")
    if isinstance(weight, Param) and not _equal_in_pairs(weight.recipe, rotation, each):
        return f"its weight %{weight.name} may differ within a pair that is turned"
    return None if weight is None or isinstance(weight, Param) else f"its weight %{weight.name} is computed"


def _equal_in_pairs(weight: Recipe, rotation: Node, each: int) -> bool:
    """Return whether `weight` is provably equal within each pair that `rotation` rotates."""
    if isinstance(weight, Full):
        return True
    frequencies = rotation.inputs[2]
    if not isinstance(weight, Numbers) or frequencies is None:
        return False
    pairs = frequencies.width
    turned = np.array(weight.values).reshape(-1, each)[:, : 2 * pairs]
    two = turned.reshape(-1, pairs, 2) if rotation.attrs["interleaved"] else turned.reshape(-1, 2, pairs).swapaxes(1, 2)
    return bool((two[..., 0] == two[..., 1]).all())


def _reorder(now: list[Node], then: list[Node]) -> None:
    """Apply the nodes of the chain `now` in the order `then`; each keeps the name of what it makes."""
    last, value = now[-1], now[0].inputs[0]
    with last.graph.inserting(before=last):
        for node in then:
            value = node.op(value, *node.inputs[1:], **node.attrs)
            node.output.name, value.name = value.name, node.output.name
    assert value is not None
    replace_uses(last.output, value, rename=False)
    drop(last.graph, now)
