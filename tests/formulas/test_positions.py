"""Positions written out: added, turned with every extension of the context, or as a bias on the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import ALiBi, Attention, RoPE, Sinusoidal, T5Bias, module
from weft.ir import Value, ops
from weft.ir.recipes.frequencies import yarn_amplitude
from weft.ir.types import dtypes

from .harness import RUNNERS, Array, Row, Weights, check

AT = np.array([0, 1, 2, 3, 7, 50, 99, 100, 101, 250, 399])


# -- added (Vaswani 2017)


def sinusoidal(x: Array, w: Weights) -> Array:
    y = x.copy()
    for i, position in enumerate(AT):
        for c in range(x.shape[1]):
            angle = position / 10000 ** (2 * (c // 2) / x.shape[1])
            y[i, c] += math.cos(angle) if c % 2 else math.sin(angle)
    return y


@pytest.mark.parametrize("runner", RUNNERS)
def test_sinusoidal(runner: str) -> None:
    check(Row(Sinusoidal(400), sinusoidal, positions=AT), runner)


# -- turned

HEAD, TURNED_HEADS = 12, 2


@module
class Turned:
    """Both heads of x turned by `rope`."""

    rope: RoPE

    def __call__(self, x: Value) -> Value:
        return self.rope(x, TURNED_HEADS)


@module
class DynamicNTK:
    """Both heads of x turned by frequencies that follow the length of the text."""

    factor: float
    original: int

    def __call__(self, x: Value) -> Value:
        at, frequencies = RoPE().angles(x, HEAD)
        length = ops.cast(ops.max(at, axes=(0, 1), keepdims=True), to=dtypes.f32) + 1.0
        growth = ops.reshape(length * (self.factor / self.original) + (1 - self.factor), shape=(1,))
        growth = ops.maximum(growth, ops.affine(growth, by=0.0, plus=1.0))
        # θ^(−2k/d) becomes θ'^(−2k/d), that is f · growth^(−2k/(d−2)), and −2k/d is log f / log θ.
        power = ops.log(frequencies) * (HEAD / ((HEAD - 2) * math.log(10_000.0)))
        return ops.rope(x, at, frequencies * ops.exp(power * ops.log(growth)), heads=TURNED_HEADS)


def plain(k: int, d: int, base: float = 10_000.0) -> float:
    """θ_k = base^(−2k/d), the angle per position of pair k (Su 2021)."""
    return float(base ** (-2 * k / d))


def interpolated(factor: float) -> Callable[[int, int], float]:
    """Position m becomes m·L/L' (Chen 2023), the same as slower angles."""
    return lambda k, d: plain(k, d) / factor


def ntk(factor: float) -> Callable[[int, int], float]:
    """base' = base·s^(d/(d − 2)): the fastest pair is left alone, the slowest slowed by s (bloc97 2023)."""
    return lambda k, d: plain(k, d, 10_000.0 * factor ** (d / (d - 2)))


def dynamic(factor: float, original: int, length: int) -> Callable[[int, int], float]:
    """NTK-aware by as much as the length exceeds the original context, not at all below."""
    return ntk(max(1.0, factor * length / original - (factor - 1)))


def yarn(factor: float, original: int, fast: float, slow: float) -> Callable[[int, int], float]:
    """A pair that turns more than `fast` times within the original context is left alone, one that turns less than
    `slow` times interpolated, with a ramp over the pairs between (Peng 2023, section 3.2)."""

    def pair(turns: float, d: int) -> float:
        """The (fractional) k at which 2π·base^(2k/d), the wavelength, fits `turns` times into the context."""
        return math.log(original / (2 * math.pi * turns), 10_000.0) * d / 2

    def angle(k: int, d: int) -> float:
        first, last = max(math.floor(pair(fast, d)), 0), min(math.ceil(pair(slow, d)), d - 1)
        share = min(max((k - first) / (last - first), 0), 1)
        return (1 - share) * plain(k, d) + share * plain(k, d) / factor

    return angle


