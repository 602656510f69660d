"""Elementwise ops: arithmetic, comparisons, logic, scalar functions, casts. Binary ones broadcast as numpy does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..op import Array, DType, Op, OpCall, TensorType, Trait, Value, broadcast_shapes, op, require
from ..schema.cases import Case, bools, case, ints, normal, positive
from ..types import dtypes

_PAIR = [case(normal(2, 3, 5), normal(2, 3, 5)), case(normal(2, 3, 5), normal(5)), case(normal(4, 1), normal(1, 3))]


def _check_integers(x: TensorType, *numbers: float) -> None:
    fits = x.dtype.is_float or all(float(n).is_integer() for n in numbers)
    require(fits, f"{x} is not floating-point: {numbers} must be integers")


def _infer_broadcast_type(n: OpCall) -> TensorType:
    require(n.x.dtype == n.y.dtype, f"operands have dtypes {n.x.dtype} and {n.y.dtype}; cast one of them")
    return TensorType(n.x.dtype, broadcast_shapes(n.x, n.y))


def _infer_comparison_type(n: OpCall) -> TensorType:
    return _infer_broadcast_type(n).with_dtype(dtypes.bool_)


def _infer_logical_type(n: OpCall) -> TensorType:
    require(n.x.dtype == n.y.dtype == dtypes.bool_, "operands must be bool")
    return TensorType(dtypes.bool_, broadcast_shapes(n.x, n.y))


def _declare_binary(
    name: str,
    doc: str,
    fn: Callable[[Array, Array], Array],
    infer: Callable[[OpCall], TensorType] = _infer_broadcast_type,
    commutes: bool = False,
    cases: Sequence[Case] = tuple(_PAIR),
) -> Op:
    def reference(x: Array, y: Array) -> Array:
        return fn(x, y)

    reference.__name__, reference.__doc__ = name, doc
    new = op(traits=[Trait.ELEMENTWISE, *([Trait.COMMUTATIVE] if commutes else [])], cases=cases)(reference)
    new.infer(infer)
    return new


def _declare_unary(
    name: str, doc: str, fn: Callable[[Array], Array], cases: Sequence[Case] = (case(normal(2, 3, 5)),)
) -> Op:
    def reference(x: Array) -> Array:
        return fn(x)

    reference.__name__, reference.__doc__ = name, doc
    return op(traits=[Trait.ELEMENTWISE], cases=cases)(reference)


_POSITIVE = (case(positive(2, 3, 5)),)
_LOGIC = (case(bools(2, 3), bools(2, 3)), case(bools(4, 1), bools(3)))
_INTS = case(ints(2, 3, high=4), ints(2, 3, high=4))

add = _declare_binary("add", "x + y", np.add, commutes=True, cases=[*_PAIR, _INTS])
sub = _declare_binary("sub", "x − y", np.subtract, cases=[*_PAIR, _INTS])
mul = _declare_binary("mul", "x · y", np.multiply, commutes=True, cases=[*_PAIR, _INTS])
div = _declare_binary("div", "x / y", np.divide, cases=[case(normal(2, 3, 5), positive(2, 3, 5))])
pow = _declare_binary("pow", "x to the power y, for x > 0", np.power, cases=[case(positive(2, 3), normal(3))])
minimum = _declare_binary("minimum", "The smaller of x and y", np.minimum, commutes=True, cases=[*_PAIR, _INTS])
maximum = _declare_binary("maximum", "The larger of x and y", np.maximum, commutes=True, cases=[*_PAIR, _INTS])
floordiv = _declare_binary(
    "floordiv", "⌊x / y⌋ of integers", np.floor_divide, cases=[case(ints(2, 5, high=50), np.array([1, 2, 3, 7, 9]))]
)
mod = _declare_binary(
    "mod", "x − y·⌊x / y⌋ of integers", np.mod, cases=[case(ints(2, 5, high=50), np.array([1, 2, 3, 7, 9]))]
)
less = _declare_binary("less", "x < y", np.less, _infer_comparison_type, cases=[*_PAIR, _INTS])
less_equal = _declare_binary("less_equal", "x ≤ y", np.less_equal, _infer_comparison_type, cases=[*_PAIR, _INTS])
equal = _declare_binary("equal", "x = y", np.equal, _infer_comparison_type, commutes=True, cases=[_INTS])
logical_and = _declare_binary("logical_and", "x ∧ y", np.logical_and, _infer_logical_type, True, _LOGIC)
logical_or = _declare_binary("logical_or", "x ∨ y", np.logical_or, _infer_logical_type, True, _LOGIC)
logical_not = _declare_unary("logical_not", "¬x", np.logical_not, (case(bools(2, 3)),))

neg = _declare_unary("neg", "−x", np.negative)
abs = _declare_unary("abs", "|x|", np.abs)
square = _declare_unary("square", "x²", np.square)
exp = _declare_unary("exp", "e^x", np.exp)
log = _declare_unary("log", "ln x", np.log, _POSITIVE)
sqrt = _declare_unary("sqrt", "√x", np.sqrt, _POSITIVE)
rsqrt = _declare_unary("rsqrt", "1/√x", lambda x: 1 / np.sqrt(x), _POSITIVE)
reciprocal = _declare_unary("reciprocal", "1/x", lambda x: 1 / x, _POSITIVE)
sin = _declare_unary("sin", "sin x, radians", np.sin)
cos = _declare_unary("cos", "cos x, radians", np.cos)
tanh = _declare_unary("tanh", "tanh x", np.tanh)
floor = _declare_unary("floor", "⌊x⌋", np.floor)
ceil = _declare_unary("ceil", "⌈x⌉", np.ceil)
_HALVES = (case(normal(2, 3, 5, scale=3.0)), case(np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])))
round_ = _declare_unary("round_", "x rounded to the nearest integer, half to even", np.rint, _HALVES)


def _erf(x: Array) -> Array:
    from math import erf as scalar_erf

    return np.vectorize(scalar_erf, otypes=[np.float64])(x) if x.size else x


erf = _declare_unary("erf", "Error function 2/√π ∫₀ˣ e^(−t²) dt", _erf)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))  # does not overflow
    return np.asarray(np.where(x < 0, small, np.ones_like(small)) / (1 + small))


sigmoid = _declare_unary("sigmoid", "1 / (1 + e^(−x))", _sigmoid)
softplus = _declare_unary("softplus", "ln(1 + e^x)", lambda x: np.logaddexp(0, x))


@op(traits=[Trait.ELEMENTWISE], cases=[case(normal(3, 4)), case(ints(2, 3, high=7), to=dtypes.f32)])
def cast(x: Array, *, to: DType = dtypes.f32) -> Array:
    """x converted to the dtype `to`: floats are truncated to integers. The reference does not round between floats."""
    if to.is_float:
        return x.astype(np.float64)
    return x.astype(np.bool_) if to == dtypes.bool_ else np.trunc(x).astype(np.int64)


cast.infer(lambda n: n.x.with_dtype(n.to))


@op(
    traits=[Trait.ELEMENTWISE],
    cases=[case(normal(2, 3), low=-0.5, high=0.7), case(normal(4), high=0.0), case(ints(5, high=9), low=2, high=6)],
)
def clip(x: Array, *, low: float | None = None, high: float | None = None) -> Array:
    """x clipped to low … high; a bound that is None does not clip, and for an integer x bounds are integers."""
    return np.asarray(np.clip(x, low, high) if low is not None or high is not None else x, x.dtype)


clip.infer(lambda n: _check_integers(n.x, n.low or 0, n.high or 0))


@op(
    traits=[Trait.ELEMENTWISE],
    cases=[
        case(normal(2, 3), by=-0.37),
        case(normal(4), by=2.0, plus=-1.5),
        case(ints(5, high=9), by=3, plus=-2),
        case(np.array([1.0, -np.inf, np.nan]), by=0, plus=2.5),
    ],
)
def affine(x: Array, *, by: float = 1.0, plus: float = 0.0) -> Array:
    """x · by + plus with constants (integers for an integer x); `by` 0 gives `plus` even where x is ∞ or NaN."""
    return np.asarray(x * by + plus, x.dtype) if by else np.full_like(x, plus)


affine.infer(lambda n: _check_integers(n.x, n.by, n.plus))


@op(traits=[Trait.ELEMENTWISE], cases=[case(normal(2, 3), share=0.1), case(normal(4), share=0.0)])
def dropout(x: Array, *, share: float) -> Array:
    """x; but in a PyTorch module in training mode each element is 0 with probability `share`, and otherwise divided by
    1 − share (Srivastava 2014). The pass drop-dropout removes it."""
    return x


@dropout.infer
def _(n: OpCall) -> None:
    require(n.x.dtype.is_float, f"{n.x} must be floating-point")
    require(0 <= n.share < 1, f"share={n.share} must be at least 0 and below 1")


dropout.body(lambda n: affine(n.x))


@op(
    traits=[Trait.ELEMENTWISE],
    cases=[case(bools(2, 3), normal(2, 3), normal(3)), case(bools(4, 1), normal(3), normal(1))],
)
def where(condition: Array, x: Array, y: Array) -> Array:
    """x where `condition` is true, else y; the three operands broadcast."""
    return np.where(condition, x, y)


@where.infer
def _(n: OpCall) -> TensorType:
    require(n.condition.dtype == dtypes.bool_, "the condition must be bool")
    require(n.x.dtype == n.y.dtype, f"branches have dtypes {n.x.dtype} and {n.y.dtype}")
    return TensorType(n.x.dtype, broadcast_shapes(n.condition, n.x, n.y))


# -- compositions


def fill_like(x: Value, number: float) -> Value:
    """Emit a tensor with the shape and dtype of x, filled with `number`."""
    return affine(x, by=0.0, plus=number)


def mask_fill(seen: Value, x: Value, number: float = 0.0) -> Value:
    """Emit x where the mask `seen` (bool, broadcast with x) is true, and `number` elsewhere."""
    return where(seen, x, fill_like(x, number))
