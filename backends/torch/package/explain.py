"""Explain which kernel or PyTorch fallback computes each part of a decode step, with reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.op import Trait
from weft.passes import Report, Trace
from weft.passes.default import FUSE_DECODE

from ..decode.lower_step import DecodeStep, explain_refusal
from ..decode.step_emitter import Implementation
from ..kernels.shared import small_batch_linear as rows
from ..kernels.shared.launch import assume_capability

HOPPER = (9, 0)  # the default compute capability


@dataclass(frozen=True)
class Explanation:
    """The implementation of `node` in a decode step: a `kernel`, or PyTorch if that is "". count: number of nodes
    in this entry. reason: why no kernel computes them, or why they are not fused with more nodes."""

    node: str
    op: str
    count: int
    kernel: str = ""
    reason: str = ""

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        why = f", {self.reason}" if self.reason else ""
        return f"{self.node} ({self.op}{times}): {self.kernel or 'torch'}{why}"


def explain_step(
    graph: Graph,
    step: DecodeStep | None,
    report: Report,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] | None = HOPPER,
) -> list[Explanation]:
    """Return an entry for each node of the fused graph that `step` computes; nodes that differ only in digits share
    one. graph: the model. report: has the traces of the fusion passes. capability: compute capability of a CUDA device,
    or None for a CPU, where PyTorch runs instead of kernels. If `step` is None, the only entry has the reason."""
    if step is None:
        reason = f"no decode step, the model itself runs: {explain_refusal(graph)}"
        return [Explanation(graph.name, "graph", 1, reason=reason)]
    trace = _merge_traces(report)
    chosen, stated = {choice.node: choice for choice in step.choices}, {s.node for s in step.program.statements}
    entries: dict[str, Explanation] = {}
    for node in (n for n in step.graph.nodes if n in stated or n in chosen):
        choice = chosen.get(node, Implementation(node))
        unfused = "" if choice.reason else _explain_unfused(node, trace)
        explained = _explain_choice(choice, unfused, dtype, capability)
        like = re.sub(r"\d+", "*", f"{node.output.name} {explained}")
        entries.setdefault(like, replace(explained, node=node.output.name, count=0))
        entries[like] = replace(entries[like], count=entries[like].count + 1)
    return list(entries.values())


def _merge_traces(report: Report) -> Trace:
    """Return the traces of the phase fuse-decode as one: all refusals, and for each value the deepest partial match."""
    trace = Trace()
    for record in (r for r in report.records if r.phase == FUSE_DECODE.name):
        trace.refusals += record.trace.refusals
        for at, miss in record.trace.near.items():
            if at not in trace.near or miss.depth > trace.near[at].depth:
                trace.near[at] = miss
    return trace


def _explain_unfused(node: Node, trace: Trace) -> str:
    """Return the reason why `node` is not fused further; "" if there is none, or nothing left to fuse."""
    name, maker = node.output.name, node.required_operand("q").producer if node.op is ops.attention else None
    if reason := next((refused.reason for refused in trace.refusals if refused.at == name), ""):
        return reason
    fusible = node.op is ops.moe or (maker is not None and Trait.FUSED not in maker.op.traits)
    return f"not fused with the producers of its operands: {trace.near[name]}" if fusible and name in trace.near else ""


def explain_cpu(dtype: torch.dtype) -> str:
    """Return a line that states how this CPU multiplies weights of `dtype` in a decode step."""
    reason = rows.refusal(dtype)
    return "on this CPU: torch, weights packed by oneDNN" if reason is None else f"on this CPU: F.linear, {reason}"


def _explain_choice(
    choice: Implementation, unfused: str, dtype: torch.dtype, capability: tuple[int, int] | None
) -> Explanation:
    """Return the explanation of `choice` without the node's name; `unfused`: the reason why it is not fused further."""
    op, reasons = choice.node.op.name, ["Triton does not run on a CPU"]
    if capability is not None:
        with assume_capability(capability):
            reasons = [reason for refused in choice.refusals if (reason := refused(dtype))]
    if choice.kernel and not reasons:
        return Explanation("", op, 1, choice.kernel, unfused)
    reason = f"as {choice.kernel}: {reasons[0]}" if choice.kernel else choice.reason or unfused
    return Explanation("", op, 1, reason=reason)
