"""Recipes of position tables: RoPE frequencies with all supported scalings, cos/sin tables, sinusoids, ALiBi slopes.

A model has a parameter of RoPE frequencies (one per rotated pair); extending a context replaces only its recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import WeftError
from .combinators import Recipe
from .readers import Array, TensorReader


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of RoPE frequencies f for sequences longer than in training; each scaling uses some of the settings.

    `scaling` is ``none``; ``linear`` (position interpolation, Chen 2023: f/factor); ``ntk`` (base
    θ·factor^(dim/(dim-2))); ``yarn`` (Peng 2023: f/factor for pairs with at most `beta_slow` rotations in `original`
    tokens, f from `beta_fast` on, blended between; `truncate` rounds these limits to full pairs); ``llama3`` (likewise
    with `low_freq`, `high_freq`); ``longrope`` (Ding 2024: a divisor per frequency, `long_factors` if length >
    original, else `factors`); ``dynamic`` (ntk that grows with length/original); ``proportional`` (f/factor for the
    first `rotated` pairs, else 0). `original` is the context length of training, `length` the longest sequence that the
    model will process.
    """

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

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, `scaling` included, as keyword arguments of `RopeScaling` and its subclasses."""
        return {f.name: getattr(self, f.name) for f in fields(RopeScaling)}

    @property
    def used_settings(self) -> tuple[str, ...]:
        """The names of the settings that `scaling` depends on; WeftError if `scaling` is unknown."""
        return tuple(self._formula.settings.split())

    @property
    def _formula(self) -> _Formula:
        if self.scaling not in SCALINGS:
            raise WeftError(f"unknown RoPE scaling {self.scaling!r}; known are {', '.join(SCALINGS)}")
        return SCALINGS[self.scaling]

    def base(self, dim: int, theta: float) -> float:
        """Return the base of the frequencies for heads of size `dim`: `theta`, increased by ntk and dynamic scaling."""
        if self.scaling not in ("ntk", "dynamic"):
            return theta
        growth = self.factor
        if self.scaling == "dynamic":
            growth = max(1.0, growth * self.length / self.original - growth + 1)
        return float(theta * growth ** (dim / (dim - 2)))

    def apply(self, dim: int, theta: float) -> Array:
        """Return the scaled frequencies, float64 [dim/2], for the base `theta`."""
        return self._formula.scale(self, self.base(dim, theta) ** -(np.arange(0, dim, 2) / dim), theta)

    def attention_factor(self, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
        """Return the amplitude for the op `rope`: 1 unless `scaling` is yarn or longrope.

        `mscale` and `mscale_all_dim`, from DeepSeek, only matter for yarn (see `compute_yarn_amplitude`).
        """
        if self.scaling == "yarn":
            return compute_yarn_amplitude(self.factor, mscale, mscale_all_dim)
        return compute_longrope_amplitude(self.factor, self.original) if self.scaling == "longrope" else 1.0

    def describe(self) -> str:
        """Return a sentence that explains the scaling and its settings, "" for none."""
        return self._formula.sentence.format(**self.settings)


class _Formula(NamedTuple):
    """A published scaling: the names of its settings, the function scale(settings, frequencies, base before scaling)
    that returns scaled frequencies, and a sentence about it."""

    settings: str
    scale: Callable[[RopeScaling, Array, float], Array]
    sentence: str


def _scale_yarn(s: RopeScaling, frequencies: Array, theta: float) -> Array:
    dim = 2 * len(frequencies)

    def rotating_pair(rotations: float) -> float:
        """Return the (real) index of the pair that makes `rotations` full rotations within the original context."""
        return dim * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = rotating_pair(s.beta_fast), rotating_pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    # dim − 1 as in transformers, though there are only dim/2 pairs.
    low, high = max(low, 0), min(high, dim - 1)
    # At least 0.001, as in transformers: equal bounds would divide by zero.
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return np.asarray(frequencies / s.factor * ramp + frequencies * (1 - ramp))


def _scale_llama3(s: RopeScaling, frequencies: Array, theta: float) -> Array:
    rotations = s.original * frequencies / (2 * math.pi)  # within the original context
    smooth = np.clip((rotations - s.low_freq) / (s.high_freq - s.low_freq), 0, 1)
    return (1 - smooth) * frequencies / s.factor + smooth * frequencies


_BLENDED = (
    "rotations over {original:,} tokens stay, those with fewer than {%s:g} are interpolated, those between are blended."
)
SCALINGS = {
    "none": _Formula("", lambda s, f, _: f, ""),
    "linear": _Formula(
        "factor", lambda s, f, _: f / s.factor, "Linear interpolation (Chen 2023): all wavelengths times {factor:g}."
    ),
    "ntk": _Formula(
        "factor", lambda s, f, _: f, "NTK: a larger base, by a factor {factor:g} at the longest wavelength."
    ),
    "dynamic": _Formula(
        "factor original length",
        lambda s, f, _: f,
        "Dynamic NTK: the base grows with the length of the sequence beyond {original:,} tokens.",
    ),
    "yarn": _Formula(
        "factor original beta_fast beta_slow truncate",
        _scale_yarn,
        "YaRN (Peng 2023), factor {factor:g}: rotary pairs with more than {beta_fast:g} " + _BLENDED % "beta_slow",
    ),
    "llama3": _Formula(
        "factor original low_freq high_freq",
        _scale_llama3,
        "Llama 3.1, factor {factor:g}: rotary pairs with more than {high_freq:g} " + _BLENDED % "low_freq",
    ),
    "longrope": _Formula(
        "original factors long_factors length",
        lambda s, f, _: f / np.array(s.long_factors if s.long_factors and s.length > s.original else s.factors),
        "LongRoPE (Ding 2024): a factor for every pair.",
    ),
    "proportional": _Formula(
        "factor rotated",
        lambda s, f, _: np.where(np.arange(len(f)) < s.rotated, f / s.factor, 0),
        "Only the first {rotated} pairs rotate.",
    ),
}


def compute_yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """Return 1 + 0.1 · mscale · ln(factor), which is √(1/t) in YaRN (Peng 2023); 1 if `factor` is at most 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def compute_yarn_amplitude(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return the amplitude of `rope` with YaRN for a context `factor` times the original: `compute_yarn_temperature`;
    if `mscale` and `mscale_all_dim` are non-zero, its value for the first over that for the second (DeepSeek)."""
    if not (mscale and mscale_all_dim):
        return compute_yarn_temperature(factor)
    return compute_yarn_temperature(factor, mscale) / compute_yarn_temperature(factor, mscale_all_dim)


def compute_longrope_amplitude(factor: float, original: int) -> float:
    """Return the amplitude of `rope` with LongRoPE (Ding 2024): √(1 + ln(factor) / ln(original)); 1 if `factor` ≤ 1."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


class RopeFrequencies(RopeScaling, Recipe):
    """RoPE angular frequencies ``theta^(-2k/dim)``, k < dim/2, in radians per position (Su 2021), after scaling."""

    trained: ClassVar[bool] = False
    dim: int
    theta: float = 10_000.0

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
        """Return all dim/2 frequencies in float64."""
        return self.apply(self.dim, self.theta)


class RopeTable(Recipe):
    """amplitude · fn(position · frequency), f32 [length, pairs], for positions 0 to length − 1; `fn` is "cos" or "sin".

    Angles are computed in float64: at position 100,000 float32 angles are wrong by 0.004 radians.
    """

    frequencies: Recipe
    length: int
    fn: str
    amplitude: float = 1.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.length, *self.frequencies.shape(reader))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        # `read` would round to float32 before the product with the position.
        f = self.frequencies
        per_position = f.frequencies() if isinstance(f, RopeFrequencies) else f.evaluate(reader)
        angles = np.outer(np.arange(start, stop, dtype=np.float64), per_position.astype(np.float64))
        return (self.amplitude * {"cos": np.cos, "sin": np.sin}[self.fn](angles)).astype(np.float32)


