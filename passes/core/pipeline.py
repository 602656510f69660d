"""Pipelines: phases of passes, in order."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.registry import Registry

from .base import Pass


@dataclass(frozen=True)
class Phase:
    """A named group of passes, such as simplify, fuse, cache or target."""

    name: str
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Pipeline:
    """Phases of passes, in order; `parse_pipeline(str(pipeline))` returns an equal pipeline."""

    phases: tuple[Phase, ...] = ()

    def __str__(self) -> str:
        parts = [(f"{ph.name}: " if ph.name else "") + ", ".join(map(str, ph.passes)) for ph in self.phases]
        return "; ".join(parts)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(p for phase in self.phases for p in phase.passes)

    def add_phase(self, name: str, *passes: Pass) -> Pipeline:
        """Return a copy of this pipeline with a phase of `passes`, named `name`, added at the end."""
        return Pipeline((*self.phases, Phase(name, passes)))


PIPELINES: Registry[Pipeline] = Registry("pipeline", "weft.passes.default", "see docs/passes.md")
