"""Inputs and comparisons of equivalence checks."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, TensorType, WeftError, ops
from weft.ir.recipes import Map, Source
from weft.ir.types import dtypes, sizes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

from ..models import BATCH, SEQ, weight


def test_random_inputs_fit_the_graph() -> None:
    g = Graph("g")
    ids = g.add_input("ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    mask = g.add_input("attention_mask", TensorType(dtypes.i64, (BATCH, SEQ)))
    flags = g.add_input("flags", TensorType(dtypes.bool_, (sizes.sym("other"),)))
    g.add_input("x", TensorType(dtypes.f32, (BATCH, 2 * SEQ)))
    g.add_output("y", ops.embedding(ids, weight(g, "small", 3, 2)))
    g.add_output("z", ops.embedding(ids, weight(g, "large", 9, 2)))
    fed = EquivalenceCheck(3).make_inputs(g, batch=50, seq=7)
    assert fed["ids"].shape == (50, 7) and set(fed["ids"].flat) == {0, 1, 2}
    lengths = fed["attention_mask"].sum(1)
    assert (fed["attention_mask"] == (np.arange(7) < lengths[:, None])).all() and set(lengths) == set(range(1, 8))
    assert fed["flags"].dtype == bool and fed["flags"].shape == (4,) and fed["x"].shape == (50, 14)
    assert mask.name in fed and flags.name in fed
    assert all(
        (EquivalenceCheck(3).make_inputs(g, batch=50, seq=7)[name] == array).all() for name, array in fed.items()
    )


def test_difference_is_relative_to_the_largest_magnitude() -> None:
    a = np.array([4.0, -8.0])
    assert measure_difference(a, np.array([4.0, -7.5])) == 0.5 / 8
    assert measure_difference(a[:0], a[:0]) == 0.0
    infinite = np.array([np.inf, np.nan])
    assert measure_difference(infinite, infinite) == 0.0
    assert np.isnan(measure_difference(a, np.array([np.nan, 1.0])))


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({"y": [1.0, 2.0]}, "the outputs must be x, y, but are y"),
        ({"y": [1.0], "x": [1.0]}, "the outputs must be x, y, but are y, x"),
        ({"x": [1.0], "y": [1.0]}, r"output y must have shape \[2\], but has \[1\]"),
        ({"x": [1.0], "y": [1.0, 2.1]}, "output y differs by 5.0e-02 of its largest magnitude, but at most 1e-03"),
        ({"x": [np.nan], "y": [1.0, 2.0]}, "output x differs by nan"),
    ],
)
def test_check_names_the_first_output_that_differs(actual: dict[str, list[float]], message: str) -> None:
    equivalence = EquivalenceCheck()
    expected = {"x": np.array([1.0]), "y": np.array([1.0, 2.0])}
    equivalence.check_close(expected, expected, 0.0)
    assert equivalence.largest == 0.0
    with pytest.raises(WeftError, match=message):
        equivalence.check_close(expected, {name: np.array(x) for name, x in actual.items()}, 1e-3)


def test_equal_recipes_get_equal_random_weights_in_float64() -> None:
    graphs = []
    for rows in (6, 3):
        g = Graph("g", MemoryReader({"w": np.zeros((6, 8), np.float32), "v": np.zeros((rows, 8), np.float32)}))
        g.add_output("w", weight(g, "w", 6, 8, recipe=Source("w")))
        g.add_output("v", weight(g, "v", rows, 8, recipe=Map(Source("v"), "log")))
        graphs.append(g)
    equivalence = EquivalenceCheck()
    one, other = (equivalence.run(g, {}) for g in graphs)
    assert one["w"].dtype == np.float64 and (one["w"] == other["w"]).all() and np.ptp(one["w"]) > 0
    assert np.isfinite(one["v"]).all()  # a weight under a logarithm is positive
    assert (EquivalenceCheck(1).run(graphs[0], {})["w"] != one["w"]).any()
