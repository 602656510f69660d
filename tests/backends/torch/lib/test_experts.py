"""The ways to compute a mixture of experts: expert by expert, grouped, with gathered weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.backends.torch.lib import experts
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import assert_close, check, drawn, examples, moe, reference

MOE = lookup("moe")
TOKENS, DIM, HIDDEN, EXPERTS, ASKED = 13, 16, 24, 5, 2  # widths that F.grouped_mm takes


def by_expert(x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    return experts.moe_by_expert(x, combine, expert, *stacks)


FORMS = {"by expert": by_expert, "grouped": experts.moe_grouped, "gathered": experts.moe_gathered}
STACKS = normal(EXPERTS, HIDDEN, DIM), normal(EXPERTS, DIM, HIDDEN)
KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "gated": ((*STACKS, normal(EXPERTS, HIDDEN, DIM)), {}),
    "plain": (STACKS, {"activation": "relu"}),
    "biased": (
        (*STACKS, normal(EXPERTS, HIDDEN, DIM), *(normal(EXPERTS, n) for n in (HIDDEN, DIM, HIDDEN))),
        {"activation": "swish(1.702)", "limit": 0.9, "shift": 1.0},
    ),
}


def combine(rng: np.random.Generator, choice: str) -> Any:
    """Weights of ASKED experts for every token; some experts, or all but one, get nothing; some tokens ask fewer."""
    weights = np.zeros((TOKENS, EXPERTS))
    for row in weights:
        open_to = {"spread": [0, 1, 3, 4], "together": [2, 4]}[choice]
        row[rng.choice(open_to, ASKED, replace=False)] = rng.uniform(0.1, 1, ASKED)
    weights[3] *= weights[3] == weights[3].max()
    weights[7] = 0
    return weights


@pytest.mark.parametrize("choice", ["spread", "together"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_of_experts_agree_with_the_reference(
    form: str, kind: str, choice: str, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    stacks, attrs = KINDS[kind]
    operands = drawn(case(normal(TOKENS, DIM), combine(rng, choice), *stacks), dtype)
    y = moe(*operands, **attrs, active=ASKED, form=FORMS[form])
    (want,) = reference(MOE, operands, **attrs)
    assert y.dtype == dtype
    assert_close(y, want, 8, DIM * HIDDEN)  # roundings: up, gate, activation, product, down, weighted sum


@pytest.mark.parametrize("form", ["grouped", "gathered"])
def test_forms_of_experts_have_equal_gradients(form: str, rng: np.random.Generator) -> None:
    stacks, attrs = KINDS["biased"]
    found = []
    weights = combine(rng, "spread")
    for name in ("by expert", form):
        operands = drawn(case(normal(TOKENS, DIM), weights, *stacks), torch.float32)
        leaves = [t.requires_grad_() for t in operands if t is not None]
        y = moe(*leaves, **attrs, active=ASKED, form=FORMS[name])
        gradients = torch.autograd.grad(y.square().sum(), leaves)
        found.append([g * (t != 0) for g, t in zip(gradients, leaves, strict=True)])  # not asked, not learning
    for ours, theirs in zip(*found, strict=True):
        bound = 64 * torch.finfo(torch.float32).eps * TOKENS**0.5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound * float(ours.abs().max()))


@pytest.mark.parametrize("shape", [(2, 3, DIM), (DIM,), (1, DIM), (0, DIM)], ids=str)
def test_experts_take_tokens_of_any_shape(shape: tuple[int, ...]) -> None:
    stacks, attrs = KINDS["gated"]
    weights = np.eye(EXPERTS)[np.arange(int(np.prod(shape[:-1]))) % EXPERTS].reshape(*shape[:-1], EXPERTS)
    operands = drawn(case(normal(*shape), weights, *stacks), torch.float64)
    y = moe(*operands, **attrs, active=1)
    assert_close(y, reference(MOE, operands, **attrs)[0], 1, DIM * HIDDEN)


def test_experts_without_tokens_are_not_run_and_tokens_without_experts_are_zero() -> None:
    asked = []

    def expert(linear: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
        asked.append(len(x))
        return linear(x, weight)

    combine = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    y = experts.moe(torch.ones(3, 4), combine, 1, expert, torch.ones(3, 4, 4))
    assert asked == [2]
    assert y.tolist() == [[8.0] * 4, [0.0] * 4, [4.0] * 4]


@pytest.mark.parametrize(("op", "example", "dtype"), examples("moe"))
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)
