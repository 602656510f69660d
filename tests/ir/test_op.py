"""Declarations of ops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from weft.ir.op import OPS, Array, OpCall, TensorType, Trait, case, lookup, normal, op
from weft.ir.registry import DuplicateName
from weft.ir.types import dtypes


@pytest.fixture
def registry() -> Iterator[None]:
    """Remove the ops that a test declares."""
    before = {*OPS}
    yield
    for name in {*OPS} - before:
        OPS.remove(name)


@pytest.mark.usefixtures("registry")
def test_op_registers_a_function_as_reference() -> None:
    @op(outputs="half double", traits=[Trait.ELEMENTWISE], cases=[case(normal(2))])
    def halve_and_double_(x: Array, *, by: float = 2.0) -> tuple[Array, Array]:
        """x / by and x · by."""
        return x / by, x * by

    assert lookup("halve_and_double") is halve_and_double_
    assert (halve_and_double_.doc, halve_and_double_.output_names) == ("x / by and x · by.", ("half", "double"))
    assert halve_and_double_.traits == {Trait.ELEMENTWISE} and len(halve_and_double_.cases) == 1
    half, double = halve_and_double_.run_reference([np.array([4.0])], {"by": 4.0})
    assert (half.item(), double.item()) == (1.0, 16.0)

    @halve_and_double_.infer
    def _(n: OpCall) -> tuple[TensorType, TensorType]:
        return n.x, n.x

    t = TensorType(dtypes.f32, (3,))
    assert halve_and_double_.types([t], {"by": 2.0}) == (t, t)


@pytest.mark.usefixtures("registry")
def test_op_refuses_a_name_that_another_op_has() -> None:
    with pytest.raises(DuplicateName, match="op relu is declared twice"):

        @op(cases=[case(normal(2))])
        def relu(x: Array) -> Array:
            return x
