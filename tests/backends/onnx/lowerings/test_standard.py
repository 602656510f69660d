"""Lowerings of basic ops where ONNX differs from numpy: rounding, infinities, empty rows, indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.backends.onnx.lowering import LOWERINGS
from weft.backends.onnx.lowerings.standard import DIRECT
from weft.ir import Value, ops
from weft.ir.types import dtypes

from ..lowered import Builder, op_types, run

Array = NDArray[Any]
INF = np.inf
FLOATS = np.array([[-INF, -2.5, -0.5, 0.0], [0.5, 1.5, 2.5, INF]])
INTS = np.array([[-7, -1, 0, 5], [6, 7, 8, 9]])

CASES: dict[str, tuple[Array, Callable[[Value], Value], Array]] = {
    "floor division rounds down": (INTS, lambda x: ops.floordiv(x, ops.affine(x, by=0, plus=3)), INTS // 3),
    "modulo has the sign of the divisor": (INTS, lambda x: ops.mod(x, ops.affine(x, by=0, plus=4)), INTS % 4),
    "round half to even": (FLOATS, ops.round, np.round(FLOATS)),
    "affine by 0 is constant": (FLOATS, lambda x: ops.affine(x, by=0.0, plus=2.0), np.full((2, 4), 2.0)),
    "affine": (INTS, lambda x: ops.affine(x, by=3, plus=-1), 3 * INTS - 1),
    "affine by 1 adds": (INTS, lambda x: ops.affine(x, by=1, plus=4), INTS + 4),
    "clip from below keeps ∞": (FLOATS, lambda x: ops.clip(x, low=-1.0), np.maximum(FLOATS, -1)),
    "clip from above keeps −∞": (FLOATS, lambda x: ops.clip(x, high=1.0), np.minimum(FLOATS, 1)),
    "clip between bounds": (FLOATS, lambda x: ops.clip(x, low=-1.0, high=1.0), np.clip(FLOATS, -1, 1)),
    "slice by steps": (INTS, lambda x: ops.slice_(x, axis=1, start=1, stop=4, step=2), INTS[:, 1:4:2]),
    "sum of an axis that stays": (INTS, lambda x: ops.sum(x, axes=(1,), keepdims=True), INTS.sum(1, keepdims=True)),
    "running sum before": (INTS, lambda x: ops.cumsum(x, axis=1, exclusive=True), INTS.cumsum(1) - INTS),
    "padding with a value": (INTS, lambda x: ops.pad(x, axis=1, before=1, after=2, value=7), np.pad(
        INTS, ((0, 0), (1, 2)), constant_values=7
    )),
    "one-hot": (INTS % 3, lambda x: ops.one_hot(x, depth=3), np.eye(3)[INTS % 3]),
    "count along an axis": (INTS, lambda x: ops.iota(x, axis=-1), np.arange(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_numpy(name: str) -> None:
    array, op, wanted = CASES[name]
    build = Builder()
    found = run(build.build(y=op(build.input("x", array))), build.feeds)["y"]
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


def test_softmax_of_a_row_without_visible_elements_is_zero() -> None:
    build, x = Builder(), np.array([[-INF, -INF], [0.0, -INF], [0.0, 0.0]])
    found = run(build.build(y=ops.softmax(build.input("x", x), axis=-1)), build.feeds)["y"]
    np.testing.assert_array_equal(found, [[0, 0], [1, 0], [0.5, 0.5]])


def test_rows_are_gathered_and_scattered_by_batch_row(rng: np.random.Generator) -> None:
    build, x, rows = Builder(), rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 2, 3))
    at = np.array([[3, 0], [1, 2]])
    value, new, indices = build.input("x", x), build.input("rows", rows), build.input("at", at)
    built = build.build(read=ops.gather_rows(value, indices), written=ops.scatter_rows(value, new, indices))
    found, written = run(built, build.feeds), x.copy()
    for b in range(2):
        written[b, at[b]] = rows[b]
    np.testing.assert_array_equal(found["read"], np.stack([x[b, at[b]] for b in range(2)]).astype(np.float32))
    np.testing.assert_array_equal(found["written"], written.astype(np.float32))


def test_convolution_reads_channels_last(rng: np.random.Generator) -> None:
    build, x, w = Builder(), rng.standard_normal((1, 6, 2)), rng.standard_normal((3, 2, 3))
    y = ops.conv1d(build.input("x", x), build.weight("w", w), stride=2, padding=(1, 0))
    built = build.build(y=y)
    padded = np.pad(x[0], ((1, 0), (0, 0)))
    wanted = [[np.sum(padded[t : t + 3].T * w[c]) for c in range(3)] for t in (0, 2, 4)]
    assert op_types(built) == ["Transpose", "Conv", "Transpose"]
    np.testing.assert_allclose(run(built, build.feeds)["y"][0], wanted, rtol=1e-4, atol=1e-5)


def test_integers_of_4_bits_are_packed_in_bytes() -> None:
    build, x = Builder(), np.array([[-8.0, 7.0, 0.0, -1.0]])
    codes = ops.cast(build.input("x", x), to=dtypes.i4)
    found = run(build.build(codes=codes, back=ops.cast(codes, to=dtypes.f32)), build.feeds)
    assert found["codes"].tolist() == [[0 | 15 << 4, 8 | 7 << 4]]  # each code plus 8, the even one in the low half
    np.testing.assert_array_equal(found["back"], x)


def test_range_is_computed_once(rng: np.random.Generator) -> None:
    build = Builder()
    x = build.input("x", np.zeros((2, 3)))
    built = build.build(first=ops.iota(x, axis=1), second=ops.add(ops.iota(x, axis=1), ops.iota(x, axis=-1)))
    assert op_types(built).count("Range") == 1


def test_lowerings_are_named_after_their_operators() -> None:
    for name, operator in DIRECT.items():
        assert operator in [lowering.name for lowering in LOWERINGS[name]]
