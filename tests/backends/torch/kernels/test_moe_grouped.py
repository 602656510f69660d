"""The mixture of experts as grouped GEMMs, against a sum over experts in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.moe_grouped import _shapes, grouped_moe
from weft.backends.torch.kernels.shared.norm import NO_NORM, Norm
from weft.backends.torch.kernels.shared.operands import power_of_2

from .oracles import draw, make_norm, norm64

TOKENS, EXPERTS, HIDDEN, DIM, CHOICES = 5, 4, 24, 40, 2


def operands(device: torch.device, full: bool) -> dict[str, Any]:
    """Draw operands; gate, biases and residual are None unless `full`. No token chooses expert 2."""
    opens, closes = (EXPERTS, HIDDEN, DIM), (EXPERTS, DIM, HIDDEN)
    shapes = {"x": (TOKENS, DIM), "residual": (TOKENS, DIM), "up": opens, "gate": opens, "down": closes}
    shapes |= {"up_bias": opens[:2], "gate_bias": opens[:2], "down_bias": closes[:2]}
    drawn: dict[str, Any] = {
        name: draw(*shape, seed=i, dtype=torch.float32, device=device) / shape[-1] ** 0.5
        for i, (name, shape) in enumerate(shapes.items())
    }
    if not full:
        drawn |= dict.fromkeys(("gate", "up_bias", "down_bias", "gate_bias", "residual"))
    chosen = torch.tensor([[0, 1], [1, 3], [3, 0], [1, 0], [3, 1]], dtype=torch.int32, device=device)
    weights = draw(TOKENS, CHOICES, seed=9, dtype=torch.float32, device=device).abs()
    return {**drawn, "chosen": chosen, "weights": weights}


def mixed(given: dict[str, Any], norm: Norm) -> torch.Tensor:
    """Sum the chosen experts of each token, one after the other, in float64."""
    wide = {n: None if t is None else t.double() for n, t in given.items()}
    x = norm64(given["x"], norm)
    y = torch.zeros_like(x) if wide["residual"] is None else wide["residual"].clone()
    for token in range(TOKENS):
        for choice, e in enumerate(given["chosen"][token].tolist()):
            hidden = wide["up"][e] @ x[token] + (0 if wide["up_bias"] is None else wide["up_bias"][e])
            if wide["gate"] is None:
                hidden = hidden.relu()
            else:
                hidden = (wide["gate"][e] @ x[token] + wide["gate_bias"][e]).relu().clamp(max=0.5) * (
                    hidden.clamp(-0.5, 0.5) + 1
                )
            out = wide["down"][e] @ hidden + (0 if wide["down_bias"] is None else wide["down_bias"][e])
            y[token] += wide["weights"][token, choice] * out
    return y


@pytest.mark.parametrize(("full", "kind"), [(False, "none"), (True, "rms")])
def test_grouped_experts_agree_with_a_sum_in_float64(device: torch.device, full: bool, kind: str) -> None:
    given = operands(device, full)
    norm = make_norm(kind, DIM, torch.float32, device) if full else NO_NORM
    limits = (0.5, 1.0) if full else (None, 0.0)
    names = ("x", "chosen", "weights", "up", "down", "gate", "up_bias", "down_bias", "gate_bias", "residual")
    y = grouped_moe(*(given[name] for name in names), norm, "relu", *limits, None)
    torch.testing.assert_close(y.double(), mixed(given, norm), rtol=1e-4, atol=1e-5)


def test_tiles_have_as_many_slots_as_an_expert_has_on_average() -> None:
    for tokens, choices, experts, slots in ((4, 2, 8, 8), (64, 2, 8, 16), (512, 8, 8, 64), (100, 1, 4, 32)):
        opens, closes = _shapes(tokens, choices, experts, 768, 2048, torch.bfloat16, gated=True)
        assert opens["BLOCK_M"] == closes["BLOCK_M"] == slots
        for sizes in (opens, closes):
            assert sizes["BLOCK_N"] in (32, 64) and sizes["BLOCK_K"] == power_of_2(sizes["BLOCK_K"])


def test_blocks_have_fewer_weights_where_multiprocessors_would_be_idle() -> None:
    few, _ = _shapes(4, 1, 2, 64, 64, torch.bfloat16, gated=False)
    many, _ = _shapes(64, 2, 64, 2048, 2048, torch.bfloat16, gated=False)
    assert (few["BLOCK_N"], many["BLOCK_N"]) == (32, 64)
