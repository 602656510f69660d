"""Example cases of ops: random operands, each described by shape and kind and drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..recipes.readers import Array


@dataclass(frozen=True)
class Sample:
    """A random operand of a case; `kind` is normal (deviation `scale`), positive (≥ 0.1), int (< `high`) or bool."""

    shape: tuple[int, ...]
    kind: str = "normal"
    high: int = 0
    scale: float = 1.0

    def draw(self, rng: np.random.Generator) -> Array:
        if self.kind == "int":
            return rng.integers(0, self.high, self.shape)
        if self.kind == "bool":
            return rng.random(self.shape) < 0.6
        x = rng.standard_normal(self.shape) * self.scale
        return np.abs(x) + 0.1 if self.kind == "positive" else x


@dataclass(frozen=True)
class Case:
    """An example call of an op: operands (samples, arrays or None) and attributes."""

    operands: tuple[Sample | Array | None, ...]
    attrs: Mapping[str, Any]

    def draw(self, seed: int = 0) -> list[Array | None]:
        """Return the operands as arrays (None if absent): samples are drawn from `seed`, floats in float64."""
        rng = np.random.default_rng(seed)
        return [o.draw(rng) if isinstance(o, Sample) else None if o is None else np.asarray(o) for o in self.operands]


def normal(*shape: int, scale: float = 1.0) -> Sample:
    return Sample(shape, scale=scale)


def positive(*shape: int) -> Sample:
    return Sample(shape, "positive")


def ints(*shape: int, high: int) -> Sample:
    return Sample(shape, "int", high)


def bools(*shape: int) -> Sample:
    return Sample(shape, "bool")


def case(*operands: Sample | Array | None, **attrs: Any) -> Case:
    return Case(operands, attrs)
