"""Gradients of parts, and what torch.export and torch.compile make of them."""

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
from weft.ir.op import Case, Op, case, ints, normal, positive

from .part_calls import CALLS, assert_close, drawn, moe, outputs, reference

# Operands without a gradient: a choice is a step, and so is what was chosen.
FIXED = {"moe": ("combine",), "load_balance_loss": ("combine",)}
LONGER = {  # more than one chunk
    "gated_linear_attention": [
        case(normal(1, 70, 3), normal(1, 70, 3), normal(1, 70, 4), groups=1, heads=2),
        case(normal(1, 70, 3), normal(1, 70, 3), normal(1, 70, 4), -torch.rand(1, 70, 2).numpy(), heads=2),
        case(normal(1, 20, 2), normal(1, 20, 2), normal(1, 20, 4), -torch.rand(1, 20, 4).numpy(), heads=2),
    ],
    "selective_scan": [
        case(normal(1, 40, 2), positive(1, 40, 2), -torch.rand(2, 3).numpy(), normal(1, 40, 3), normal(1, 40, 3))
    ],
}


def examples(names: list[str], most: int) -> list[object]:
    found = []
    for name in names:
        for i, example in enumerate([*lookup(name).cases, *LONGER.get(name, [])]):
            if sum(a.size for a in example.draw() if a is not None) <= most:
                found.append(pytest.param(lookup(name), example, id=f"{name}-{i}"))
    return found


@pytest.mark.parametrize(
    ("op", "example"), examples([name for name in CALLS if name not in ("limit_capacity", "gather_rows")], 1500)
)
def test_gradients(op: Op, example: Case) -> None:
    """Those of autograd are those of finite differences, in every operand that has one."""
    operands = drawn(example, torch.float64)
    for operand, t in zip(op.operands, operands, strict=False):
        if t is not None and t.is_floating_point():
            t.requires_grad_(operand.name not in FIXED.get(op.name, ()))

    def call(*given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(y for y in outputs(op, example, list(given)) if y.is_floating_point())

    assert torch.autograd.gradcheck(call, tuple(operands), fast_mode=True)


def test_gradients_of_what_was_chosen() -> None:
    """Weights of experts have gradients where they are not zero, behind a limit as well."""
    x, combine, *stacks = drawn(lookup("moe").cases[0], torch.float64)
    assert combine is not None
    weights, limit = torch.rand_like(combine).requires_grad_(), lookup("limit_capacity")

    def call(weights: Tensor) -> Tensor:
        (limited,) = outputs(limit, case(capacity=1), [weights * (combine != 0)])
        return moe(x, limited, *stacks, active=2)

    assert torch.autograd.gradcheck(call, (weights,), fast_mode=True)


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
WHOLE = ("gates per key", "Mamba")  # chunk after chunk in Python: exported for one length


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


@pytest.mark.parametrize("name", TABLES)
def test_export(name: str) -> None:
    """Whole passes are exported, with sizes that may vary, and compute the reference also at others."""
    op_name, sizes, weights, attrs = TABLES[name]
    op = lookup(op_name)
    lengths = [34, 34] if name in WHOLE else [70, 131, 5]
    given = drawn(case(*sizes(2, lengths[0])), torch.float32)
    vary = {0: Dim.AUTO} if name in WHOLE else {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = [None if o.name in weights.split() else vary for o, _ in zip(op.operands, given, strict=False)]
    program = torch.export.export(Calling(op, **attrs), tuple(given), dynamic_shapes=(tuple(shapes),)).module()
    for batch, seq in enumerate(lengths, 2):
        operands = drawn(case(*sizes(batch, seq)), torch.float32)
        compare(program(*operands), reference(op, operands, **attrs))


@pytest.mark.parametrize("name", [name for name in TABLES if name != "experts"])  # they ask how many tokens there are
def test_compile_in_one_graph(name: str) -> None:
    op_name, sizes, _, attrs = TABLES[name]
    op = lookup(op_name)
    torch.compiler.reset()  # what it remembers of the other tests counts as recompiling
    compiled = torch.compile(Calling(op, **attrs), fullgraph=True, dynamic=False, backend="eager")
    for seq in (1, 6):
        operands = drawn(case(*sizes(2, seq + 2 * (op_name.endswith("_rows")))), torch.float32)
        compare(compiled(*operands), reference(op, operands, **attrs))
