"""Checks that type functions of ops share."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.schema.checks import broadcast_shapes, format_shape, normalize_axis, require, require_int
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import Size, sym

BATCH = sym("batch")


def tensor(*shape: Size) -> TensorType:
    return TensorType(dtypes.f32, shape)


@pytest.mark.parametrize("shapes", [[(2, 3), (3,)], [(4, 1), (1, 3), ()], [(1, 1), (5, 1, 2)], [(2, 0), (1,)]])
def test_shapes_broadcast_as_in_numpy(shapes: list[tuple[int, ...]]) -> None:
    assert broadcast_shapes(*(tensor(*s) for s in shapes), None) == np.broadcast_shapes(*shapes)


def test_symbolic_sizes_broadcast_with_themselves_and_one() -> None:
    assert broadcast_shapes(tensor(BATCH, 1), tensor(1, 4), tensor(BATCH, 4)) == (BATCH, 4)
    with pytest.raises(WeftError, match=r"shapes \[batch, 4\] and \[2, 4\] do not broadcast"):
        broadcast_shapes(tensor(BATCH, 4), tensor(2, 4))
    with pytest.raises(WeftError, match=r"shapes \[3\] and \[4\] do not broadcast"):
        broadcast_shapes(tensor(3), tensor(4))


def test_negative_axes_count_from_the_end() -> None:
    assert [normalize_axis(a, 3) for a in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    for axis in (-4, 3):
        with pytest.raises(WeftError, match=f"axis {axis} is out of range for rank 3"):
            normalize_axis(axis, 3)


def test_required_sizes() -> None:
    assert format_shape((BATCH, 4)) == "[batch, 4]" and format_shape(()) == "[]"
    assert require_int(3, "fixed") == 3
    with pytest.raises(WeftError, match=r"^width must be fixed$"):
        require_int(BATCH, "width must be fixed")
    require(True, "never raised")
    with pytest.raises(WeftError, match=r"^no heads$"):
        require(False, "no heads")
