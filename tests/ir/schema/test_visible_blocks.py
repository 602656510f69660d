"""Block-sparse attention query by query, in the body's form too, and what its cost says of long texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.testing import expand_bodies
from weft.ir.types import dtypes, sizes

RNG = np.random.default_rng(8)
HEADS, KV_HEADS, D, DV = 4, 2, 3, 5


def by_query(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, **a: Any) -> np.ndarray:
    """The formula: for each query the list of its keys, a key of the first blocks several times in it."""
    batch, length, _ = q.shape
    block, sides, first, last = (a[name] for name in ("block", "sides", "first", "last"))
    blocks = (length + block - 1) // block
    out = np.zeros((batch, length, HEADS * DV))
    for i in range(length):
        own = i // block
        seen: list[int] = []
        for j in range(length):
            there = j // block
            if length <= a["dense"] or own < first or own >= blocks - last:
                seen += [j]
            elif there < first:
                seen += [j] * a["first_weight"]
            elif there >= blocks - last or own - sides <= there <= own + sides:
                seen += [j]
        for b in range(batch):
            keys = [j for j in seen if mask[b, j]]
            for h in range(HEADS if keys else 0):
                group = h * KV_HEADS // HEADS
                scores = np.array([q[b, i, h * D : h * D + D] @ k[b, j, group * D : group * D + D] for j in keys])
                weights = np.exp(scores / D**0.5)
                values = np.stack([v[b, j, group * DV : group * DV + DV] for j in keys])
                out[b, i, h * DV : h * DV + DV] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 14, 15, 16, 17, 26])
@pytest.mark.parametrize(
    "attrs",
    [
        {"block": 4},
        {"block": 2, "first_weight": 3, "dense": 14},
        {"block": 3, "sides": 0, "first": 2, "last": 0, "first_weight": 2},
        {"block": 2, "sides": 2, "first": 0, "last": 3},
        {"block": 1, "sides": 3, "first": 0, "last": 0, "dense": 3},
    ],
    ids=str,
)
def test_every_query_by_itself(attrs: dict[str, int], length: int) -> None:
    full = {"sides": 1, "first": 1, "last": 1, "first_weight": 1, "dense": 0} | attrs
    q, k, v = (RNG.standard_normal((2, length, n)) for n in (HEADS * D, KV_HEADS * D, KV_HEADS * DV))
    mask = np.stack([np.ones(length, bool), RNG.random(length) < 0.5])
    wanted = by_query(q, k, v, mask, **full)
    heads = {"heads": HEADS, "kv_heads": KV_HEADS}
    found = ops.block_sparse_attention.reference(q, k, v, mask, **heads, **attrs)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)

    # One graph, in simpler ops, for all lengths.
    graph = symbolic(attrs)
    expand_bodies(graph)
    made = interpret(graph, {"q": q, "k": k, "v": v, "mask": mask.astype(np.int64)})["y"]
    np.testing.assert_allclose(made, wanted, rtol=1e-12, atol=1e-14)


def symbolic(attrs: dict[str, int]) -> Graph:
    """The op on texts of any length."""
    graph, rows = Graph("blocks"), (sizes.sym("batch"), sizes.sym("seq"))
    widths = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * DV}
    qkv = [graph.add_input(name, TensorType(dtypes.f32, (*rows, width))) for name, width in widths.items()]
    mask = graph.add_input("mask", TensorType(dtypes.i64, rows))
    y = ops.block_sparse_attention(*qkv, mask, heads=HEADS, kv_heads=KV_HEADS, **attrs)
    graph.add_output("y", y)
    return graph


def test_cost_is_linear_in_the_length() -> None:
    graph = symbolic({"block": 64, "dense": 704})
    (node,) = graph.nodes
    cost = node.op.cost_of([v and v.type for v in node.inputs], [node.output.type], node.attrs)
    flops = [sizes.evaluate(cost.flops, {"batch": 1, "seq": n}) for n in (352, 704, 4096, 8192)]
    pair = HEADS * ((D + DV) * 2 + 5)
    assert flops[:2] == [352**2 * pair, 704**2 * pair]
    assert flops[2] == 4096 * (5 + 2) * 64 * pair and flops[3] == 2 * flops[2]


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"block": 0}, "block=0 must be at least 1"),
        ({"block": 4, "sides": -1}, "sides=-1 must be at least 0"),
        ({"block": 4, "first": 0, "first_weight": 2}, "first_weight=2 is for first blocks, and first=0"),
    ],
)
def test_attributes_that_do_not_fit(attrs: dict[str, int], message: str) -> None:
    with pytest.raises(WeftError, match=f"block_sparse_attention: {message}"):
        symbolic(attrs)


def test_keys_of_another_sequence_are_refused() -> None:
    graph = Graph("blocks")
    q, k = (graph.add_input(name, TensorType(dtypes.f32, (1, n, 8))) for name, n in (("q", 8), ("k", 9)))
    with pytest.raises(WeftError, match="must be equally long: blocks are those of one sequence"):
        ops.block_sparse_attention(q, k, k, heads=2, kv_heads=2, block=4)
