"""Explain the kernel or PyTorch fallback of each part of a decode step, with reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from weft.ir.graph import Graph, Node

from ..decode.emitter import Choice
from ..decode.lowering import lower_step
from ..kernels.shared import rows
from ..kernels.shared.launch import assumed
from ..lower.lower import lower

HOPPER = (9, 0)  # the compute capability that is asked about by default


@dataclass(frozen=True)
class Explained:
    """Computation of `node`, or a part of it, in a decode step, and of its like in `count` layers: by `kernel`,
    together with `parts`; or by PyTorch, with the `reason` if a kernel exists."""

    node: str
    op: str
    count: int
    kernel: str = ""
    parts: str = ""
    reason: str = ""

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        more = f" with {self.parts}" if self.parts else f", {self.reason}" if self.reason else ""
        return f"{self.node} ({self.op}{times}): {self.kernel or 'torch'}{more}"


def explain(
    graph: Graph, dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] | None = HOPPER
) -> list[Explained]:
    """List how a decode step computes each node; equal nodes of several layers appear once.

    `capability` is that of a CUDA device, or None for a CPU, where torch computes what a kernel would.
    """
    step = lower_step(lower(graph))
    if isinstance(step, str):
        return [Explained(graph.name, "graph", 1, reason=f"no decode step, the model itself runs: {step}")]
    chosen: dict[Node, list[Choice]] = {}
    for choice in step.choices:
        chosen.setdefault(choice.node, []).append(choice)
    counts: dict[tuple[str, Explained], int] = {}
    first: dict[tuple[str, Explained], str] = {}
    for node in dict.fromkeys(s.node for s in step.program.statements if s.node is not None):
        for choice in chosen.get(node, [Choice(node)]):
            explained = _told(choice, dtype, capability)
            key = re.sub(r"\d+", "*", node.output.name), explained
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, node.output.name)
    return [replace(explained, node=first[name, explained], count=count) for (name, explained), count in counts.items()]


def explain_cpu(dtype: torch.dtype) -> str:
    """Return a line on how this CPU multiplies the few rows of a decode step by weights of `dtype`."""
    reason = rows.refusal(dtype)
    return "on this CPU: torch, weights packed by oneDNN" if reason is None else f"on this CPU: F.linear, {reason}"


def _told(choice: Choice, dtype: torch.dtype, capability: tuple[int, int] | None) -> Explained:
    """Explain one choice, without its node."""
    reasons = ["Triton does not run on a CPU"]
    if capability is not None:
        with assumed(capability):
            reasons = [reason for refused in choice.refusals if (reason := refused(dtype))]
    if choice.kernel and not reasons:
        return Explained("", choice.node.op.name, 1, choice.kernel, choice.parts)
    reason = f"as {choice.kernel}: {reasons[0]}" if choice.kernel else choice.reason
    return Explained("", choice.node.op.name, 1, reason=reason)
