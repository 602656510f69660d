"""Origins of the nodes of a scope."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Origin of a scope's nodes: the module `made` that emitted them, whose repr is its constructor, and its file and
    line."""

    made: object
    file: str | None = None
    line: int | None = None
