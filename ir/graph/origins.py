"""Origins of scopes: the modules that emitted their nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The origin of the nodes of a scope: the module `made` that emitted them, and the `file` and `line` of its call.

    The repr of `made` is its constructor call.
    """

    module: object
    file: str | None = None
    line: int | None = None
