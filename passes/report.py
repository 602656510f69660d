"""Report of a pipeline run: rewrites and refusals of each pass, and the cost of the graph afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.ir import Graph

from .analysis.costs import DEFAULT_SIZES, cost, weight_bytes
from .core.base import Pass
from .core.trace import Trace

_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class GraphCost:
    """The FLOPs of a run on 64 tokens, and the bytes of all parameters."""

    flops: int
    weights: int

    @classmethod
    def of(cls, graph: Graph) -> GraphCost:
        """Return the price of one run of `graph`."""
        flops = cost(graph).flops
        assert isinstance(flops, int)
        return cls(flops, weight_bytes(graph))


@dataclass(frozen=True)
class Record:
    """One pass of a run: its trace, its time without hooks, and the number of nodes before and after.

    If asked for: the prices before and after, the evidence that the check of its effect gave (`shown`), and the largest
    relative difference of outputs that the check measured.
    """

    phase: str
    applied: Pass
    seconds: float
    trace: Trace
    nodes: tuple[int, int]
    prices: tuple[GraphCost, GraphCost] | None = None
    shown: str = ""
    difference: float | None = None

    @property
    def rewrites(self) -> int:
        return self.trace.rewrites.total()

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.trace.lines)

    @property
    def summary(self) -> list[str]:
        """Lines of the trace, with equal lines of several layers merged into one with their count."""
        return _merge_layers(self.lines)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user even without a trace."""
        return [line for line in self.summary if ": warning: " in line]

    @property
    def idle(self) -> str:
        """Reason why the pass rewrote nothing, as a sentence that names the pass; "" if it rewrote something."""
        if self.rewrites or self.nodes[0] != self.nodes[1]:
            return ""
        why = self.trace.nearest.removeprefix(f"{self.applied.name}: ")
        return f"{self.applied} rewrote nothing: {why or 'no match found'}"

    def __str__(self) -> str:
        rewrites = f"{self.rewrites} rewrite{'s' * (self.rewrites != 1)}"
        lines = [f"{self.applied}: {rewrites}, {_change(*self.nodes)} nodes, {self.seconds * 1e3:.1f} ms"]
        if self.prices is not None:
            before, after = self.prices
            flops, weights = _change(before.flops, after.flops), _change(before.weights, after.weights)
            lines.append(f"  {flops} FLOPs for {DEFAULT_SIZES['seq']} tokens, {weights} bytes of parameters")
        if self.shown:
            lines.append(f"  shown ({self.applied.effect}): {self.shown}")
        return "\n".join([*lines, *(f"  {line}" for line in self.summary)])


@dataclass
class Report:
    """Records of a run, one per pass, with costs if `priced`."""

    records: list[Record] = field(default_factory=list)
    priced: bool = False

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.records)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))


def _change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def _merge_layers(lines: Iterable[str]) -> list[str]:
    """Merge `lines` that differ in the number of the layer only, and append their count, as in ``(× 12)``."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(_LAYER.sub(".", line), []).append(line)
    return [same[0] + (f" (× {len(same)})" if len(same) > 1 else "") for same in alike.values()]
