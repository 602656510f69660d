"""Mixtures of experts against their definition, and their cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.types import dtypes

B, S, WIDTH, HIDDEN, EXPERTS, K = 2, 9, 6, 10, 8, 3
RNG = np.random.default_rng(8)
X = RNG.standard_normal((B, S, WIDTH))
LOGITS = RNG.standard_normal((B, S, EXPERTS)) * 2


def test_moe_is_the_weighted_sum_of_all_experts() -> None:
    up, down = RNG.standard_normal((EXPERTS, HIDDEN, WIDTH)), RNG.standard_normal((EXPERTS, WIDTH, HIDDEN))
    combine = ops.route.reference(LOGITS, k=K)
    found = ops.moe.reference(X, combine, up, down, activation="gelu")
    wanted = torch.zeros(B, S, WIDTH, dtype=torch.float64)
    for e in range(EXPERTS):
        y = F.gelu(torch.from_numpy(X) @ torch.from_numpy(up[e]).T) @ torch.from_numpy(down[e]).T
        wanted += torch.from_numpy(combine[..., e, None]) * y
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


def test_moe_costs_only_active_experts() -> None:
    graph = Graph()
    shapes = {
        "x": (4, WIDTH),
        "combine": (4, EXPERTS),
        "up": (EXPERTS, HIDDEN, WIDTH),
        "down": (EXPERTS, WIDTH, HIDDEN),
    }
    values = [graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in shapes.items()]
    for active, experts in ((2, 2), (None, EXPERTS)):
        node = ops.moe(*values, activation="relu", active=active).producer
        assert node is not None
        cost = node.op.node_cost(node)
        assert cost.flops == 4 * experts * HIDDEN * WIDTH * 4
        # Four tokens reach at most four times as many experts as one; each has two matrices.
        used = min(4 * experts, EXPERTS)
        assert cost.read == 4 * (4 * WIDTH + 4 * EXPERTS + used * 2 * HIDDEN * WIDTH)


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        ({"down": (2, 6, 9)}, {}, "does not fit up"),
        ({"combine": (4, 3)}, {}, "must weigh 2 experts"),
        ({"x": (4, 5)}, {}, "does not fit up"),
        ({}, {"limit": 1.0}, "limit and shift need a gate"),
        ({}, {"active": 3}, "active=3 is not between 1 and 2 experts"),
    ],
)
def test_moe_refuses_operands_and_attributes_that_do_not_fit(
    shapes: dict[str, tuple[int, ...]], attrs: dict[str, float], message: str
) -> None:
    graph = Graph()
    full = {"x": (4, 6), "combine": (4, 2), "up": (2, 8, 6), "down": (2, 6, 8), **shapes}
    values = [graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in full.items()]
    with pytest.raises(WeftError, match=message):
        ops.moe(*values, **attrs)
