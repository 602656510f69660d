"""Removal of norms that later norms make redundant."""

from __future__ import annotations

from weft.ir import Graph, Node, ops

from ... import Pass, Trace
from ...edits.edit import erase_unused, replace_uses


class DropDoubleNorm(Pass):
    """Remove an RMSNorm whose result is only used through a later norm: norm(W · rms(x)) → norm(W x).

    RMSNorm multiplies a row (the features of a token) by a scalar. Linears without a bias, splits into heads and
    rotations keep this factor, and a norm with ε = 0 divides by it. With ε > 0 the result would change: the relative
    error is about ε/2 times the change of 1/mean(y²), with y the input of the later norm.

    Condition: all paths from the norm lead, through linear maps of single rows without biases, to RMSNorms or
    LayerNorms with ε = 0; the norm has no weight (run fold-norm-scale before).

    Source: FlashNorm (Graef 2024, 2407.09577, from version 5), where ε is neglected.

    Example drop-double-norm::

        graph example {
          input %x: f32[batch, seq, 4]
          param %down.weight: f32[3, 4] = normal([3, 4], std=0.5, stream="down")
          param %norm.weight: f32[3] = normal([3], std=0.5, stream="g", mean=1.0)
          %first: f32[batch, seq, 4] = rms_norm(%x)
          %down: f32[batch, seq, 3] = linear(%first, %down.weight)
          %second: f32[batch, seq, 3] = rms_norm(%down, %norm.weight, eps=0.0)
          output y = %second
        }
    """

    name = "drop-double-norm"
    effect = "exact"
    purpose = "Fold into weights"

    def run(self, graph: Graph, trace: Trace) -> None:
        for norm in graph.nodes:
            if norm.op is not ops.rms_norm:
                continue
            later_norms, other_readers = _find_readers(norm)
            if not later_norms:
                continue
            reason, norm_with_eps = None, next((n for n in later_norms if n.attrs["eps"] != 0), None)
            if other_readers:
                reason = f"its scale reaches {other_readers[0]} without a norm that removes it"
            elif norm_with_eps is not None:
                eps, at = norm_with_eps.attrs["eps"], norm_with_eps.output.name
                reason = f"%{at} has eps={eps}, which is not negligible for rows of this size"
            elif norm.operand("weight") is not None:
                reason = "it has a weight; run fold-norm-scale before"
            trace.record_result(self.name, norm.output.name, reason)
            if reason is None:
                replace_uses(norm.output, norm.required_operand("x"), rename=False)
                erase_unused(graph, [norm])


def _find_readers(norm: Node) -> tuple[list[Node], list[str]]:
    """Return (norms, names of other readers and graph outputs) that the scale of `norm` reaches.
    The scale passes through nodes for which `_is_homogeneous` holds."""
    lead = norm.output.shape[:-1]
    later_norms: list[Node] = []
    other_readers: list[str] = []
    scaled_values = [norm.output]
    for value in scaled_values:
        if value.is_output:
            other_readers.append(f"the output %{value.name}")
        for node, i in value.uses:
            if i == 0 and node.op in (ops.rms_norm, ops.layer_norm):
                later_norms.append(node)
            elif i == 0 and _is_homogeneous(node, lead):
                scaled_values += node.outputs
            else:
                other_readers.append(f"{node.op.name} (%{node.output.name})")
    return later_norms, other_readers


def _is_homogeneous(node: Node, lead: tuple[object, ...]) -> bool:
    """Return whether scaling a row of the input scales the same row of the output equally.
    A row is an index of the leading axes, whose sizes are `lead`."""
    if not all(len(v.shape) > len(lead) and v.shape[: len(lead)] == lead for v in node.outputs):
        return False
    match node.op:
        case ops.linear:
            return node.operand("bias") is None
        case ops.affine:
            return bool(node.attrs["plus"] == 0)
        case ops.split | ops.slice_:
            return bool(node.attrs["axis"] % len(node.output.shape) >= len(lead))
    return node.op in (ops.reshape, ops.rope)
