"""Reductions and ops composed of them: sums, means, extrema, softmax, top-k."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..op import Array, Case, Op, OpCall, TensorType, Trait, Value, case, ints, normal, op, require
from ..schema.checks import normalize_axis
from ..types import dtypes
from .elementwise import cast

_CASES = [
    case(normal(2, 3, 5), axes=(-1,)),
    case(normal(2, 3, 5), axes=(0, 2), keepdims=True),
    case(normal(4), axes=(0,)),
]


def _infer_reduced_type(n: OpCall) -> TensorType:
    x: TensorType = n.x
    gone = {normalize_axis(a, x.rank) for a in n.axes}
    require(len(gone) == len(n.axes) > 0, f"axes {n.axes} repeat or are empty")
    shape = [1 if i in gone else s for i, s in enumerate(x.shape) if n.keepdims or i not in gone]
    return x.with_shape(*shape)


def _declare_reduction(name: str, doc: str, fn: Callable[..., Array], cases: Sequence[Case] = tuple(_CASES)) -> Op:
    def reference(x: Array, *, axes: tuple[int, ...], keepdims: bool = False) -> Array:
        return fn(x, axis=axes, keepdims=keepdims)

    reference.__name__, reference.__doc__ = name, doc
    new = op(cases=cases)(reference)
    new.infer(_infer_reduced_type)
    new.cost(lambda n: n.x.elements)
    return new


sum = _declare_reduction("sum", "Sum over `axes`.", np.sum, [*_CASES, case(ints(2, 3, high=5), axes=(1,))])
mean = _declare_reduction("mean", "Mean over `axes`.", np.mean)
max = _declare_reduction("max", "Largest element over `axes`.", np.max, [*_CASES, case(ints(2, 3, high=5), axes=(1,))])
min = _declare_reduction("min", "Smallest element over `axes`.", np.min)
prod = _declare_reduction("prod", "Product over `axes`.", np.prod)


@op(cases=[case(normal(2, 3, 5)), case(normal(2, 3, 5), axis=1)])
def softmax(x: Array, *, axis: int = -1) -> Array:
    """e^x / Σ e^x along `axis`; zeros where all elements along the axis are −∞."""
    top = x.max(axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis, keepdims=True)
    return np.asarray(np.divide(e, total, out=np.zeros_like(e), where=total > 0))


@softmax.infer
def _check_axis(n: OpCall) -> None:
    normalize_axis(n.axis, n.x.rank)


softmax.cost(lambda n: n.x.elements * 5)


@op(cases=[case(normal(2, 3, 5)), case(ints(2, 7, high=3), axis=1), case(normal(4, 3), axis=0, exclusive=True)])
def cumsum(x: Array, *, axis: int = -1, exclusive: bool = False) -> Array:
    """Cumulative sum along `axis`, up to and including each element, or without it if `exclusive`."""
    total = np.cumsum(x, axis)
    return total - x if exclusive else total


cumsum.infer(_check_axis)


@op(outputs="values indices", traits=[Trait.ROWWISE], cases=[case(normal(2, 3, 7), k=3), case(normal(5, 4), k=1)])
def top_k(x: Array, *, k: int) -> tuple[Array, Array]:
    """The k largest elements along the last axis and their indices (i64), largest first; of equal ones the first."""
    indices = np.argsort(-x, -1, kind="stable")[..., :k]
    return np.take_along_axis(x, indices, -1), indices


@top_k.infer
def _(n: OpCall) -> tuple[TensorType, TensorType]:
    require(n.x.rank >= 1 and n.k >= 1, f"k={n.k} must be positive")
    require(not isinstance(n.x.shape[-1], int) or n.k <= n.x.shape[-1], f"k={n.k} exceeds the last axis of {n.x}")
    values = n.x.with_shape(*n.x.shape[:-1], n.k)
    return values, values.with_dtype(dtypes.i64)


def emit_true_count(condition: Value, axes: tuple[int, ...]) -> Value:
    """Emit the number of true elements of `condition` (bool) over `axes`, which are removed, as i64."""
    return sum(cast(condition, to=dtypes.i64), axes=axes)
