"""Gradients of parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal, positive

from .lib.part_calls import CALLS, drawn, moe, outputs

# Operands without a gradient: a choice is a step, and so is what was chosen.
FIXED = {"moe": ("combine",), "load_balance_loss": ("combine",)}
SHORT = torch.rand(1, 70, 3).numpy() / 2  # keys
LONGER = {  # more than one chunk
    "gated_linear_attention": [
        case(normal(1, 70, 3), normal(1, 70, 3), normal(1, 70, 4), groups=1, heads=2),
        case(normal(1, 70, 3), normal(1, 70, 3), normal(1, 70, 4), -torch.rand(1, 70, 2).numpy(), heads=2),
        case(normal(1, 20, 2), normal(1, 20, 2), normal(1, 20, 4), -torch.rand(1, 20, 4).numpy(), heads=2),
    ],
    "gated_delta_rule": [
        case(normal(1, 70, 3), SHORT, normal(1, 70, 4), torch.rand(1, 70, 2).numpy(), heads=2),
        case(
            *(normal(1, 70, 3), SHORT, normal(1, 70, 4), torch.rand(1, 70, 2).numpy()), -(SHORT[..., :2] ** 2), heads=2
        ),
        case(*(normal(1, 70, 3), SHORT, normal(1, 70, 2), torch.rand(1, 70, 1).numpy()), -(SHORT**2), heads=1),
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


STEPS = ("limit_capacity", "gather_rows", "lightning_index")  # which have none


@pytest.mark.parametrize(("op", "example"), examples([name for name in CALLS if name not in STEPS], 1500))
def test_gradients_of_snippets_agree_with_finite_differences(op: Op, example: Case) -> None:
    """Those of autograd are those of finite differences, in every operand that has one."""
    operands = drawn(example, torch.float64)
    for operand, t in zip(op.operands, operands, strict=False):
        if t is not None and t.is_floating_point():
            t.requires_grad_(operand.name not in FIXED.get(op.name, ()))

    def call(*given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(y for y in outputs(op, example, list(given)) if y.is_floating_point())

    assert torch.autograd.gradcheck(call, tuple(operands), fast_mode=True)


def test_gradients_of_expert_weights_agree_with_finite_differences() -> None:
    """Weights of experts have gradients where they are not zero, behind a limit as well."""
    x, combine, *stacks = drawn(lookup("moe").cases[0], torch.float64)
    assert combine is not None
    weights, limit = torch.rand_like(combine).requires_grad_(), lookup("limit_capacity")

    def call(weights: Tensor) -> Tensor:
        (limited,) = outputs(limit, case(capacity=1), [weights * (combine != 0)])
        return moe(x, limited, *stacks, active=2)

    assert torch.autograd.gradcheck(call, (weights,), fast_mode=True)


def test_key_selection_has_no_gradient() -> None:
    index = lookup("lightning_index")
    operands = [None if t is None else t.requires_grad_() for t in drawn(index.cases[0], torch.float64)]
    (bias,) = outputs(index, index.cases[0], operands)
    assert not bias.requires_grad
