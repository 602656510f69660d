"""Types of tensors: text, sizes in elements and bytes, derived types."""

from __future__ import annotations

import pytest

from weft.ir import WeftError
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import sym


def test_bytes_of_small_elements_are_packed() -> None:
    assert dtypes.i4.bytes_for(5) == 3
    assert TensorType(dtypes.u4, (3, 4)).bytes == 6
    assert str(TensorType(dtypes.f16, (sym("batch"), 8)).bytes) == "16*batch"
    assert str(TensorType(dtypes.i4, (sym("seq"),)).bytes) == "floordiv(4*seq, 8)"


def test_types_have_text_rank_and_concrete_shapes() -> None:
    t = TensorType(dtypes.f32, (sym("batch"), 4))
    assert str(t) == "f32[batch, 4]"
    assert t.rank == 2
    assert t.elements == 4 * sym("batch")
    assert t.with_dtype(dtypes.f16).with_shape(3) == TensorType(dtypes.f16, (3,))
    assert t.concrete({"batch": 2}) == (2, 4)
    with pytest.raises(WeftError, match="needs a value for batch"):
        t.concrete({})


def test_with_axis_replaces_an_axis_by_any_number_of_axes() -> None:
    t = TensorType(dtypes.f32, (2, 6, 4))
    assert t.with_axis(1).shape == (2, 4)
    assert t.with_axis(1, 3, 2).shape == (2, 3, 2, 4)
    assert t.with_axis(2, 5).shape == (2, 6, 5)
