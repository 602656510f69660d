"""Random operands of example cases."""

from __future__ import annotations

import numpy as np

from weft.ir.schema.cases import bools, case, ints, normal, positive


def test_samples_have_their_shape_kind_and_range() -> None:
    array = np.arange(3)
    drawn = case(normal(40, 50, scale=3.0), positive(9), ints(99, high=4), bools(99), None, array, axis=1).draw()
    wide, above, whole, flags, absent, fixed = drawn
    assert wide is not None and above is not None and whole is not None and flags is not None
    assert wide.shape == (40, 50) and wide.dtype == np.float64 and 2.7 < wide.std() < 3.3
    assert (above >= 0.1).all()
    assert set(whole.tolist()) == {0, 1, 2, 3}
    assert flags.dtype == bool and 0 < flags.sum() < 99
    assert absent is None and fixed is array


def test_draws_depend_on_the_seed_only() -> None:
    example = case(normal(5), normal(5))
    (a, b), (again, _), (other, _) = example.draw(1), example.draw(1), example.draw(2)
    np.testing.assert_array_equal(a, again)
    assert (a != b).any() and (a != other).any()
