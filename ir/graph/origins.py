"""Origins of scopes: the modules that emitted their nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Origin of the nodes of a scope: the module `made` that emitted them, whose repr is its constructor call, and its
    file and line."""

    made: object
    file: str | None = None
    line: int | None = None
