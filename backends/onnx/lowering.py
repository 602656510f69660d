"""Lowering of ops to ONNX: a registry of lowerings and the selection among them.

A lowering is a small function for one op on some targets. Its function `when` (node, target) returns None to accept the
node, or the reason for refusing it; "" refuses without a line in the trace. The first registered lowering that accepts
a node is used. A lowering may absorb the producers of its operands: its function `reads` (node, target) then yields the
values that it reads instead of the operands, and a node whose outputs nothing reads is never emitted. So the graph
determines where fused kernels are used; no separate table of supported fusions exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Value
from weft.ir.op import Op
from weft.ir.registry import Alternatives

from ..target import Backend
from .onnx_emitter import Emit

When = Callable[[Node, Backend], str | None]
Reads = Callable[[Node, Backend], Iterable[Value]]
Serves = Callable[[Backend], bool]


def _list_operands(node: Node, target: Backend) -> Iterable[Value]:
    return (v for v in node.inputs if v is not None)


@dataclass(frozen=True)
class OnnxLowering:
    """A lowering of one op to ONNX operators.

    - op, name: name of the op, and of the lowering in traces
    - targets: predicate that accepts the targets it is for
    - opset: the ONNX version that its operators need, or a function of the node that returns it
    - when, reads: the functions that the docstring of this module describes
    - emit: the function (emitter, node) that appends the operators and returns the outputs of the node
    """

    op: str
    name: str
    targets: Serves
    when: When
    reads: Reads
    emit: Emit
    opset: int | Callable[[Node], int] = 0

    def find_refusal(self, node: Node, target: Backend) -> str | None:
        """Return None if the lowering accepts `node` on `target`, else the reason (str) for refusing it; "" is a reason
        without a line in the trace. `targets` is not checked here."""
        opset = self.opset if isinstance(self.opset, int) else self.opset(node)
        if target.opset < opset:
            return f"it needs opset {opset}, not {target.opset}"
        return self.when(node, target)


LOWERINGS: Alternatives[OnnxLowering] = Alternatives("lowered op", "weft.backends.onnx.lowerings", "see `weft ops`")


def contrib(target: Backend) -> bool:
    """Return whether `target` has ONNX Runtime's own operators (com.microsoft)."""
    return target.contrib


def contrib_on(device: str) -> Serves:
    """Return a predicate that accepts targets on `device` with ONNX Runtime's own operators."""
    return lambda target: target.contrib and target.device == device


def standard(target: Backend) -> bool:
    """Return whether `target` has only standard operators."""
    return not target.contrib


def multiplies_codes(target: Backend) -> bool:
    """Return whether ONNX Runtime's own operators multiply by the codes of quantized weights on `target`."""
    return target.contrib and not target.decodes


def decodes(target: Backend) -> bool:
    """Return whether standard operators decode quantized weights on `target`."""
    return not multiplies_codes(target)


def on_cpu(target: Backend) -> bool:
    """Return whether the device of `target` is a CPU."""
    return target.device == "cpu"


def lowering(
    *ops: Op,
    targets: Serves = lambda target: True,
    when: When = lambda node, target: None,
    reads: Reads = _list_operands,
    first: bool = False,
    opset: int | Callable[[Node], int] = 0,
) -> Callable[[Emit], Emit]:
    """Register the decorated function as a lowering of `ops` on targets that the predicate `targets` accepts. `opset`
    is the ONNX version that its operators need (0: all targets have them), or a function of the node; the docstring of
    this module describes `when` and `reads`. The lowering is tried after those registered earlier, or with `first`
    before them."""

    def register(emit: Emit) -> Emit:
        for op in ops:
            new = OnnxLowering(op.name, getattr(emit, "__name__", op.name), targets, when, reads, emit, opset)
            LOWERINGS.put(op.name, new, first)
        return emit

    return register


def list_refusals(node: Node, target: Backend) -> list[str] | None:
    """Return None if a lowering accepts `node` on `target`, else a line for each lowering of its op that has a reason
    to refuse it. If none has a reason, return one line: no lowering is registered."""
    reasons = []
    for candidate in LOWERINGS.get(node.op.name, []):
        if not candidate.targets(target):
            reasons.append(f"{candidate.name}: not for {target.name}")
        elif (reason := candidate.find_refusal(node, target)) is None:
            return None
        elif reason:
            reasons.append(f"{candidate.name}: {reason}")
    return reasons or ["no lowering is registered"]


@dataclass
class Selection:
    """The result of `select_lowerings`.

    - chosen: the lowering of every node to emit; absorbed nodes are absent
    - trace: a line for each lowering that refused a node with a reason before another lowering of its op accepted it
    """

    chosen: dict[Node, OnnxLowering]
    trace: list[str]


def select_lowerings(graph: Graph, target: Backend) -> Selection:
    """Choose a lowering for each node that the outputs of `graph` need, from the outputs backwards, so that absorbed
    nodes get none; return the `Selection`. Raises WeftError if no lowering accepts a node; the message has its op and
    each reason."""
    needed: set[Value] = set(graph.outputs.values())
    selection = Selection({}, [])
    # In reverse topological order all readers of a node have added the values that they read before it is visited.
    for node in reversed(graph.nodes):
        if not needed.intersection(node.outputs):
            continue
        for candidate in LOWERINGS.get(node.op.name, []):
            if not candidate.targets(target):
                continue
            if (reason := candidate.find_refusal(node, target)) is None:
                selection.chosen[node] = candidate
                needed.update(candidate.reads(node, target))
                break
            if reason:
                selection.trace.append(f"{node.outputs[0].name}: {candidate.name} refused: {reason}")
        else:
            reasons = "; ".join(list_refusals(node, target) or [])
            raise WeftError(f"target {target.name} cannot run {node.op.name} in {node.scope or 'the model'}: {reasons}")
    selection.trace.reverse()
    return selection
