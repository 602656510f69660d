"""Graphs of a few ops over x [batch, 4], and their modules compared with the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from weft.ir import interpret
from weft.ir.graph import Graph, Value
from weft.ir.recipes import Normal
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import sym

from ...lowered import build_module

F32 = dtypes.f32


def small_graph(make: Callable[[Value], Value]) -> Graph:
    graph = Graph("corner")
    graph.add_output("y", make(graph.add_input("x", TensorType(F32, (sym("batch"), 4)))))
    return graph


def weight(graph: Graph, name: str, *dims: int) -> Value:
    return graph.add_param(name, TensorType(F32, dims), Normal(dims, 0.5, name))


def check(graph: Graph, x: np.ndarray) -> None:
    """Compare the module of `graph` with the interpreter, within eight roundings of float32."""
    (want,) = interpret(graph, {"x": x}).values()
    module = build_module(graph)
    with torch.inference_mode():
        got = module(torch.tensor(x, dtype=torch.float32)).double().numpy()
    np.testing.assert_allclose(got, want, rtol=8 * 2.0**-23, atol=8 * 2.0**-23)