class Sinusoid(Recipe):
    """Sinusoidal positions (Vaswani 2017), [length, dim]: sines at even, cosines at odd indices; else sines first.

    Row p encodes position p/`factor`. The last frequency is 1/`base` if `inclusive` (as in tensor2tensor), else larger.
    """

    trained: ClassVar[bool] = False
    length: int
    dim: int
    interleaved: bool = True
    base: float = 10_000.0
    factor: float = 1.0
    inclusive: bool = False

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.length, self.dim)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        positions = np.arange(start, stop) / self.factor
        span = self.dim - 2 if self.inclusive else self.dim
        angles = np.outer(positions, self.base ** (-np.arange(0, self.dim, 2) / span))
        pair = [np.sin(angles), np.cos(angles)]
        out = np.stack(pair, -1).reshape(stop - start, -1) if self.interleaved else np.concatenate(pair, 1)
        # For an odd dim the last cosine is dropped.
        return out[:, : self.dim]


class Interpolate(Recipe):
    """`item` interpolated to `length` rows (position interpolation of learned positions): row p is `item` at position
    p/`factor`, linearly interpolated between adjacent rows; beyond the last row it is the last row."""

    item: Recipe
    length: int
    factor: float

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        if not self.factor > 0:
            raise WeftError(f"factor={self.factor} must be above 0 to interpolate rows")
        return (self.length, *self.item.shape(reader)[1:])

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        last = self.item.shape(reader)[0] - 1
        positions = np.minimum(np.arange(start, stop) / self.factor, last)
        low = np.floor(positions).astype(int)
        high = np.minimum(low + 1, last)
        rows = self.item.read(reader, int(low[0]), int(high[-1]) + 1)
        share = (positions - low).astype(rows.dtype).reshape(-1, *(1,) * (rows.ndim - 1))
        return np.asarray(rows[low - low[0]] * (1 - share) + rows[high - low[0]] * share)


class AlibiSlopes(Recipe):
    """ALiBi slopes (Press 2022), f32 [heads]: with n the largest power of two ≤ heads, 2^(−max_bias · i/n) for i = 1 to
    n, then 2^(−max_bias · i/(2n)) for i = 1, 3, 5, … until there are `heads`."""

    trained: ClassVar[bool] = False
    heads: int
    max_bias: float = 8.0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.heads,)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        power = 2 ** math.floor(math.log2(self.heads))
        slopes = 2.0 ** (-self.max_bias / power * np.arange(1, power + 1))
        interleaved = 2.0 ** (-self.max_bias / (2 * power) * np.arange(1, 2 * power + 1, 2))
        return np.concatenate([slopes, interleaved])[: self.heads][start:stop].astype(np.float32)
