"""Trace of a pass: rewrites counted by rule, notes, and the near misses of rules that never fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Miss:
    """Reason of a failed match. `depth` is the number of nodes that matched before it: higher is nearer."""

    depth: float
    at: str
    reason: str

    def __str__(self) -> str:
        return f"at {self.at}: {self.reason}"


@dataclass(frozen=True)
class Refused:
    """A site that `rule` looked at and left alone."""

    rule: str
    at: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: left %{self.at} alone: {self.reason}"


@dataclass
class Trace:
    """`lines` in order of writing; `rewrites` by rule; `refusals` and the nearest `misses` of rules that never fired,
    which are among the lines too; `near` has the nearest miss by the value at which it was. A pass that takes long says
    how far it is by `progress(done, in all)`."""

    lines: list[str] = field(default_factory=list)
    rewrites: Counter[str] = field(default_factory=Counter)
    refusals: list[Refused] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    near: dict[str, Miss] = field(default_factory=dict)
    progress: Callable[[int, int], None] = field(default=lambda done, total: None, repr=False, compare=False)

    def fired(self, rule: str, at: str) -> None:
        """One rewrite by `rule` at the value called `at`."""
        self.rewrites[rule] += 1
        self.lines.append(f"{rule}: rewrote %{at}")

    def refuse(self, rule: str, at: str, reason: str) -> None:
        """`rule` leaves the value called `at` alone, because of `reason`."""
        self.refusals.append(Refused(rule, at, reason))
        self.lines.append(str(self.refusals[-1]))

    def note(self, text: str) -> None:
        """A line for the reader, such as what was left alone and why."""
        self.lines.append(text)

    def missed(self, rule: str, miss: Miss | None) -> None:
        """`rule` fired nowhere; `miss` is the nearest it came."""
        self.misses += [miss] if miss else []
        self.lines.append(f"{rule}: fired 0 times" + (f"; nearest miss {miss}" if miss else "; nothing resembles it"))

    @property
    def nearest(self) -> str:
        """Best explanation of a pass that did nothing: the first refusal, else the nearest miss, else the last line."""
        if self.refusals:
            return f"left %{self.refusals[0].at} alone: {self.refusals[0].reason}"
        if self.misses:
            return f"nearest miss {max(self.misses, key=lambda miss: miss.depth)}"
        return self.lines[-1] if self.lines else ""
