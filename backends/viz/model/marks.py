"""Marks of a comparison: operations that are new, removed or changed, with the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KEPT, REMOVED, NEW, CHANGED = SIGNS = ("kept", "removed", "new", "changed")


def kind(sign: str) -> str:
    """The kind of parts with that sign, which has a look of its own."""
    return f"sign-{sign}"


@dataclass(frozen=True)
class Change:
    """A property of an operation, `before` and `after`, as a panel shows it.

    `named` says that these texts hold names, which are others in every layer.
    """

    what: str
    before: str
    after: str
    named: bool = False


@dataclass(frozen=True)
class Mark:
    """One of the `SIGNS`; `words` tell on the box what changed ("was 9 heads, 3 KV heads"), `changes` tell all of it.

    `other` is what the operation is called in the other network, if it is there.
    """

    sign: str = KEPT
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    other: str = ""

    @property
    def alike(self) -> str:
        """Equal for operations of several layers that changed in the same way."""
        changes = [(c.what, *(() if c.named else (c.before, c.after))) for c in self.changes]
        return f"{self.sign} {self.words} {changes}"


def common(marks: Iterable[Mark | None]) -> str:
    """The sign of a part by those of its operations: that of all of them, or changed; "" where nothing is compared."""
    signs = {mark.sign for mark in marks if mark is not None}
    return signs.pop() if len(signs) == 1 else CHANGED if signs else ""


def counted(marks: Iterable[Mark | None]) -> str:
    """Count operations by sign, without unchanged ones: "2 removed, 1 changed"."""
    counts = Counter(mark.sign for mark in marks if mark is not None)
    return ", ".join(f"{counts[sign]} {sign}" for sign in SIGNS if sign != KEPT and counts[sign])
