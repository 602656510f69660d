"""Inputs and comparisons of equivalence checks."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, TensorType, ops
from weft.ir.types import dtypes, sizes
from weft.passes.core.equivalence import EquivalenceCheck

from ..models import BATCH, SEQ, weight


def test_trial_inputs_fit_the_graph() -> None:
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
