"""Routers, expert capacity and expert choice, against the references of their ops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from weft.backends.torch.lib import routing
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import check, examples


@pytest.mark.parametrize(
    ("op", "example", "dtype"), examples("route", "limit_capacity", "expert_choice", "load_balance_loss")
)
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


SCORINGS, TRUTHS = ("softmax", "sigmoid"), (False, True)
GROUPINGS: tuple[dict[str, object], ...] = (
    {},
    {"groups": 4, "top_groups": 2},
    {"groups": 4, "top_groups": 3, "group_score": "max"},
)


@pytest.mark.parametrize("attrs", GROUPINGS, ids=["all", "top2", "max"])
@pytest.mark.parametrize(("scoring", "renormalize", "biased"), [*itertools.product(SCORINGS, TRUTHS, TRUTHS)])
def test_routers_of_all_scorings_and_groupings(
    attrs: dict[str, object], scoring: str, renormalize: bool, biased: bool
) -> None:
    bias = [normal(8)] if biased else []
    example = case(normal(3, 7, 8), *bias, k=3, scoring=scoring, renormalize=renormalize, scale=1.5, **attrs)
    check(lookup("route"), example, torch.float32)


def test_routers_choose_the_first_of_equal_experts() -> None:
    few = np.random.default_rng(1).integers(0, 3, (40, 9)).astype(float)
    for attrs in ({"renormalize": False}, {"scoring": "sigmoid"}, {"groups": 3, "top_groups": 2}):
        check(lookup("route"), case(few, k=4, **attrs), torch.float32)
    alike = np.tile(np.random.default_rng(2).normal(size=(10, 9)), (4, 1))
    check(lookup("expert_choice"), case(alike, capacity=7), torch.float32)


def test_switch_router_of_one_token_by_hand() -> None:
    """Softmax scores of ln 1, ln 2, ln 5 are 1/8, 2/8, 5/8; switch keeps the scores, softmax divides by their sum."""
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    torch.testing.assert_close(routing.route_switch(logits, 2), torch.tensor([[0.0, 0.25, 0.625]]))
    torch.testing.assert_close(routing.route_softmax(logits, 2), torch.tensor([[0.0, 2 / 7, 5 / 7]]))


def test_expert_capacity_rounds_up_but_not_for_rounding_errors() -> None:
    assert [routing.expert_capacity(*sizes) for sizes in ((7, 4, 1.0), (10, 5, 1.1), (1, 8, 1.0))] == [2, 3, 1]
    assert routing.expert_capacity(100, 10, 1.1) == 11  # 1.1 · 100 / 10 is 11.000000000000002


def test_limit_capacity_drops_the_tokens_after_the_first() -> None:
    combine = torch.tensor([[0.5, 0.0], [0.25, 0.75], [0.125, 1.0]])
    assert routing.limit_capacity(combine, 1).tolist() == [[0.5, 0.0], [0.0, 0.75], [0.0, 0.0]]
