"""Explain the kernel or PyTorch fallback of each part of a decode step, with reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.op import Trait
from weft.passes import Report, Trace
from weft.passes.default import FUSE_DECODE

from ..decode.emitter import Choice
from ..decode.lowering import Step, explain_refusal
from ..kernels.shared import rows
from ..kernels.shared.launch import assumed

HOPPER = (9, 0)  # the compute capability that is asked about by default


@dataclass(frozen=True)
class Explained:
    """Computation of `node` of a fused graph, and of its like in `count` layers, in a decode step: by `kernel`, or by
    PyTorch; with the `reason` if a kernel exists, or one that would compute more."""

    node: str
    op: str
    count: int
    kernel: str = ""
    reason: str = ""

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        why = f", {self.reason}" if self.reason else ""
        return f"{self.node} ({self.op}{times}): {self.kernel or 'torch'}{why}"


def explain(
    graph: Graph,
    step: Step | None,
    report: Report,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] | None = HOPPER,
) -> list[Explained]:
    """List how the decode `step` of `graph` computes each node of its fused graph; equal nodes of several layers appear
    once. `report` tells what passes fused, and what they did not.

    `capability` is that of a CUDA device, or None for a CPU, where torch computes what a kernel would.
    """
    if step is None:
        return [
            Explained(graph.name, "graph", 1, reason=f"no decode step, the model itself runs: {explain_refusal(graph)}")
        ]
    trace = _joined(report)
    chosen, stated = {choice.node: choice for choice in step.choices}, {s.node for s in step.program.statements}
    found: dict[str, Explained] = {}
    for node in (n for n in step.graph.nodes if n in stated or n in chosen):
        choice = chosen.get(node, Choice(node))
        explained = _told(choice, _unfused(node, trace) if not choice.reason else "", dtype, capability)
        like = re.sub(r"\d+", "*", f"{node.output.name} {explained}")
        found.setdefault(like, replace(explained, node=node.output.name, count=0))
        found[like] = replace(found[like], count=found[like].count + 1)
    return list(found.values())


def _joined(report: Report) -> Trace:
    """Merge the traces of the passes of the phase fuse-decode: all refusals, and the nearest miss at each value."""
    trace = Trace()
    for record in (r for r in report.records if r.phase == FUSE_DECODE.name):
        trace.refusals += record.trace.refusals
        for at, miss in record.trace.near.items():
            if at not in trace.near or miss.depth > trace.near[at].depth:
                trace.near[at] = miss
    return trace


def _unfused(node: Node, trace: Trace) -> str:
    """Return why `node` is not fused with more; nothing where there is no more."""
    name, made = node.output.name, node.required("q").producer if node.op is ops.attention else None
    if reason := next((refused.reason for refused in trace.refusals if refused.at == name), ""):
        return reason
    apart = node.op is ops.moe or (made is not None and Trait.FUSED not in made.op.traits)
    return f"not fused with what makes its operands: {trace.near[name]}" if apart and name in trace.near else ""


def explain_cpu(dtype: torch.dtype) -> str:
    """Return a line on how this CPU multiplies the few rows of a decode step by weights of `dtype`."""
    reason = rows.refusal(dtype)
    return "on this CPU: torch, weights packed by oneDNN" if reason is None else f"on this CPU: F.linear, {reason}"


def _told(choice: Choice, unfused: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> Explained:
    """Explain one choice, without its node, of a node that is `unfused` for a reason."""
    op, reasons = choice.node.op.name, ["Triton does not run on a CPU"]
    if capability is not None:
        with assumed(capability):
            reasons = [reason for refused in choice.refusals if (reason := refused(dtype))]
    if choice.kernel and not reasons:
        return Explained("", op, 1, choice.kernel, unfused)
    return Explained(
        "", op, 1, reason=f"as {choice.kernel}: {reasons[0]}" if choice.kernel else choice.reason or unfused
    )
