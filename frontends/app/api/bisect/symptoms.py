"""Symptoms of a difference: a factor, a constant vector, permuted features, some rows, a rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft.backends.alignment.traces import compute_error
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

FEW, MOST = 4, 32  # heads of which all permutations are tried, or some
WIDEST = 4096  # features of which the rank is computed
VAGUE = ("positions", "permuted features", "feature factors")  # kinds of symptoms that leave the cause open
_TINY = np.finfo(np.float64).tiny


class Symptom(NamedTuple):
    """A property of a difference: its kind, as one or two words, and a sentence."""

    kind: str
    text: str


def list_symptoms(x: Array, y: Array, tolerance: float, sizes: Iterable[int]) -> Iterator[Symptom]:
    """Yield the symptoms of the difference between x and y [..., features], the most specific first.

    `sizes` are numbers of heads and features, in which factors and permutations are expressed.
    """
    x, y = (v.reshape(-1, v.shape[-1]).astype(np.float64) for v in (x, y))
    with np.errstate(all="ignore"):
        differs = ~(np.abs(x - y) <= tolerance * np.abs(y).max(1, keepdims=True))
        for kind, axis in (("positions", 1), ("features", 0)):
            at, count = np.flatnonzero(differs.any(axis)).tolist(), x.shape[1 - axis]
            if 0 < len(at) < (count if axis else count // 2 + 1):
                tail = axis and at == list(range(at[0], count))
                where = f"from {at[0]} on" if tail else ", ".join(map(str, at[:FEW])) + "…" * (len(at) > FEW)
                yield Symptom(kind, f"they differ only at the {kind} {where}, of {count}")
        yield from _list_total_symptoms(x, y, tolerance, list(sizes))
        is_small = 2 < min(x.shape) <= max(x.shape) <= WIDEST and bool(np.isfinite(y - x).all())
        if is_small and np.linalg.svd(y - x, compute_uv=False)[1] <= tolerance * np.abs(y).max() * math.sqrt(x.size):
            yield Symptom("input feature", "the difference has rank one, as if one column of a weight differed")


def _list_total_symptoms(x: Array, y: Array, tolerance: float, sizes: list[int]) -> Iterator[Symptom]:
    """Yield the symptoms that make all elements of y follow from x."""
    for dtype in (dtypes.bf16, dtypes.f16):
        if (round_to(x, dtype) == x).all() != (round_to(y, dtype) == y).all():
            yield Symptom("rounding", f"the elements of one are all in {dtype.name}")
            break
    factor, ratio = float(np.vdot(x, y)) / max(float(np.vdot(x, x)), _TINY), y / x
    scales = (x * y).sum(0) / np.maximum((x * x).sum(0), _TINY)
    forms = [("factor", f"all elements differ by the factor {name_factor(factor, sizes)}", factor * x, 1)]
    forms += [(kind, f"one has {text} of the other", z, 1) for kind, text, z in permute_heads(x, sizes)]
    if len(x) > 1:
        forms.append(
            ("bias", "the difference is the same vector at all positions, as of a bias", x + (y - x).mean(0), 1)
        )
        forms.append(
            ("feature factors", "each feature differs by its own factor, as for other weights of a norm", x * scales, 1)
        )
        norm = x * ratio[:, :1] * (ratio[:1] / ratio[0, 0])  # of ratios of single elements, which lose digits
        forms.append(("norm", "each position differs by its own factor, as by a norm", norm, 10))
    yield from (Symptom(kind, text) for kind, text, z, slack in forms if compute_error(z, y) <= slack * tolerance)
    if compute_error(np.sort(x), np.sort(y)) <= tolerance:
        yield Symptom("permuted features", "the features are permuted")


def permute_heads(x: Array, sizes: Iterable[int]) -> Iterator[tuple[str, str, Array]]:
    """Yield (kind, text, x) with heads along the last axis in another order, and with another RoPE layout.

    `sizes`: the numbers of heads.
    """
    for n in (n for n in sizes if 1 < n <= MOST and x.shape[-1] % n == 0):
        blocks, heads = x.reshape(*x.shape[:-1], n, -1), np.arange(n)
        orders = [heads[::-1], *(np.roll(heads, k) for k in range(1, n)), *([heads ^ 1] if n % 2 == 0 else [])]
        orders += [np.where(heads == i, j, np.where(heads == j, i, heads)) for i in range(n) for j in range(i)]
        for order in itertools.permutations(heads.tolist()) if n <= FEW else (order.tolist() for order in orders):
            yield "permuted heads", f"heads {[*order]}", blocks[..., [*order], :].reshape(x.shape)
        for text, shape in (("interleaved halves", (2, -1)), ("separated pairs", (-1, 2))):
            if blocks.shape[-1] % 2 == 0:
                moved = blocks.reshape(*blocks.shape[:-1], *shape).swapaxes(-1, -2)
                yield "interleaved", f"{text} of {n} heads", moved.reshape(x.shape)


def name_factor(factor: float, sizes: Iterable[int]) -> str:
    """Return `factor` as a number, with its meaning if it is a simple function of one of `sizes`."""
    names = {f: text for n in sizes for f, text in ((1 / n, f"1/{n}"), (n**0.5, f"√{n}"), (n**-0.5, f"1/√{n}"))}
    return f"{factor:.6g}" + next(
        (f" = {text}" for f, text in names.items() if math.isclose(f, factor, rel_tol=1e-4)), ""
    )


@np.errstate(over="ignore")
def round_to(x: Array, dtype: DType) -> Array:
    """Return `x`, in its own dtype, rounded to `dtype`."""
    return np.asarray(x.astype(dtype.numpy).astype(x.dtype))


def list_roundings(x: Array) -> Iterator[tuple[str, Array]]:
    """Yield (name, `x` rounded to this form) for 16-bit floats and for integers of 8 bits with one scale per group."""
    yield from ((dtype.name, round_to(x, dtype)) for dtype in (dtypes.bf16, dtypes.f16))
    groups = [("matrix", x.reshape(1, -1), -1), ("row", x, -1), ("column", x, 0)]
    groups += [(f"group of {n}", x.reshape(-1, n), -1) for n in (32, 64, 128) if x.size % n == 0]
    for name, group, axis in groups:
        scale = np.maximum(np.abs(group).max(axis, keepdims=True), np.finfo(np.float32).tiny) / 127
        yield f"int8 with a scale per {name}", (np.round(group / scale) * scale).reshape(x.shape)
