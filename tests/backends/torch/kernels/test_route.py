"""Routers against scores sorted in float64, and against the op's own reference."""

from __future__ import annotations

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
def test_the_choice_and_its_weights(
    device: torch.device, tokens: int, experts: int, attrs: dict[str, Any], biased: bool, dtype: torch.dtype
) -> None:
    logits, bias = case(tokens, experts, dtype, device)
    given = bias if biased else None
    assert kernel.refusal(logits, attrs["k"]) is None
    wanted, want = sorted_scores(logits, given, **{"scoring": "softmax", "renormalize": True, "scale": 1.0, **attrs})
    for routed in (kernel.route, kernel.reference):
        chosen, weights = routed(logits, given, **attrs)
        assert chosen.dtype == torch.int32
        assert (chosen.cpu().numpy() == wanted).all()
        assert_close(weights, want, terms=experts)


def test_the_first_of_equals_wins(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    for routed in (kernel.route, kernel.reference):
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
def test_the_op_agrees(device: torch.device, attrs: dict[str, Any]) -> None:
    logits, bias = case(4, 8, torch.float32, device)
    chosen, weights = kernel.route(logits, bias, **attrs)
    combine = torch.zeros_like(logits).scatter(1, chosen.long(), weights)
    assert_close(combine, op.reference(exact(logits), exact(bias), **attrs), terms=8)


def test_a_slice_of_logits(device: torch.device) -> None:
    logits, _ = case(3, 16, torch.float32, device)
    whole = torch.cat([logits + 99, logits], 1)
    for got, want in zip(kernel.route(whole[:, 16:], k=3), kernel.route(logits, k=3), strict=True):
        assert torch.equal(got, want)


def test_what_torch_computes_instead(device: torch.device) -> None:
    logits, _ = case(2, 520, torch.float32, device)
    assert kernel.refusal(logits, 2) == "more than 512 experts or 16 choices"
    assert kernel.refusal(logits[:, :8], 2, groups=2) == "groups of experts compete"
    assert kernel.refusal(logits[:, :8].double(), 2) == "the kernel computes in f32"
    wanted, want = sorted_scores(logits, None, 17, "softmax", True, 1.0)
    chosen, weights = kernel.route(logits, k=17)
    assert (chosen.cpu().numpy() == wanted).all()
    assert_close(weights, want, terms=520)


def test_wrong_operands(device: torch.device) -> None:
    logits, bias = case(2, 8, torch.float32, device)
    for routed in (kernel.route, kernel.reference):
        with pytest.raises(ValueError, match="at least k=9 experts"):
            routed(logits, k=9)
        with pytest.raises(ValueError, match="at least k=3 experts"):
            routed(logits, k=3, groups=4, top_groups=1)
        with pytest.raises(ValueError, match=r"bias \[7\] must be \[8\]"):
            routed(logits, bias[:7], k=2)
        with pytest.raises(ValueError, match="scoring='tanh' is not softmax or sigmoid"):
            routed(logits, k=2, scoring="tanh")


def test_a_gradient_is_left_to_torch(device: torch.device) -> None:
    logits, _ = case(2, 8, torch.float32, device)
    logits.requires_grad_()
    assert kernel.refusal(logits, 2) == "a gradient is wanted"
    assert kernel.route(logits, k=2)[1].requires_grad
