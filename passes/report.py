"""Report of a pipeline run: rewrites and refusals of each pass, and the cost of the graph afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weft.ir import Graph

from .analysis.costs import DEFAULT_SIZES, compute_cost, count_weight_bytes
from .core.base import Pass
from .core.trace import Trace

_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class GraphCost:
    """The cost of a graph: `flops` of one run on 64 tokens, and `weights`, the bytes of all parameters."""

    flops: int
    weights: int

    @classmethod
    def of(cls, graph: Graph) -> GraphCost:
        """Return the cost of `graph`: FLOPs at the default sizes (one sequence of 64 tokens), bytes of parameters."""
        flops = compute_cost(graph).flops
        assert isinstance(flops, int)
        return cls(flops, count_weight_bytes(graph))


@dataclass(frozen=True)
class PassRecord:
    """One pass of a run.

    phase: the name of the phase. applied: the pass. seconds: its running time, without checks and hooks.
    nodes, costs: node counts and costs (before, after); costs are None unless the report is `priced`.
    evidence: a sentence that describes the check; "" if it did not run.
    difference: the largest relative difference that the check measured; None without one.
    """

    phase: str
    applied: Pass
    seconds: float
    trace: Trace
    nodes: tuple[int, int]
    costs: tuple[GraphCost, GraphCost] | None = None
    evidence: str = ""
    difference: float | None = None

    @property
    def rewrites(self) -> int:
        return self.trace.rewrites.total()

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.trace.lines)

    @property
    def summary(self) -> list[str]:
        """The lines of the trace, merged with a count where they differ only in the layer number."""
        return _merge_layers(self.lines)

    @property
    def warnings(self) -> list[str]:
        """The lines of `summary` that contain ": warning: "."""
        return [line for line in self.summary if ": warning: " in line]

    @property
    def idle(self) -> str:
        """A sentence why the pass rewrote nothing; "" if it recorded a rewrite or changed the number of nodes."""
        if self.rewrites or self.nodes[0] != self.nodes[1]:
            return ""
        why = self.trace.nearest.removeprefix(f"{self.applied.name}: ")
        return f"{self.applied} rewrote nothing: {why or 'no match found'}"

    def json(self) -> dict[str, Any]:
        """Return the record as plain data; `checked` is the evidence, and `notes` are warnings and idleness."""
        return {
            "pass": str(self.applied),
            "phase": self.phase,
            "effect": self.applied.effect,
            "rewrites": dict(self.trace.rewrites),
            "nodes": list(self.nodes),
            "checked": self.evidence or None,
            "difference": self.difference,
            "notes": [*self.warnings, *filter(None, [self.idle])],
        }

    def __str__(self) -> str:
        rewrites = f"{self.rewrites} rewrite{'s' * (self.rewrites != 1)}"
        lines = [f"{self.applied}: {rewrites}, {_format_change(*self.nodes)} nodes, {self.seconds * 1e3:.1f} ms"]
        if self.costs is not None:
            before, after = self.costs
            flops, weights = _format_change(before.flops, after.flops), _format_change(before.weights, after.weights)
            lines.append(f"  {flops} FLOPs for {DEFAULT_SIZES['seq']} tokens, {weights} bytes of parameters")
        if self.evidence:
            lines.append(f"  shown ({self.applied.effect}): {self.evidence}")
        return "\n".join([*lines, *(f"  {line}" for line in self.summary)])


@dataclass
class Report:
    """Records of a run, one per pass; with `priced`, they contain the costs before and after each pass."""

    records: list[PassRecord] = field(default_factory=list)
    priced: bool = False

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))


def _format_change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def _merge_layers(lines: Iterable[str]) -> list[str]:
    """Merge `lines` that differ only in the layer number: keep the first, followed by the count, as in ``(× 12)``."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(_LAYER.sub(".", line), []).append(line)
    return [same[0] + (f" (× {len(same)})" if len(same) > 1 else "") for same in alike.values()]
