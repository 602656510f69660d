"""Activations and gated units against PyTorch and transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import ops
from weft.ir.ops.activation import ACTIVATIONS, apply_activation

from .oracles import Oracles, X, assert_equals_torch, to_torch

ORACLES: Oracles = {
    "gelu": [
        ((X,), {"approximate": "none"}, F.gelu),
        ((X,), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
        ((X,), {"approximate": "sigmoid"}, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
    "swish": [((X,), {"beta": 1.0}, F.silu), ((X,), {"beta": 1.7}, lambda x: x / (1 + torch.exp(-1.7 * x)))],
    "elu": [((X,), {"alpha": 1.0}, F.elu), ((X,), {"alpha": 0.4}, lambda x: F.elu(x, 0.4))],
    "relu2": [((X,), {}, lambda x: F.relu(x) ** 2)],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "identity": lambda x: x,
    "swish(0.5)": lambda x: x * torch.sigmoid(0.5 * x),
}


def test_every_activation_has_a_torch_counterpart() -> None:
    assert set(GATES) == {*ACTIVATIONS, "identity", "swish(0.5)"}


@pytest.mark.parametrize("name", GATES)
def test_glu_equals_activated_gate_times_up(name: str) -> None:
    gate, up = X, X[::-1]
    np.testing.assert_allclose(apply_activation(gate, name), GATES[name](to_torch(gate)), rtol=1e-12, atol=1e-14)
    wanted = GATES[name](to_torch(gate)) * to_torch(up.copy())
    np.testing.assert_allclose(ops.glu.reference(gate, up, activation=name), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gelu_tanh", "gelu_new"), ("gelu_quick", "quick_gelu"), ("relu2", "relu2"), ("gelu", "gelu"), ("silu", "swish")],
)
def test_activations_equal_those_of_transformers(ours: str, theirs: str) -> None:
    from transformers.activations import ACT2FN

    np.testing.assert_allclose(apply_activation(X, ours), ACT2FN[theirs](to_torch(X)), rtol=1e-12, atol=1e-14)


def test_glu_with_sigmoid_equals_torch_glu() -> None:
    both = np.concatenate([X[..., :3], X[..., 3:]], -1)  # torch: first half ⊙ σ(second half)
    found = ops.glu.reference(both[..., 3:], both[..., :3], activation="sigmoid")
    np.testing.assert_allclose(found, F.glu(to_torch(both)), rtol=1e-12)
