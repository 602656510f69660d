"""Trace of a pass: rewrites counted by rule, notes, and the near misses of rules that never fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Miss:
    """A failed match at the node that `at` describes. Misses of higher `depth` (nodes matched before) are nearer."""

    depth: float
    at: str
    reason: str

    def __str__(self) -> str:
        return f"at {self.at}: {self.reason}"


@dataclass(frozen=True)
class RefusedSite:
    """A site (the value named `at`) that `rule` examined and left unchanged, with the reason."""

    rule: str
    at: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: left %{self.at} alone: {self.reason}"


@dataclass
class Trace:
    """The log of a pass.

    lines: all messages in order, including refusals and misses.
    rewrites: rule name -> number of rewrites.
    refusals: the sites that rules left unchanged.
    misses: the nearest miss of every rule that never fired.
    near: name of a node's first output -> the nearest miss of any rule at that node; only nodes with a failed match.
    progress: called as progress(done, total) by passes that take long.
    store: folder for the results of long fits, with which a later run continues; None without one.
    """

    lines: list[str] = field(default_factory=list)
    rewrites: Counter[str] = field(default_factory=Counter)
    refusals: list[RefusedSite] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    near: dict[str, Miss] = field(default_factory=dict)
    progress: Callable[[int, int], None] = field(default=lambda done, total: None, repr=False, compare=False)
    store: Path | None = field(default=None, repr=False, compare=False)

    def record_rewrite(self, rule: str, at: str) -> None:
        """Count one rewrite by `rule` at the value named `at`."""
        self.rewrites[rule] += 1
        self.lines.append(f"{rule}: rewrote %{at}")

    def refuse(self, rule: str, at: str, reason: str) -> None:
        """Record that `rule` leaves the value named `at` unchanged, because of `reason`."""
        self.refusals.append(RefusedSite(rule, at, reason))
        self.lines.append(str(self.refusals[-1]))

    def record_result(self, rule: str, at: str, reason: str | None) -> None:
        """Record a rewrite by `rule` at `at` if `reason` is None, nothing if it is "", and otherwise a refusal."""
        if reason is None:
            self.record_rewrite(rule, at)
        elif reason:
            self.refuse(rule, at, reason)

    def note(self, text: str) -> None:
        """Add the line `text` for the user, such as a warning."""
        self.lines.append(text)

    def record_miss(self, rule: str, miss: Miss | None) -> None:
        """Record that `rule` rewrote nothing; `miss` is its nearest miss, or None without any."""
        self.misses += [miss] if miss else []
        self.lines.append(f"{rule}: fired 0 times" + (f"; nearest miss {miss}" if miss else "; nothing resembles it"))

    @property
    def nearest(self) -> str:
        """The reason why a pass rewrote nothing: the first refusal, else the nearest miss, else the last line or ""."""
        if self.refusals:
            return f"left %{self.refusals[0].at} alone: {self.refusals[0].reason}"
        if self.misses:
            return f"nearest miss {max(self.misses, key=lambda miss: miss.depth)}"
        return self.lines[-1] if self.lines else ""
