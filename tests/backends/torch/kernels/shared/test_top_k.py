"""Top-k choice of experts in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.top_k import check, choose_experts, constants, expert_places, refusal

HOW = {"scoring": "softmax", "groups": 1, "top_groups": 1, "group_score": "max"}


@jit
def choose_kernel(
    logits, push, experts, weights, scale,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    expert, there = expert_places(EXPERTS, GROUPS, GROUP_SLOTS, WIDE)
    row = tl.load(logits + expert, mask=there, other=float("-inf"))[None, :]
    added = tl.load(push + expert, mask=there, other=0.0)
    number, weight = choose_experts(
        row, added, expert, there, scale, CHOICES, SIGMOID, RENORMALIZE, GROUPS, OPEN, TOP2, GROUP_SLOTS, WIDE, SLOTS
    )
    slot = tl.arange(0, SLOTS)[None, :]
    tl.store(experts + slot, number, mask=slot < CHOICES)
    tl.store(weights + slot, weight, mask=slot < CHOICES)


def choose(
    device: torch.device, logits: list[float], k: int, push: list[float] | None = None, scale: float = 1.0, **how: Any
) -> tuple[list[int], torch.Tensor]:
    """Choose `k` experts of one token; return them with their weights."""
    settings = {**HOW, "renormalize": True, **how}
    given = torch.tensor(logits, device=device)
    added = torch.zeros_like(given) if push is None else torch.tensor(push, device=device)
    experts = torch.zeros(k, dtype=torch.int32, device=device)
    weights = torch.zeros(k, device=device)
    choose_kernel[(1,)](given, added, experts, weights, scale, **constants(len(logits), k, **settings))
    return experts.tolist(), weights.cpu()


def test_softmax_weights_of_the_largest_logits(device: torch.device) -> None:
    logits = torch.tensor([1.0, 2.0, 5.0]).log().tolist()
    experts, weights = choose(device, logits, 2, renormalize=False, scale=2.0)
    assert experts == [2, 1]
    torch.testing.assert_close(weights, torch.tensor([1.25, 0.5]))
    _, weights = choose(device, logits, 2)
    torch.testing.assert_close(weights, torch.tensor([5 / 7, 2 / 7]))


def test_a_bias_decides_the_choice_but_not_the_weight(device: torch.device) -> None:
    experts, weights = choose(device, [0.0, 1.0, -1.0], 1, [0.0, 0.0, 5.0], scoring="sigmoid", renormalize=False)
    assert experts == [2]
    torch.testing.assert_close(weights, torch.tensor([-1.0]).sigmoid())


def test_only_the_best_groups_are_chosen_from(device: torch.device) -> None:
    """Groups of 3 experts: the first has the largest expert, the second the largest two."""
    logits = [3.0, -5, -5, 2.5, 2.0, -5, 0.0, 0, 0]
    grouped = {"scoring": "sigmoid", "groups": 3, "top_groups": 1}
    assert choose(device, logits, 2, group_score="max", **grouped)[0] == [0, 1]
    assert choose(device, logits, 2, group_score="top2", **grouped)[0] == [3, 4]


def test_the_first_of_equal_experts_is_chosen(device: torch.device) -> None:
    assert choose(device, [1.0, 2.0, 2.0, 2.0, 1.0], 3)[0] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"groups": 3}, "8 experts cannot be split into groups=3"),
        ({"groups": 4, "top_groups": 5}, "or top_groups=5 is out of range"),
        ({"k": 5, "groups": 4, "top_groups": 2}, "k=5 exceeds the number of experts to choose from, 4"),
        ({"k": 0}, "k=0 exceeds the number of experts to choose from, 8"),
        ({"scoring": "tanh"}, "scoring='tanh' is not softmax or sigmoid"),
        ({"group_score": "sum"}, "group_score='sum' is not max or top2"),
        ({"groups": 8, "group_score": "top2"}, "group_score='top2' needs two experts per group"),
    ],
)
def test_choices_that_are_not_possible_are_refused(changed: dict[str, Any], message: str) -> None:
    check(8, 1, **HOW)
    with pytest.raises(ValueError, match=message):
        check(**{"experts": 8, "k": 1, **HOW, **changed})


def test_kernels_choose_16_of_512_experts_at_most() -> None:
    assert refusal(512, 16) is None
    assert refusal(513, 1) == refusal(8, 17) == "more than 512 experts or 16 choices"


def test_places_are_padded_to_powers_of_two() -> None:
    sizes = constants(9, 3, "softmax", True, 3, 2, "top2")
    assert {n: sizes[n] for n in ("GROUP_SLOTS", "WIDE", "SLOTS")} == {"GROUP_SLOTS": 4, "WIDE": 4, "SLOTS": 4}
