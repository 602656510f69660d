"""The part that `make test` tries of cases that take minutes together; ``WEFT_TESTS=all`` (`make test-all`): all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

ALL = os.environ.get("WEFT_TESTS") == "all"
T = TypeVar("T")


def each(step: int, cases: Iterable[T], first: int = 0) -> list[T]:
    """Each `step`-th of `cases`, from the one numbered `first` on; all of them in a full run."""
    return list(cases) if ALL else list(cases)[first::step]
