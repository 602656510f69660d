"""Routers with their norm and product against scores in float64: no expert is chosen that another one clearly beats."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.norm_route import norm_route, refusal
from weft.backends.torch.kernels.shared.norm import Norm

from .oracles import draw, make_norm, norm64

reference = partial(norm_route, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V3: dict[str, Any] = {"k": 4, "groups": 4, "top_groups": 2, "scoring": "sigmoid", "scale": 2.5}
ROUNDED = {BF16: 2.0**-5, FP16: 2.0**-8, FP32: 2.0**-18}  # of logits, which are near 1

CASES = [
    pytest.param(1, 8, 60, BF16, "rms", {"k": 2}, id="one token"),
    pytest.param(3, 33, 130, FP32, "layer", {"k": 5, "renormalize": False}, id="odd"),
    pytest.param(7, 21, 48, FP16, "none", {"k": 3, "scoring": "sigmoid", "biased": True}, id="biased"),
    pytest.param(2, 24, 64, FP32, "rms", V3, id="in groups"),
    pytest.param(20, 24, 64, BF16, "rms", {**V3, "corrected": True}, id="corrected, in groups, on tensor cores"),
    pytest.param(64, 160, 40, FP32, "rms", {"k": 6, "biased": True}, id="many"),
]


def scores64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm, scoring: str
) -> torch.Tensor:
    logits = norm64(x, norm).cpu() @ weight.cpu().double().T + (0 if bias is None else bias.cpu().double())
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)


def check(
    chosen: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    correction: torch.Tensor | None,
    near: float,
    k: int,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> None:
    """Every choice may be one within rounding of scores, and weights are those of what was chosen."""
    assert chosen.shape == weights.shape == (len(scores), k)
    ranked = scores if correction is None else scores + correction.cpu().double()
    for row, (mine, shares) in enumerate(zip(chosen.cpu().long(), weights.cpu().double(), strict=True)):
        assert len(set(mine.tolist())) == k
        by_group = ranked[row].view(groups, -1)
        best = by_group.topk(2).values.sum(-1) if groups > 1 else by_group.amax(-1)
        opened = {int(e) // by_group.shape[1] for e in mine}
        assert len(opened) <= top_groups
        cut = best.sort(descending=True).values[top_groups - 1]
        assert all(best[g] >= cut - 4 * near for g in opened)
        others = [e for g in opened for e in range(g * by_group.shape[1], (g + 1) * by_group.shape[1]) if e not in mine]
        assert not others or ranked[row][mine].min() >= ranked[row][others].max() - 2 * near
        own = scores[row][mine]
        torch.testing.assert_close(shares, scale * (own / own.sum() if renormalize else own), atol=4 * near, rtol=0)


@pytest.mark.parametrize(("tokens", "experts", "width", "dtype", "kind", "how"), CASES)
def test_chosen_experts_agree_with_float64(
    device: torch.device, tokens: int, experts: int, width: int, dtype: torch.dtype, kind: str, how: dict[str, Any]
) -> None:
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    x, weight = draw(tokens, width, seed=1, **made), draw(experts, width, seed=2, **made, scale=2 * width**-0.5)
    how = dict(how)
    bias = draw(experts, seed=3, **made) if how.pop("biased", False) else None
    corrected = how.pop("corrected", False)
    correction = draw(experts, seed=4, dtype=FP32, device=device, scale=0.3) if corrected else None
    norm = make_norm(kind, width, dtype, device)
    scores = scores64(x, weight, bias, norm, how.get("scoring", "softmax"))
    assert refusal(x, weight, how["k"], norm.gain, norm.shift, bias) is None
    tickets = torch.zeros(1, dtype=torch.int32, device=device)
    for routed in (norm_route, reference):
        chosen, weights = routed(x, weight, bias, correction, norm=norm, tickets=tickets, **how)
        assert chosen.dtype == torch.int32
        assert not tickets.any()
        given = {name: how[name] for name in ("k", "groups", "top_groups", "renormalize", "scale") if name in how}
        check(chosen, weights, scores, correction, ROUNDED[dtype], **given)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, weight = torch.zeros(1, 8, device=device), torch.zeros(6, 8, device=device)
    for words, given in {
        r"x \[1, 8\] does not fit weight \[6, 7\]": {"weight": weight[:, 1:]},
        r"correction \[5\] must be \[6\]": {"correction": torch.zeros(5, device=device)},
        "k=7 exceeds the number of experts to choose from, 6": {"k": 7},
        "scoring='best' is not softmax or sigmoid": {"scoring": "best"},
    }.items():
        with pytest.raises(ValueError, match=words):
            norm_route(**{"x": x, "weight": weight, "k": 2, **given})
    assert refusal(x.expand(65, 8), weight, 2) == "not 1 to 64 rows"
    assert refusal(x, weight, 17) == "more than 512 experts or 16 choices"