def turned(
    angle: Callable[[int, int], float],
    at: Array,
    d: int = HEAD,
    interleaved: bool = False,
    amplitude: float = 1.0,
    stored: bool = True,
) -> Callable[[Array, Weights], Array]:
    """Pair k of the first d elements of each head turned by position · angle(k, d); angles are `stored` in f32."""

    def formula(x: Array, w: Weights) -> Array:
        y = x.copy()
        for i, position in enumerate(at):
            for start in range(0, x.shape[1], HEAD):
                for k in range(d // 2):
                    a, b = (start + 2 * k, start + 2 * k + 1) if interleaved else (start + k, start + k + d // 2)
                    t = int(position) * (float(np.float32(angle(k, d))) if stored else angle(k, d))
                    y[i, a] = amplitude * (x[i, a] * math.cos(t) - x[i, b] * math.sin(t))
                    y[i, b] = amplitude * (x[i, a] * math.sin(t) + x[i, b] * math.cos(t))
        return y

    return formula


TEMPERATURE = 0.1 * math.log(8) + 1  # √(1/t) of YaRN (equation 22)
YARN = {"factor": 8.0, "original": 64, "beta_fast": 8.0, "beta_slow": 1.0}
ROTARY: dict[str, tuple[RoPE, Callable[[Array, Weights], Array]]] = {
    "half": (RoPE(), turned(plain, AT)),
    "interleaved": (RoPE(interleaved=True), turned(plain, AT, interleaved=True)),
    "partial": (RoPE(dim=8), turned(plain, AT, d=8)),
    "partial, interleaved": (RoPE(fraction=1 / 3, interleaved=True), turned(plain, AT, d=4, interleaved=True)),
    "base of 1,000,000": (RoPE(1e6), turned(lambda k, d: plain(k, d, 1e6), AT)),
    "interpolation": (RoPE(scaling="linear", factor=4), turned(interpolated(4), AT)),
    "NTK-aware": (RoPE(scaling="ntk", factor=4), turned(ntk(4), AT)),
    "dynamic NTK, long": (
        RoPE(scaling="dynamic", factor=2, original=100, length=400),
        turned(dynamic(2, 100, 400), AT),
    ),
    "dynamic NTK, short": (RoPE(scaling="dynamic", factor=2, original=400, length=100), turned(plain, AT)),
    "YaRN": (
        RoPE(scaling="yarn", amplitude=yarn_amplitude(8.0), **YARN),
        turned(yarn(8, 64, 8, 1), AT, amplitude=TEMPERATURE),
    ),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary(name: str, runner: str) -> None:
    rope, formula = ROTARY[name]
    check(Row(Turned(rope), formula, TURNED_HEADS * HEAD, len(AT), AT), runner)


def test_yarn_by_wavelength() -> None:
    """Fast pairs stay, pairs that do not complete a turn are interpolated, and some lie between."""
    found = [yarn(8, 64, 8, 1)(k, 64) / plain(k, 64) for k in range(32)]
    turns = [64 * plain(k, 64) / (2 * math.pi) for k in range(32)]
    assert all(f == 1 for f, t in zip(found, turns, strict=True) if t > 10)
    assert all(f == pytest.approx(1 / 8) for f, t in zip(found, turns, strict=True) if t < 0.7)
    assert found == sorted(found, reverse=True) and any(0.2 < f < 0.9 for f in found)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("original", [5, 40])
def test_dynamic_ntk_follows_the_length(original: int, runner: str) -> None:
    at = np.arange(3, 20)
    formula = turned(dynamic(3, original, 20), at, stored=False)
    check(Row(DynamicNTK(3.0, original), formula, TURNED_HEADS * HEAD, len(at), at, exact=False), runner)


# -- biases


def with_bias(heads: int, scale: float | None, causal: bool, bias: Callable[..., float]) -> Callable[..., Array]:
    """softmax(scale · q kᵀ + bias(head, i, j, weights)) v."""

    def formula(x: Array, w: Weights) -> Array:
        q, k, v = (x @ w[f"{name}.weight"].T for name in "qkv")
        d, found = x.shape[1] // heads, np.zeros_like(x)
        for h in range(heads):
            own = slice(h * d, (h + 1) * d)
            for i in range(len(x)):
                seen = range(i + 1 if causal else len(x))
                factor = 1 / math.sqrt(d) if scale is None else scale
                scores = np.array([factor * (q[i, own] @ k[j, own]) + bias(h, i, j, w) for j in seen])
                shares = np.exp(scores - scores.max())
                found[i, own] = sum(s / shares.sum() * v[j, own] for j, s in zip(seen, shares, strict=True))
        return found @ w["o.weight"].T

    return formula


def slope(heads: int, h: int) -> float:
    """2^(−8h/heads) for h from 1; of a number that is no power of two, first those of the power below, then every
    other of the power above (Press 2022)."""
    below = 1 << (heads.bit_length() - 1)
    return 2.0 ** (-8 * (h + 1) / below) if h < below else 2.0 ** (-8 * (2 * (h - below) + 1) / (2 * below))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 6])
def test_alibi(heads: int, causal: bool, runner: str) -> None:
    formula = with_bias(heads, None, causal, lambda h, i, j, w: -float(np.float32(slope(heads, h))) * abs(i - j))
    check(Row(Attention(heads, bias=ALiBi(), causal=causal), formula, 24, 13), runner)


def bucket(relative: int, buckets: int, furthest: int, causal: bool) -> int:
    """The bucket of j − i (Raffel 2020): the logarithm is compared in whole numbers."""
    count, first = (buckets, 0) if causal else (buckets // 2, buckets // 2 if relative > 0 else 0)
    distance = max(-relative, 0) if causal else abs(relative)
    exact = count // 2
    if distance < exact:
        return first + distance
    wide = count - exact
    # distance/exact ≥ (furthest/exact)^(t/wide) for the largest t, the last bucket at most.
    reached = [t for t in range(wide) if distance**wide * exact**t >= exact**wide * furthest**t]
    return first + exact + max(reached)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(8, 20), (32, 128), (6, 12)])
def test_t5_buckets(buckets: int, furthest: int, causal: bool, runner: str) -> None:
    def bias(h: int, i: int, j: int, w: Weights) -> Any:
        return w["bias.weight"][bucket(j - i, buckets, furthest, causal), h]

    attention = Attention(2, bias=T5Bias(buckets, furthest), causal=causal, scale=1.0)
    check(Row(attention, with_bias(2, 1.0, causal, bias), 8, 40, std=0.3), runner)
