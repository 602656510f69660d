"""Reductions and what is made of them: sums, means, extrema, softmax, top-k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..op import Array, Case, Op, Size, TensorType, Trait, Value, axis_of, case, ints, normal, op, want

_CASES = [
    case(normal(2, 3, 5), axes=(-1,)),
    case(normal(2, 3, 5), axes=(0, 2), keepdims=True),
    case(normal(4), axes=(0,)),
]


def _reduction(name: str, doc: str, fn: Callable[..., Any], cases: Sequence[Case] = tuple(_CASES)) -> Op:
    def reference(x: Array, *, axes: tuple[int, ...], keepdims: bool = False) -> Array:
        result: Array = fn(x, axis=axes, keepdims=keepdims)
        return result

    reference.__name__, reference.__doc__ = name, doc
    new = op(cases=cases)(reference)

    def infer(x: TensorType, *, axes: tuple[int, ...], keepdims: bool) -> TensorType:
        gone = {axis_of(a, x.rank) for a in axes}
        want(len(gone) == len(axes) > 0, f"axes {axes} repeat or are empty")
        kept = [1 if i in gone else s for i, s in enumerate(x.shape) if keepdims or i not in gone]
        return x.with_shape(*kept)

    def cost(x: TensorType, **attrs: Any) -> Size:
        return x.elements

    new.infer(infer)
    new.cost(cost)
    return new


sum = _reduction("sum", "Sum over `axes`.", np.sum, [*_CASES, case(ints(2, 3, high=5), axes=(1,))])
mean = _reduction("mean", "Mean over `axes`.", np.mean)
max = _reduction("max", "Largest element over `axes`.", np.max, [*_CASES, case(ints(2, 3, high=5), axes=(1,))])
min = _reduction("min", "Smallest element over `axes`.", np.min)
prod = _reduction("prod", "Product over `axes`.", np.prod)


@op(cases=[case(normal(2, 3, 5)), case(normal(2, 3, 5), axis=1)])
def softmax(x: Array, *, axis: int = -1) -> Array:
    """e^x / Σ e^x along `axis`; a slice that is −∞ throughout gives zeros."""
    top = x.max(axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis, keepdims=True)
    return np.asarray(np.divide(e, total, out=np.zeros_like(e), where=total > 0))


@softmax.infer
def _(x: TensorType, *, axis: int) -> TensorType:
    axis_of(axis, x.rank)
    return x


@softmax.cost
def _(x: TensorType, *, axis: int) -> Size:
    return x.elements * 5


@op(cases=[case(normal(2, 3, 5)), case(ints(2, 7, high=3), axis=1), case(normal(4, 3), axis=0, exclusive=True)])
def cumsum(x: Array, *, axis: int = -1, exclusive: bool = False) -> Array:
    """Running sum along `axis`; `exclusive` leaves the element itself out."""
    total = np.cumsum(x, axis)
    return total - x if exclusive else total


@cumsum.infer
def _(x: TensorType, *, axis: int, exclusive: bool) -> TensorType:
    axis_of(axis, x.rank)
    return x


@op(outputs="values indices", traits=[Trait.ROWWISE], cases=[case(normal(2, 3, 7), k=3), case(normal(5, 4), k=1)])
def top_k(x: Array, *, k: int) -> tuple[Array, Array]:
    """The k largest along the last axis, largest first, and their indices (i64); the first wins a tie."""
    indices = np.argsort(-x, -1, kind="stable")[..., :k]
    return np.take_along_axis(x, indices, -1), indices


@top_k.infer
def _(x: TensorType, *, k: int) -> tuple[TensorType, TensorType]:
    want(x.rank >= 1 and k >= 1, f"k={k} must be positive")
    want(not isinstance(x.shape[-1], int) or k <= x.shape[-1], f"k={k} exceeds the last axis of {x}")
    values = x.with_shape(*x.shape[:-1], k)
    return values, values.with_dtype(dtypes.i64)


def count(condition: Value, axes: tuple[int, ...]) -> Value:
    """How many hold, as i64."""
    from .elementwise import cast

    return sum(cast(condition, to=dtypes.i64), axes=axes)
