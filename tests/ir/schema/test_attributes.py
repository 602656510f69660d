"""Values of attributes against their declared types."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.schema.attributes import Attr, format_type
from weft.ir.types import Shape, dtypes
from weft.ir.types.dtypes import DType
from weft.ir.types.sizes import sym

REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("declared", "value", "canonical"),
    [
        (int, np.int64(3), 3),
        (float, 3, 3.0),
        (float, np.float32(0.5), 0.5),
        (bool, np.True_, True),
        (int | None, None, None),
        (float | int, 3, 3),  # an integer stays one
        (float | None, 3, 3.0),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, ...], (), ()),
        (Shape, (sym("batch"), 4), (sym("batch"), 4)),
        (DType, dtypes.f16, dtypes.f16),
    ],
)
def test_values_become_canonical(declared: Any, value: Any, canonical: Any) -> None:
    result = Attr("a", declared, REQUIRED).check(value, "op")
    assert result == canonical and type(result) is type(canonical)


@pytest.mark.parametrize(
    ("declared", "value", "text"),
    [
        (int, True, "int"),
        (int, 1.0, "int"),
        (float, "1", "float"),
        (str, None, "str"),
        (int | None, "x", "int | none"),
        (tuple[int, ...], [1, 2.5], "[int]"),
        (tuple[int, ...], 3, "[int]"),
        (Shape, [1.5], "shape"),
        (DType, "f16", "dtype"),
    ],
)
def test_values_of_other_types_are_refused(declared: Any, value: Any, text: str) -> None:
    with pytest.raises(WeftError) as error:
        Attr("a", declared, REQUIRED).check(value, "relu")
    assert str(error.value) == f"relu: attribute a={value!r} is not of type {text}"
    assert format_type(declared) == text


def test_attributes_without_a_default_are_required() -> None:
    assert Attr("a", int, REQUIRED).required and not Attr("a", int | None, None).required
