"""A factor moves into the weights that compute a value, or that read it."""

from __future__ import annotations

import numpy as np

from weft.ir import parse
from weft.passes.library.fold.scaling import repeat_scalar


def test_scalar_is_repeated_along_a_width() -> None:
    graph = parse("graph g { param %p: f32[] = literal([0.3]) output p = %p }")
    found = repeat_scalar(graph.params["p"].recipe, 5).evaluate(graph.reader)
    np.testing.assert_array_equal(found, np.full(5, 0.3))
