"""Projections per head, and the two forms of multi-head latent attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ir import Graph, TensorType, interpret
from weft.ir.ops.latent import emit_absorbed, emit_expanded
from weft.ir.types import dtypes

from .oracles import Oracles, X, Y, assert_equals_torch

ORACLES: Oracles = {
    "head_linear": [
        ((X, Y.reshape(12, 2)[:9]), {"heads": 3}, lambda x, w: x @ torch.block_diag(*w.chunk(3)).T),
        ((X, Y.reshape(12, 2)[:6]), {"heads": 3, "inverse": True}, lambda x, w: x @ torch.block_diag(*w.chunk(3))),
    ],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)


@pytest.mark.parametrize("rotary", [0, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_absorbed_projections_compute_the_expanded_attention(rotary: int, causal: bool) -> None:
    heads, d, rank, dv = 3, 4, 5, 2
    rng = np.random.default_rng(5)
    shapes = {"q": (2, 4, heads * d), "latent": (2, 4, rank), "up_k": (heads * d, rank), "up_v": (heads * dv, rank)}
    shapes |= {"q_rope": (2, 4, heads * rotary), "k_rope": (2, 4, rotary)} if rotary else {}
    graph = Graph()
    v = {name: graph.add_input(name, TensorType(dtypes.f32, shape)) for name, shape in shapes.items()}
    operands = v["q"], v.get("q_rope"), v["latent"], v.get("k_rope"), v["up_k"], v["up_v"]
    for name, emit in (("expanded", emit_expanded), ("absorbed", emit_absorbed)):
        graph.add_output(name, emit(*operands, heads=heads, causal=causal))
    results = interpret(graph, {name: rng.standard_normal(shape) for name, shape in shapes.items()})
    assert results["expanded"].shape == (2, 4, heads * dv)
    np.testing.assert_allclose(results["absorbed"], results["expanded"], rtol=1e-11, atol=1e-13)
