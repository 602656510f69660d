"""Where the nodes of a scope come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """What emitted the nodes of a scope: `made`, whose text tells how it was made, and the file and line of that."""

    made: object
    file: str | None = None
    line: int | None = None
