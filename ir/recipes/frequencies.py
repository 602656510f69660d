"""Recipes of position tables: RoPE frequencies with every published scaling, cos/sin tables, sinusoids.

The model asks for frequencies (one per rotated pair); extending a context replaces this recipe and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import WeftError
from .combinators import Recipe
from .readers import Array, TensorReader


@dataclass(frozen=True)
class RopeFrequencies(Recipe):
    """RoPE angular frequencies ``theta^(-2k/dim)``, k < dim/2, in radians per position (Su 2021), after `scaling`.

    `scaling` is ``none``; ``linear`` (position interpolation, Chen 2023: f/factor); ``ntk`` (θ·factor^(dim/(dim-2)));
    ``yarn`` (Peng 2023: blend by wavelength with `beta_fast`, `beta_slow`, `truncate`); ``llama3`` (low/high frequency
    factors); ``longrope`` (a divisor per frequency, Ding 2024: `factors` up to the original context, `long_factors`
    beyond); ``dynamic`` (ntk, by as much as the length exceeds the original); ``proportional`` (0 from the frequency
    `rotated` on). `original` is the context the model was trained on, `length` the longest text it will see; longrope
    and dynamic depend on it.
    """

    trained: ClassVar[bool] = False
    dim: int
    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated: int = 0
    length: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        if self.dim % 2 or self.dim <= 0:
            raise WeftError(f"RoPE rotates pairs: dimension {self.dim} must be even and positive")
        for factors in (self.factors, self.long_factors):
            if factors and len(factors) != self.dim // 2:
                raise WeftError(f"longrope needs {self.dim // 2} factors for dimension {self.dim}, has {len(factors)}")
        return (self.dim // 2,)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.frequencies()[start:stop].astype(np.float32)

    def frequencies(self) -> Array:
        """All dim/2 frequencies in float64."""
        exponents: Array = np.arange(0, self.dim, 2) / self.dim
        if self.scaling in ("ntk", "dynamic"):
            growth = self.factor
            if self.scaling == "dynamic":
                growth = max(1.0, growth * self.length / self.original - growth + 1)
            return np.asarray((self.theta * growth ** (self.dim / (self.dim - 2))) ** -exponents)
        base: Array = self.theta**-exponents
        if self.scaling == "none":
            return base
        if self.scaling == "linear":
            return base / self.factor
        if self.scaling == "proportional":
            return np.where(np.arange(self.dim // 2) < self.rotated, base / self.factor, 0)
        if self.scaling == "longrope":
            beyond = self.long_factors and self.length > self.original
            return np.asarray(base / np.array(self.long_factors if beyond else self.factors))
        if self.scaling == "llama3":
            turns = self.original * base / (2 * math.pi)  # rotations within the original context
            smooth = np.clip((turns - self.low_freq) / (self.high_freq - self.low_freq), 0, 1)
            return (1 - smooth) * base / self.factor + smooth * base
        if self.scaling == "yarn":
            return self._yarn(base)
        known = "none, linear, ntk, dynamic, yarn, llama3, longrope, proportional"
        raise WeftError(f"unknown RoPE scaling {self.scaling!r}; known are {known}")

    def _yarn(self, base: Array) -> Array:
        def pair_turning(rotations: float) -> float:
            """Index of the pair that turns `rotations` times within the original context."""
            return self.dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        return np.asarray(base / self.factor * ramp + base * (1 - ramp))


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """√(1/t) of YaRN (Peng 2023) for a context `factor` times the original, its logarithm times `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_amplitude(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """The amplitude of `rope` under YaRN for a context `factor` times the original, with DeepSeek's two mscales."""
    if not (mscale and mscale_all_dim):
        return yarn_temperature(factor)
    return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)


def longrope_amplitude(factor: float, original: int) -> float:
    """The amplitude of `rope` under LongRoPE (Ding 2024) for a context `factor` times the `original`."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeTable(Recipe):
    """``amplitude · fn(position · frequency)`` for positions below `length`: [length, dim/2], `fn` is cos or sin.

    Angles are formed in float64: at position 100,000 float32 angles are wrong by 0.004 radians.
    """

    frequencies: Recipe
    length: int
    fn: str
    amplitude: float = 1.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.length, *self.frequencies.shape(reader))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        f = self.frequencies
        per_position = f.frequencies() if isinstance(f, RopeFrequencies) else f.evaluate(reader)
        angles = np.outer(np.arange(start, stop, dtype=np.float64), per_position.astype(np.float64))
        return (self.amplitude * {"cos": np.cos, "sin": np.sin}[self.fn](angles)).astype(np.float32)


@dataclass(frozen=True)
class Sinusoid(Recipe):
    """Sinusoidal positions (Vaswani 2017): [length, dim]; sin and cos interleaved, or sin half then cos half.

    Row p is that of position p/`factor`.
    """

    trained: ClassVar[bool] = False
    length: int
    dim: int
    interleaved: bool = True
    base: float = 10_000.0
    factor: float = 1.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.length, self.dim)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        places = np.arange(start, stop) / self.factor
        angles = np.outer(places, self.base ** (-np.arange(0, self.dim, 2) / self.dim))
        pair = [np.sin(angles), np.cos(angles)]
        out = np.stack(pair, -1).reshape(stop - start, -1) if self.interleaved else np.concatenate(pair, 1)
        return out[:, : self.dim]


@dataclass(frozen=True)
class Interpolate(Recipe):
    """A table of `length` rows out of the rows of `item`: row p is what stands at row p/`factor`, linearly between its
    neighbours; behind the last row it is the last row (position interpolation of learned positions)."""

    item: Recipe
    length: int
    factor: float

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        if not self.factor > 0:
            raise WeftError(f"rows cannot be interpolated at steps of 1/{self.factor}")
        return (self.length, *self.item.shape(reader)[1:])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        last = self.item.shape(reader)[0] - 1
        places = np.minimum(np.arange(start, stop) / self.factor, last)
        low = np.floor(places).astype(int)
        high = np.minimum(low + 1, last)
        rows = self.item.read(reader, int(low[0]), int(high[-1]) + 1)
        share = (places - low).astype(rows.dtype).reshape(-1, *(1,) * (rows.ndim - 1))
        return np.asarray(rows[low - low[0]] * (1 - share) + rows[high - low[0]] * share)


@dataclass(frozen=True)
class AlibiSlopes(Recipe):
    """ALiBi slopes (Press 2022), one per head: geometric from 2^(-8/n); past a power of two every other of the next."""

    trained: ClassVar[bool] = False
    heads: int
    max_bias: float = 8.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.heads,)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        power = 2 ** math.floor(math.log2(self.heads))
        slopes = 2.0 ** (-self.max_bias / power * np.arange(1, power + 1))
        more = 2.0 ** (-self.max_bias / (2 * power) * np.arange(1, 2 * power + 1, 2))
        return np.concatenate([slopes, more])[: self.heads][start:stop].astype(np.float32)
