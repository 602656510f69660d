"""Marks of a comparison: operations that are new, removed or changed, with the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KEPT, REMOVED, NEW, CHANGED = SIGNS = ("kept", "removed", "new", "changed")


def sign_to_kind(sign: str) -> str:
    """Return the name of the kind of parts with `sign` (one of `SIGNS`) in a comparison, such as "sign-new"."""
    return f"sign-{sign}"


@dataclass(frozen=True)
class Change:
    """A changed property (`what`) of an operation, with the texts of its old and new value for a panel. `named`: these
    texts contain names of values or tensors, which differ between layers."""

    what: str
    before: str
    after: str
    named: bool = False


@dataclass(frozen=True)
class Mark:
    """A sign of `SIGNS`; `words` are lines for the operation's box ("was 9 heads"), `changes` lists all differences.
    `other`: the name of the corresponding operation in the other network, "" without one."""

    sign: str = KEPT
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    other: str = ""

    @property
    def alike(self) -> str:
        """Return a key that is equal for operations of different layers whose changes differ at most in names."""
        changes = [(c.what, *(() if c.named else (c.before, c.after))) for c in self.changes]
        return f"{self.sign} {self.words} {changes}"


def find_common_sign(marks: Iterable[Mark | None]) -> str:
    """Return the common sign of `marks`, or "changed" if their signs differ; "" if all are None (no comparison)."""
    signs = {mark.sign for mark in marks if mark is not None}
    return signs.pop() if len(signs) == 1 else CHANGED if signs else ""


def count_signs(marks: Iterable[Mark | None]) -> str:
    """Return the number of operations per sign, except unchanged operations, as text: "2 removed, 1 changed"."""
    counts = Counter(mark.sign for mark in marks if mark is not None)
    return ", ".join(f"{counts[sign]} {sign}" for sign in SIGNS if sign != KEPT and counts[sign])
