"""Activation functions of kernels, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared.activation import (
    ACTIVATIONS,
    activate,
    apply_gate,
    apply_glu,
    check_activation,
)
from weft.backends.torch.kernels.shared.launch import jit, tl

from ..oracles import FORMULAS

POINTS = torch.tensor([-8.0, -5.0, -1.5, -0.1, 0.0, 0.5, 3.0, 8.0])


@jit
def activate_kernel(x, y, ACTIVATION: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(y + at, activate(tl.load(x + at), ACTIVATION))


@jit
def gate_kernel(gate, up, y, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(y + at, apply_gate(tl.load(gate + at), tl.load(up + at), ACTIVATION, LIMIT, SHIFT))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_kernels_and_torch_agree_with_the_formula(device: torch.device, name: str) -> None:
    x = POINTS.to(device)
    y = torch.empty_like(x)
    activate_kernel[(1,)](x, y, ACTIVATION=name)
    wanted = FORMULAS[name](x.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ACTIVATIONS[name](x).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("limit", "shift"), [(None, 0.0), (2.0, 1.0)])
def test_gated_units_cap_the_gate_and_clip_the_other_factor(
    device: torch.device, limit: float | None, shift: float
) -> None:
    gate, up = POINTS.to(device), POINTS.flip(0).to(device)
    y = torch.empty_like(gate)
    gate_kernel[(1,)](gate, up, y, ACTIVATION="relu", LIMIT=limit, SHIFT=shift)
    capped = [min(g, limit or 1e9) for g in gate.tolist()], [max(min(u, limit or 1e9), -(limit or 1e9)) for u in up]
    wanted = torch.tensor([max(g, 0.0) * (float(u) + shift) for g, u in zip(*capped, strict=True)])
    torch.testing.assert_close(y.cpu(), wanted)
    torch.testing.assert_close(apply_glu(gate, up, "relu", limit, shift).cpu(), wanted)


def test_unknown_activations_are_refused_with_the_known_names() -> None:
    check_activation("silu")
    with pytest.raises(ValueError, match="activation 'snake' is not one of identity, silu, gelu"):
        check_activation("snake")
