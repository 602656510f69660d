"""Routers against scores sorted in float64, and against the op's own reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import route as kernel
from weft.ir.ops.routing import route as op

from .close import DTYPES, assert_close, exact, rounded


def case(tokens: int, experts: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and a bias that no rounding brings nearer than 0.01 to each other."""
    rng = np.random.default_rng(0)
    logits = np.stack([rng.permutation(experts) / 16 for _ in range(tokens)])
    return rounded(logits, dtype, device), rounded(rng.permutation(experts) / 7, torch.float32, device)


def sorted_scores(
    logits: torch.Tensor, bias: torch.Tensor | None, k: int, scoring: str, renormalize: bool, scale: float
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    x = exact(logits)
    scores = 1 / (1 + np.exp(-x)) if scoring == "sigmoid" else np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    ranked = scores if bias is None else scores + exact(bias)
    chosen = np.argsort(-ranked, -1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, chosen, -1)
    return chosen, scale * (weights / weights.sum(-1, keepdims=True) if renormalize else weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "attrs"),
    [
        (3, 8, {"k": 2}),
        (2, 60, {"k": 5, "scale": 2.5}),
        (2, 33, {"k": 1, "renormalize": False}),
        (2, 40, {"k": 6, "scoring": "sigmoid"}),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_chosen_experts_and_weights_agree_with_float64(
    device: torch.device, tokens: int, experts: int, attrs: dict[str, Any], biased: bool, dtype: torch.dtype
) -> None:
    logits, bias = case(tokens, experts, dtype, device)
    given = bias if biased else None
    assert kernel.refusal(logits, attrs["k"]) is None
    wanted, want = sorted_scores(logits, given, **{"scoring": "softmax", "renormalize": True, "scale": 1.0, **attrs})
    for routed in (kernel.route, partial(kernel.route, kernel=False)):
        chosen, weights = routed(logits, given, **attrs)
        assert chosen.dtype == torch.int32
        assert (chosen.cpu().numpy() == wanted).all()
        assert_close(weights, want, terms=experts)


def best_groups(ranked: NDArray[np.float64], groups: int, top_groups: int, group_score: str) -> NDArray[np.bool_]:
    """Mark experts in the best groups of their row, judging each group by itself."""
    width = ranked.shape[1] // groups
    open_to = np.zeros(ranked.shape, bool)
    for row, scores in enumerate(ranked):
        summed = 1 if group_score == "max" else 2
        best = [sum(sorted(scores[g * width : (g + 1) * width])[-summed:]) for g in range(groups)]
        assert np.diff(sorted(best)).min() > 1e-5  # rounding cannot change the choice
        for g in np.argsort(best)[::-1][:top_groups]:
            open_to[row, g * width : (g + 1) * width] = True
    return open_to


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("experts", "attrs"),
    [
        (256, {"k": 8, "groups": 8, "top_groups": 4, "scoring": "sigmoid", "scale": 2.5}),  # DeepSeek-V3
        (160, {"k": 6, "groups": 8, "top_groups": 3, "group_score": "max", "renormalize": False}),  # V2
        (35, {"k": 9, "groups": 5, "top_groups": 2, "scoring": "sigmoid"}),
        (33, {"k": 3, "groups": 11, "top_groups": 3, "group_score": "max"}),
        (6, {"k": 2, "groups": 3, "top_groups": 1}),
        (9, {"k": 4, "groups": 3, "top_groups": 3}),
    ],
)
def test_the_best_groups_are_chosen_from(
    device: torch.device, experts: int, attrs: dict[str, Any], biased: bool, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(3)
    logits = rounded(np.stack([rng.permutation(experts) / 64 - experts / 128 for _ in range(2)]), dtype, device)
    bias = rounded(rng.normal(size=experts), torch.float32, device) if biased else None
    x, pushed = exact(logits), 0 if bias is None else exact(bias)
    scores = 1 / (1 + np.exp(-x)) if "scoring" in attrs else np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    open_to = best_groups(scores + pushed, attrs["groups"], attrs["top_groups"], attrs.get("group_score", "top2"))
    wanted = np.argsort(np.where(open_to, -scores - pushed, np.inf), -1, kind="stable")[:, : attrs["k"]]
    want = np.take_along_axis(scores, wanted, -1)
    if attrs.get("renormalize", True):
        want /= want.sum(-1, keepdims=True)
    for routed in (kernel.route, partial(kernel.route, kernel=False)):
        chosen, weights = routed(logits, bias, **attrs)
        assert (chosen.cpu().numpy() == wanted).all()
        assert_close(weights, attrs.get("scale", 1.0) * want, terms=experts)


def test_the_first_of_equal_groups_wins(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3, 3, 2], [3, 0, 1, 1, 3, 0]], device=device)
    for routed in (kernel.route, partial(kernel.route, kernel=False)):
        chosen, _ = routed(logits, k=2, groups=3, top_groups=1)
        assert chosen.tolist() == [[3, 2], [0, 1]]
        chosen, _ = routed(logits, k=2, groups=3, top_groups=2, group_score="max", scoring="sigmoid")
        assert chosen.tolist() == [[3, 4], [0, 4]]


