"""Every example case of the ops that parts compute, in every dtype, against the reference in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import CALLS, assert_close, drawn, outputs, reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Roundings to the dtype on the way to a result: one unless what is between is kept in the dtype.
ROUNDINGS = {
    "route": 2,  # the share, then times the scale
    "moe": 6,  # up, gate, activation, their product, down, the sum over experts
    "causal_conv": 3,  # the sum, the sigmoid in silu, their product
    "relative_attention": 12,  # both scores, their sum, the softmax, both products, their sum; e^x for x up to 5
}
TERMS = 150  # tokens of the longest case


def examples() -> list[object]:
    found = []
    for name in CALLS:
        op = lookup(name)
        for i, example in enumerate(op.cases):
            found += [pytest.param(op, example, d, id=f"{name}-{i}-{str(d)[6:]}") for d in DTYPES]
    return found


def check(op: Op, example: Case, dtype: torch.dtype) -> None:
    operands = drawn(example, dtype)
    got = outputs(op, example, operands)
    want = reference(op, operands, **example.attrs)
    for y, expected in zip(got, want, strict=False):  # parts give a state also where the op was given none
        if y.is_floating_point():
            assert y.dtype == dtype
            assert_close(y, expected, ROUNDINGS.get(op.name, 1), TERMS)
        else:
            np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize(("op", "example", "dtype"), examples())
def test_parts_compute_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


SCORINGS, TRUTHS = ("softmax", "sigmoid"), (False, True)
GROUPINGS: tuple[dict[str, object], ...] = (
    {},
    {"groups": 4, "top_groups": 2},
    {"groups": 4, "top_groups": 3, "group_score": "max"},
)


@pytest.mark.parametrize("attrs", GROUPINGS, ids=["all", "top2", "max"])
@pytest.mark.parametrize(("scoring", "renormalize", "biased"), [*itertools.product(SCORINGS, TRUTHS, TRUTHS)])
def test_every_router(attrs: dict[str, object], scoring: str, renormalize: bool, biased: bool) -> None:
    bias = [normal(8)] if biased else []
    example = case(normal(3, 7, 8), *bias, k=3, scoring=scoring, renormalize=renormalize, scale=1.5, **attrs)
    check(lookup("route"), example, torch.float32)


@pytest.mark.parametrize(("seq", "gates"), [(200, 4), (50, 12)], ids=["per head", "per key"])
@pytest.mark.parametrize("steep", [0.01, 1.0, 1e4])
def test_gates_from_gentle_to_closed(seq: int, gates: int, steep: float, rng: np.random.Generator) -> None:
    """Gates that differ by orders of magnitude from token to token: neither overflow nor lost small ones."""
    qkv = normal(2, seq, 6), normal(2, seq, 6), normal(2, seq, 20)
    decay = -np.exp(rng.uniform(-8, 0, (2, seq, gates))) * np.where(rng.random((2, seq, gates)) < 0.2, steep, 0.1)
    check(lookup("gated_linear_attention"), case(*qkv, decay, normal(2, 4, 3, 5), heads=4, groups=2), torch.float32)


@pytest.mark.parametrize("steep", [0.01, 1.0, 1e4])
def test_steps_of_a_scan_from_small_to_large(steep: float, rng: np.random.Generator) -> None:
    rates = -np.exp(rng.uniform(-3, 3, (5, 4)))
    delta = np.exp(rng.uniform(-8, 0, (2, 130, 5))) * np.where(rng.random((2, 130, 5)) < 0.2, steep, 0.1)
    operands = normal(2, 130, 5), delta, rates, normal(2, 130, 4), normal(2, 130, 4), normal(5), normal(2, 4, 5)
    check(lookup("selective_scan"), case(*operands), torch.float32)


def test_every_distance_has_the_bucket_of_the_reference() -> None:
    at, keys = np.array([[5000]]), np.arange(10001)[None]
    for bidirectional, far in itertools.product(TRUTHS, (128, 1000, 4096)):
        attrs = {"bidirectional": bidirectional, "max_distance": far}
        check(lookup("relative_position_bias"), case(normal(32, 2), at, keys, **attrs), torch.float64)


def test_the_last_of_equal_indices_is_written() -> None:
    indices = np.array([[1, 3, 1, 1], [0, 0, 2, 0]])
    check(lookup("scatter_rows"), case(normal(2, 5, 3), normal(2, 4, 3), indices), torch.float64)
    check(lookup("scatter_rows"), case(normal(2, 3, 5), normal(2, 3, 4), indices, axis=2), torch.bfloat16)


def test_the_first_of_equals_is_chosen() -> None:
    few = np.random.default_rng(1).integers(0, 3, (40, 9)).astype(float)
    check(lookup("top_k"), case(few, k=4), torch.float32)
    for attrs in ({"renormalize": False}, {"scoring": "sigmoid"}, {"groups": 3, "top_groups": 2}):
        check(lookup("route"), case(few, k=4, **attrs), torch.float32)
    check(
        lookup("expert_choice"),
        case(np.tile(np.random.default_rng(2).normal(size=(10, 9)), (4, 1)), capacity=7),
        torch.float32,
    )


def test_a_masked_row_has_zero_weights_and_gradients() -> None:
    x = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf] * 3], dtype=torch.float64, requires_grad=True)
    (y,) = outputs(lookup("softmax"), case(), [x])
    assert_close(y, reference(lookup("softmax"), [x.detach()])[0], 1, 3)
    y.square().sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and not x.grad[1].any()


def test_states_of_narrow_texts_may_be_wide() -> None:
    """Sums of thousands of terms have no place in 8 bits: the state keeps its own dtype."""
    for name in ("gated_linear_attention", "selective_scan", "ssd"):
        op = lookup(name)
        example = next(c for c in op.cases if len(c.operands) == len(op.operands))
        operands = drawn(example, torch.bfloat16)
        operands[-1] = drawn(example, torch.float32)[-1]
        y, state = outputs(op, example, operands)
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        want = reference(op, operands, **example.attrs)
        assert_close(y, want[0], 1, TERMS)
        assert_close(state, want[1], 0, TERMS)


def test_whole_numbers_divide_downwards() -> None:
    """`//` and `%` of torch are those of numpy, also below zero."""
    x, y = torch.tensor([-7, 7, -8, 0]), torch.tensor([[3], [-3]])
    np.testing.assert_array_equal((x // y).numpy(), lookup("floordiv").reference(x.numpy(), y.numpy()))
    np.testing.assert_array_equal((x % y).numpy(), lookup("mod").reference(x.numpy(), y.numpy()))
