"""Activation functions by the names that architectures use, as Triton device functions and in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from .launch import jit, tl

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def check_activation(name: str) -> None:
    """Check that kernels support the activation `name`; raise ValueError otherwise."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")


def apply_glu(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None = None, shift: float = 0.0
) -> torch.Tensor:
    """Return act(gate) ⊙ (up + shift); with `limit`, first cap the gate at `limit` and clip `up` to ±limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[activation](gate) * (up + shift if shift else up)


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation named ACTIVATION of fp32 x of any shape. tanh is 2σ(2x) − 1, which never overflows."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu_quick":
        x = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "tanh":
        x = 2 * tl.sigmoid(2 * x) - 1
    else:
        tl.static_assert(ACTIVATION == "identity", "unknown activation")
    return x


@jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """Return act(gate) ⊙ (up + SHIFT), fp32 of any shape; LIMIT, if not None, first caps them as in `apply_glu`."""
    if LIMIT is not None:
        gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT)
    return activate(gate, ACTIVATION) * (up + SHIFT)