def test_the_first_of_equal_experts_is_chosen(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    for routed in (kernel.route, partial(kernel.route, kernel=False)):
        chosen, weights = routed(logits, k=3)
        assert chosen.tolist() == [[1, 2, 3], [0, 1, 2]]
        assert_close(weights, np.full((2, 3), 1 / 3), terms=5)


@pytest.mark.parametrize(
    "attrs",
    [
        {"k": 2, "renormalize": False},
        {"k": 3, "scoring": "sigmoid", "scale": 2.5},
        {"k": 3, "groups": 4, "top_groups": 2, "scoring": "sigmoid"},
        {"k": 4, "groups": 4, "top_groups": 2, "group_score": "max", "renormalize": False},
    ],
)
def test_kernel_agrees_with_the_op(device: torch.device, attrs: dict[str, Any]) -> None:
    logits, bias = case(4, 8, torch.float32, device)
    chosen, weights = kernel.route(logits, bias, **attrs)
    combine = torch.zeros_like(logits).scatter(1, chosen.long(), weights)
    assert_close(combine, op.reference(exact(logits), exact(bias), **attrs), terms=8)


def test_a_slice_of_logits(device: torch.device) -> None:
    logits, _ = case(3, 16, torch.float32, device)
    whole = torch.cat([logits + 99, logits], 1)
    for got, want in zip(kernel.route(whole[:, 16:], k=3), kernel.route(logits, k=3), strict=True):
        assert torch.equal(got, want)


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    logits, _ = case(2, 520, torch.float32, device)
    assert kernel.refusal(logits, 2) == "more than 512 experts or 16 choices"
    assert kernel.refusal(logits[:, :8].double(), 2) == "the kernel computes in f32"
    wanted, want = sorted_scores(logits, None, 17, "softmax", True, 1.0)
    chosen, weights = kernel.route(logits, k=17)
    assert (chosen.cpu().numpy() == wanted).all()
    assert_close(weights, want, terms=520)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits, bias = case(2, 8, torch.float32, device)
    for routed in (kernel.route, partial(kernel.route, kernel=False)):
        with pytest.raises(ValueError, match="k=9 exceeds the number of experts to choose from, 8"):
            routed(logits, k=9)
        with pytest.raises(ValueError, match="k=3 exceeds the number of experts to choose from, 2"):
            routed(logits, k=3, groups=4, top_groups=1)
        with pytest.raises(ValueError, match="8 experts cannot be split into groups=3"):
            routed(logits, k=1, groups=3)
        with pytest.raises(ValueError, match="needs two experts per group"):
            routed(logits, k=1, groups=8)
        with pytest.raises(ValueError, match="group_score='mean' is not max or top2"):
            routed(logits, k=1, groups=2, group_score="mean")
        with pytest.raises(ValueError, match=r"bias \[7\] must be \[8\]"):
            routed(logits, bias[:7], k=2)
        with pytest.raises(ValueError, match="scoring='tanh' is not softmax or sigmoid"):
            routed(logits, k=2, scoring="tanh")


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    logits, _ = case(2, 8, torch.float32, device)
    logits.requires_grad_()
    assert kernel.refusal(logits, 2) == "a gradient is required"
    assert kernel.route(logits, k=2)[1].requires_grad
