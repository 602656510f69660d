"""Origins of scopes: the modules that emitted their nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The origin of the nodes of a scope: the DSL `module` that emitted them.

    The repr of `module` is its constructor call, which is in `file` at `line` (None if unknown).
    """

    module: object
    file: str | None = None
    line: int | None = None
