"""Graphs with one input that tests of simplifying passes add ops to."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, MemoryReader, TensorType, Value
from weft.ir.types import dtypes, sizes

N = sizes.sym("n")


def graph(*keys: str) -> tuple[Graph, Value]:
    g = Graph("g", MemoryReader({k: np.zeros((6, 8), np.float32) for k in keys}))
    return g, g.add_input("x", TensorType(dtypes.f32, (N, 8)))
