"""A mixture of experts for few tokens against a sum over experts in float64, and against the op's own reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import moe_decode as kernel
from weft.backends.torch.kernels.shared.norm import NO_NORM, Norm
from weft.ir.ops.experts import moe as op

from ....sampling import each
from .close import DTYPES, assert_close, exact, rounded
from .oracles import make_norm, norm64

pytestmark = pytest.mark.usefixtures("few_processors")


class Case(NamedTuple):
    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: Norm = NO_NORM

    def computed(self, moe: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
        """Return what `moe` makes of it."""
        return moe(*self[:-1], norm=self.norm, **options)


class Shape(NamedTuple):
    tokens: int
    choices: int
    experts: int
    hidden: int
    dim: int


def case(
    shape: Shape, dtype: torch.dtype, device: torch.device, gated: bool = True, biased: bool = False, more: bool = False
) -> Case:
    """Random operands; biases if biased, a residual if more."""
    rng = np.random.default_rng(0)
    tokens, choices, experts, hidden, dim = shape

    def made(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return rounded(scale * rng.normal(size=sizes), dtype, device)

    chosen = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)])
    x, weights = made(tokens, dim), rounded(rng.uniform(0.1, 1, (tokens, choices)), torch.float32, device)
    up, gate, down = (made(experts, a, b, scale=b**-0.5) for a, b in ((hidden, dim), (hidden, dim), (dim, hidden)))
    biases = [made(experts, n) if biased else None for n in (hidden, dim, hidden)]
    if not gated:
        gate, biases[2] = None, None
    residual = made(tokens, dim) if more else None
    return Case(x, torch.from_numpy(chosen).to(device), weights, up, down, gate, *biases, residual)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def summed(case: Case) -> NDArray[np.float64]:
    """residual + Σ_j w_j E_j(x) with silu, one token and one choice after the other."""
    x, weights, up, down = (exact(t) for t in (case.x, case.weights, case.up, case.down))
    x, added = norm64(case.x, case.norm).numpy(), x
    y = np.zeros_like(added) if case.residual is None else exact(case.residual)
    for (token, choice), e in np.ndenumerate(case.chosen.cpu().numpy()):
        hidden = up[e] @ x[token] + (0 if case.up_bias is None else exact(case.up_bias)[e])
        if case.gate is not None:
            opened = exact(case.gate)[e] @ x[token] + (0 if case.gate_bias is None else exact(case.gate_bias)[e])
            hidden = silu(opened) * hidden
        else:
            hidden = silu(hidden)
        out = down[e] @ hidden + (0 if case.down_bias is None else exact(case.down_bias)[e])
        y[token] += weights[token, choice] * out
    return y


def assert_summed(y: torch.Tensor, given: Case) -> None:
    terms = given.up.shape[2] + given.up.shape[1] * given.chosen.shape[1]
    normed = given.norm.kind != "none"  # which is rounded, as hidden numbers are
    assert_close(y, summed(given), terms, inner=(1 + normed, given.x.dtype))


NORMS = ("none", "rms", "layer")
SHAPES = [
    *(Shape(1, 2, 4, 40, 24), Shape(2, 2, 5, 9, 270), Shape(2, 1, 3, 290, 17)),  # rows by themselves
    *(Shape(4, 2, 3, 40, 48), Shape(7, 1, 6, 33, 70), Shape(33, 2, 3, 24, 40), Shape(70, 3, 4, 20, 36)),  # in groups
]


@pytest.mark.parametrize(("shape", "gated", "dtype"), each(5, itertools.product(SHAPES, (False, True), DTYPES)))
def test_experts_agree_with_a_sum_in_float64(
    device: torch.device, shape: Shape, gated: bool, dtype: torch.dtype
) -> None:
    given = case(shape, dtype, device, gated, biased=shape.tokens > 1, more=shape.choices == 1)
    given = given._replace(norm=make_norm(NORMS[shape.tokens % 3], shape.dim, dtype, device))
    assert kernel.refusal(given.x, given.weights, given.up, given.down) is None
    assert_summed(given.computed(kernel.moe_decode), given)
    assert_summed(given.computed(partial(kernel.moe_decode, kernel=False)), given)


def test_an_expert_with_more_tokens_than_a_tile(device: torch.device) -> None:
    given = case(Shape(45, 2, 24, 16, 20), torch.float32, device, biased=True, more=True)
    chosen = torch.tensor([3, 17], device=device).repeat(45, 1)
    chosen[7] = torch.tensor([5, 3])
    given = given._replace(chosen=chosen)
    assert_summed(given.computed(kernel.moe_decode), given)


def test_ticket_counters_are_reset(device: torch.device) -> None:
    given = case(Shape(5, 2, 3, 40, 70), torch.bfloat16, device)
    tickets = torch.zeros(9, dtype=torch.int32, device=device)
    first = given.computed(kernel.moe_decode, tickets=tickets)
    assert not tickets.any()
    assert torch.equal(first, given.computed(kernel.moe_decode, tickets=tickets))


def test_i32_choices_and_tokens_with_equal_choices(device: torch.device) -> None:
    given = case(Shape(4, 2, 3, 16, 16), torch.float32, device, biased=True)
    chosen = torch.tensor([[2, 0], [2, 0], [0, 2], [2, 1]], dtype=torch.int32, device=device)
    given = given._replace(chosen=chosen)
    assert_summed(given.computed(kernel.moe_decode), given)
    assert_summed(given.computed(partial(kernel.moe_decode, kernel=False)), given)


@pytest.mark.parametrize(
    ("ours", "attrs"),
    [
        ("silu", {"activation": "silu"}),
        ("gelu_quick", {"activation": "swish(1.702)", "limit": 0.9, "shift": 1.0}),
        ("gelu_tanh", {"activation": "gelu_tanh", "limit": 0.5}),
    ],
)
def test_kernel_agrees_with_the_op(device: torch.device, ours: str, attrs: dict[str, Any]) -> None:
    given = case(Shape(2, 2, 4, 20, 12), torch.float32, device, biased=True)
    combine = torch.zeros(2, 4, device=device).scatter(1, given.chosen, given.weights)
    stacks = (exact(t) for t in given[3:9] if isinstance(t, torch.Tensor))
    want = op.reference(exact(given.x), exact(combine), *stacks, **attrs)
    for computed in (kernel.moe_decode, partial(kernel.moe_decode, kernel=False)):
        y = given.computed(computed, **{**attrs, "activation": ours})
        assert_close(y, want, terms=52)


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    given = case(Shape(513, 2, 4, 10, 6), torch.bfloat16, device)
    assert kernel.refusal(given.x, given.weights, given.up, given.down) == "not 1 to 512 rows"
    assert_summed(given.computed(kernel.moe_decode), given)
    given = case(SHAPES[0], torch.float64, device)
    assert (
        kernel.refusal(given.x, given.weights, given.up, given.down) == "torch.float64 is not one of bf16, fp16, fp32"
    )
    assert_summed(given.computed(kernel.moe_decode), given)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    given = case(SHAPES[0], torch.float32, device)
    for changed, words in (
        (given._replace(x=given.x[:, 1:]), r"x \[1, 23\] does not fit up \[4, 40, 24\]"),
        (given._replace(down=given.down.mT), r"down \[4, 40, 24\] must be \[4, 24, 40\]"),
        (given._replace(weights=given.weights[:, 1:]), r"chosen \[1, 2\] and weights \[1, 1\] must be \[1, k\]"),
    ):
        with pytest.raises(ValueError, match=words):
            changed.computed(kernel.moe_decode)
    with pytest.raises(ValueError, match="activation 'soft' is not one of identity"):
        given.computed(kernel.moe_decode, activation="soft")


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    given = case(SHAPES[0], torch.float32, device)
    given.weights.requires_grad_()
    assert kernel.refusal(given.x, given.weights, given.up, given.down) == "a gradient is required"
    assert given.computed(kernel.moe_decode).requires_grad
