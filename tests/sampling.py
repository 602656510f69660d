"""The part that `make test` tries of cases that take minutes together; ``WEFT_TESTS=all`` (`make test-all`): all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from itertools import product
from typing import Any, TypeVar

import pytest

ALL = os.environ.get("WEFT_TESTS") == "all"
T = TypeVar("T")


def each(step: int, cases: Iterable[T], first: int = 0) -> list[T]:
    """Each `step`-th of `cases`, from the one numbered `first` on; all of them in a full run."""
    return list(cases) if ALL else list(cases)[first::step]


def by_turns(first: Collection[Any], *others: Collection[Any]) -> list[tuple[Any, ...]]:
    """Each value of `first` with one combination of the `others` by turns, and each of these at least once; all of the
    product in a full run."""
    firsts, rest = list(first), list(product(*others))
    if ALL:
        return [(value, *values) for value in firsts for values in rest]
    return [(firsts[i % len(firsts)], *rest[i % len(rest)]) for i in range(max(len(firsts), len(rest)))]


def others_long(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first `count` of `cases` as they are, the others with the mark `long`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if i < count else pytest.mark.long) for i, row in enumerate(rows)]
