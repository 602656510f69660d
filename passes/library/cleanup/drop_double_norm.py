"""A norm that another norm makes idle."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Node, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import drop, replace_uses


@dataclass(frozen=True)
class DropDoubleNorm(Pass):
    """Leave out an RMSNorm where everything that it leads to is normalized again: norm(W · rms(x)) → norm(W x).

    RMSNorm multiplies a row by a number, bias-free linears, splits into heads and rotations pass that on, and a norm
    takes it away again, if its ε is 0. With ε > 0 it does not, for ε then stands beside rows of another size: the
    result is off by about ε/2 times what 1/mean(y²) of the rows y before the second norm differs by.

    Condition: all ways from the norm lead, through linear maps of single rows without biases, to RMSNorms or LayerNorms
    of ε = 0; the norm has no weight (run fold-norm-scale before).

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
            seconds, others = _ends(norm)
            if not seconds:
                continue
            x, wanting = norm.inputs[0], [n for n in seconds if n.attrs["eps"] != 0]
            assert x is not None
            if others:
                trace.refuse(
                    self.name, norm.output.name, f"its scale goes into {others[0]}, where no norm takes it away"
                )
            elif wanting:
                eps, at = wanting[0].attrs["eps"], wanting[0].output.name
                trace.refuse(
                    self.name, norm.output.name, f"%{at} has eps={eps}, which counts against rows of this size"
                )
            elif norm.operand("weight") is not None:
                trace.refuse(self.name, norm.output.name, "it has a weight; run fold-norm-scale before")
            else:
                trace.fired(self.name, norm.output.name)
                replace_uses(norm.output, x, rename=False)
                drop(graph, [norm])


def _ends(norm: Node) -> tuple[list[Node], list[str]]:
    """The norms that the scale of `norm` reaches through linear maps of single rows, and what else it reaches."""
    lead = norm.output.shape[:-1]
    seconds: list[Node] = []
    others: list[str] = []
    waiting = [norm.output]
    for value in waiting:
        if value.is_output:
            others.append(f"the output %{value.name}")
        for node, i in value.uses:
            if i == 0 and node.op in (ops.rms_norm, ops.layer_norm):
                seconds.append(node)
            elif i == 0 and _scales(node, lead):
                waiting += node.outputs
            else:
                others.append(f"{node.op.name} (%{node.output.name})")
    return seconds, others


def _scales(node: Node, lead: tuple[object, ...]) -> bool:
    """Return whether scaling a row (of leading axes `lead`) scales the result of `node` equally."""
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
