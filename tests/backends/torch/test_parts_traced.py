"""Snippets under torch.export and torch.compile: one graph, for all lengths; `make test` tries a third of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim

from weft.ir import lookup
from weft.ir.op import Op, case, ints, normal, positive

from ...sampling import ALL, each
from .lib.part_calls import assert_close, drawn, outputs, reference


class Calling(torch.nn.Module):
    """A module that computes an op with its parts."""

    def __init__(self, op: Op, **attrs: Any) -> None:
        super().__init__()
        self.op, self.example = op, case(**attrs)

    def forward(self, *operands: Tensor | None) -> tuple[Tensor, ...]:
        return outputs(self.op, self.example, list(operands))


CAUSAL = {"heads": 2, "causal": True}
TABLES: dict[
    str, tuple[str, Callable[[int, int], tuple[Any, ...]], str, dict[str, Any]]
] = {  # op, operands, which of them are weights, attributes
    "softmax router": ("route", lambda b, s: (normal(b, s, 8),), "", {"k": 2}),
    "sigmoid router in groups": (
        "route",
        lambda b, s: (normal(b, s, 8), normal(8)),
        "bias",
        {"k": 3, "scoring": "sigmoid", "groups": 4, "top_groups": 2},
    ),
    "limited": ("limit_capacity", lambda b, s: (positive(b, s, 3),), "", {"factor": 1.25}),
    "chosen by experts": ("expert_choice", lambda b, s: (normal(b, s, 3),), "", {"factor": 1.25, "batched": True}),
    "balance": ("load_balance_loss", lambda b, s: (normal(b, s, 3), positive(b, s, 3)), "", {}),
    "experts": (
        "moe",
        lambda b, s: (normal(b, s, 6), sparse(b, s), normal(3, 8, 6), normal(3, 6, 8), normal(3, 8, 6)),
        "up down gate",
        {"active": 2},
    ),
    "convolution": (
        "causal_conv",
        lambda b, s: (normal(b, s, 5), normal(5, 4), normal(5), normal(b, 3, 5)),
        "weight bias",
        {"activation": "silu"},
    ),
    "linear attention": ("linear_attention", lambda b, s: (normal(b, s, 6),) * 3, "", {"heads": 2}),
    "causal linear attention": (
        "linear_attention",
        lambda b, s: (normal(b, s, 6),) * 3,
        "",
        {"heads": 2, "causal": True},
    ),
    "gates per head": (
        "gated_linear_attention",
        lambda b, s: (normal(b, s, 6), normal(b, s, 6), normal(b, s, 8), below_zero(b, s, 4), normal(b, 4, 3, 2)),
        "",
        {"heads": 4, "groups": 2},
    ),
    "gates per key": (
        "gated_linear_attention",
        lambda b, s: (normal(b, s, 4), normal(b, s, 4), normal(b, s, 8), below_zero(b, s, 8), normal(b, 4, 2, 2)),
        "",
        {"heads": 4, "groups": 2},
    ),
    "delta rule": (
        "gated_delta_rule",
        lambda b, s: (normal(b, s, 6), -below_zero(b, s, 6) / 2, normal(b, s, 8), -below_zero(b, s, 4)),
        "",
        {"heads": 4, "groups": 2},
    ),
    "delta rule, gates": (
        "gated_delta_rule",
        lambda b, s: (
            *(normal(b, s, 6), -below_zero(b, s, 6) / 2, normal(b, s, 8), -below_zero(b, s, 4)),
            *(below_zero(b, s, 4), normal(b, 4, 3, 2)),
        ),
        "",
        {"heads": 4, "groups": 2},
    ),
    "delta rule, gates per key": (
        "gated_delta_rule",
        lambda b, s: (
            *(normal(b, s, 4), -below_zero(b, s, 4) / 2, normal(b, s, 8), -below_zero(b, s, 4)),
            *(below_zero(b, s, 8), normal(b, 4, 2, 2)),
        ),
        "",
        {"heads": 4, "groups": 2},
    ),
    "Mamba": (
        "selective_scan",
        lambda b, s: (normal(b, s, 4), positive(b, s, 4), below_zero(4, 3), normal(b, s, 3), normal(b, s, 3)),
        "a",
        {},
    ),
    "Mamba-2": (
        "ssd",
        lambda b, s: (normal(b, s, 8), positive(b, s, 4), below_zero(4), normal(b, s, 6), normal(b, s, 6), normal(4)),
        "a d",
        {"heads": 4, "groups": 2},
    ),
    "relative keys and values": (
        "relative_attention",
        lambda b, s: (*(normal(b, s, 6),) * 3, normal(5, 3), normal(5, 3)),
        "key_table value_table",
        CAUSAL,
    ),
    "blocks of keys": (
        "block_sparse_attention",
        lambda b, s: (*(normal(b, s, 6),) * 3, np.arange(s) < np.full((b, 1), s - 1)),
        "",
        {"heads": 3, "kv_heads": 3, "block": 4, "first_weight": 3, "dense": 64},
    ),
    "keys chosen": (
        "lightning_index",
        lambda b, s: (normal(b, s, 6), normal(b, s, 2), normal(b, s, 3), np.arange(s) < np.full((b, 1), s - 1)),
        "",
        {"heads": 3, "top_k": 4, "causal": True},
    ),
    "buckets of distances": (
        "relative_position_bias",
        lambda b, s: (normal(8, 3), ints(b, s, high=99), ints(b, s, high=99)),
        "table",
        {},
    ),
    "slopes": ("alibi", lambda b, s: (positive(3), ints(b, s, high=99), ints(b, s, high=99)), "slopes", {}),
    "per head": ("head_linear", lambda b, s: (normal(b, s, 6), normal(8, 3)), "weight", {"heads": 2}),
    "rows read": ("gather_rows", lambda b, s: (normal(b, s, 3), np.tile([[1, 0, 1]], (b, 1))), "", {}),
    "rows written": (
        "scatter_rows",
        lambda b, s: (normal(b, s, 3), normal(b, 3, 3), np.tile([[1, 0, 1]], (b, 1))),
        "",
        {},
    ),
    "largest": ("top_k", lambda b, s: (normal(b, s, 6),), "", {"k": 2}),
}


MANY_STEPS = (
    "gates per key",
    "delta rule, gates per key",
    "Mamba",
)  # written out, they take long to trace for two sizes at once


def below_zero(*shape: int) -> NDArray[np.float64]:
    return -np.random.default_rng(len(shape)).random(shape)


def sparse(batch: int, seq: int) -> NDArray[np.float64]:
    """Weights of three experts, two of them for every token."""
    weights = np.random.default_rng(0).random((batch, seq, 3))
    return np.where(weights == weights.min(-1, keepdims=True), 0, weights)


def compare(got: tuple[Tensor, ...], want: tuple[NDArray[np.float64], ...]) -> None:
    for y, expected in zip(got, want, strict=False):  # parts give a state also where the op was given none
        if y.is_floating_point():
            assert_close(y, expected, 8, 150)
        else:
            np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.long
# Delta rules take 8 seconds each to trace for all lengths.
@pytest.mark.parametrize("name", each(3, (name for name in TABLES if ALL or "delta" not in name)))
def test_snippets_export_as_one_graph(name: str) -> None:
    """Whole passes are exported, for all sizes, and compute the reference at others: one token, and around chunks."""
    op_name, sizes, _, attrs = TABLES[name]
    op, several = lookup(op_name), name not in MANY_STEPS
    given, other = (drawn(case(*sizes(*n)), torch.float32) for n in ((2, 70), (3 if several else 2, 71)))
    dims = (Dim("batch", min=2), Dim("seq", min=1))
    shapes = tuple(
        {i: dim for i, dim in enumerate(dims[: t.dim()]) if t.shape[i] != u.shape[i]}
        for t, u in zip(given, other, strict=True)
        if t is not None and u is not None
    )
    program = torch.export.export(Calling(op, **attrs), tuple(given), dynamic_shapes=(shapes,)).module()
    for i, seq in enumerate((131, 70, 1, 15, 16, 17, 63, 64, 65)):
        seq += 2 * op_name.endswith("_rows")  # of which some are read
        operands = drawn(case(*sizes(2 + i % 3 if several else 2, seq)), torch.float32)
        compare(program(*operands), reference(op, operands, **attrs))


@pytest.mark.parametrize(
    "name", each(3, (name for name in TABLES if name != "experts"), 1)
)  # they ask how many tokens there are
def test_snippets_compile_as_one_graph(name: str) -> None:
    op_name, sizes, _, attrs = TABLES[name]
    op = lookup(op_name)
    torch.compiler.reset()  # what it keeps of the other tests counts as recompiling
    compiled = torch.compile(Calling(op, **attrs), fullgraph=True, dynamic=False, backend="eager")
    for seq in (1, 6):
        operands = drawn(case(*sizes(2, seq + 2 * op_name.endswith("_rows"))), torch.float32)
        compare(compiled(*operands), reference(op, operands, **attrs))
