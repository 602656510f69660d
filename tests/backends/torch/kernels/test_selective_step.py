"""One token of Mamba, with the projection of its step, norms and gate, against the formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import selective_step as kernel
from weft.backends.torch.kernels.prefill.mamba_scan import refusal
from weft.backends.torch.kernels.shared.norm import Norm

from .close import DTYPES, assert_close, exact, rounded

NAMES = ("x", "delta", "a", "b", "c", "d", "past")


def case(
    batch: int, channels: int, states: int, rank: int, dtype: torch.dtype, device: torch.device, gains: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands, and keywords: rank 0 is a bare recurrence; x, delta, b, c and the gate are slices of wider rows."""
    rng = np.random.default_rng(0)
    wide = rounded(rng.normal(size=(batch, 2 * channels + rank + 2 * states)), dtype, device)
    x, gate, delta, b, c = wide.split([channels, channels, rank, states, states], -1)
    if not rank:
        delta = rounded(rng.uniform(0.05, 0.8, (batch, channels)), dtype, device)
    a, past = -rng.uniform(0.2, 3, (channels, states)), rng.normal(size=(batch, states, channels))
    d = rounded(rng.normal(size=channels), dtype, device)
    f32 = torch.float32
    given = dict(zip(NAMES, (x, delta, rounded(a, f32, device), b, c, d, rounded(past, f32, device)), strict=True))
    if not rank:
        return given, {}
    weight, bias = rng.normal(size=(channels, rank)) / rank**0.5, rng.uniform(-6, 1, channels)
    more: dict[str, Any] = {"weight": rounded(weight, dtype, device), "bias": rounded(bias, dtype, device)}
    more |= {"softplus": True, "gate": gate}
    for name, size in (("norm", rank), ("b_norm", states), ("c_norm", states)) if gains else ():
        more[name] = Norm("rms", rounded(rng.normal(size=size), dtype, device), eps=0.1)
    return given, more


def formula(given: dict[str, Any], more: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y and the state in float64."""
    x, delta, a, b, c, d, past = (exact(given[name]) for name in NAMES)

    def normed(v: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        if (norm := more.get(name)) is None:
            return v
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + norm.eps)
        return v if norm.gain is None else v * exact(norm.gain)

    if "weight" in more:
        delta = normed(delta, "norm") @ exact(more["weight"]).T
    if "bias" in more:
        delta = delta + exact(more["bias"])
    if more.get("softplus"):
        delta = np.log1p(np.exp(-np.abs(delta))) + np.maximum(delta, 0)
    a, b, c = -np.exp(a) if more.get("log_a") else a, normed(b, "b_norm"), normed(c, "c_norm")
    state = np.exp(delta[:, None] * a.T) * past + b[:, :, None] * (delta * x)[:, None]
    y = np.einsum("bnc,bn->bc", state, c) + d * x
    if "gate" in more:
        gate = exact(more["gate"])
        y = y * gate / (1 + np.exp(-gate))
    return y, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "channels", "states", "rank", "gains"),
    [(3, 45, 16, 0, False), (1, 21, 5, 2, True), (2, 70, 16, 13, False), (1, 33, 3, 300, True)],
)
def test_one_token_agrees_with_float64(
    device: torch.device, batch: int, channels: int, states: int, rank: int, gains: bool, dtype: torch.dtype
) -> None:
    given, more = case(batch, channels, states, rank, dtype, device, gains)
    if batch < 3:
        given["a"], more["log_a"] = (-given["a"]).log(), True
    assert refusal(given["x"], given["a"]) is None
    want, state = formula(given, more)
    y, present = kernel.selective_step(**given, **more)
    assert y.dtype == dtype and present.dtype == torch.float32
    assert_close(y, want, terms=states + rank)
    assert_close(present, state, terms=4 + rank)
    again, same = kernel.selective_step(**given, **more, present=given["past"])
    assert same is given["past"]
    assert torch.equal(again, y) and torch.equal(same, present)


def test_step_sizes_with_a_bias_but_no_projection(device: torch.device) -> None:
    """No projection: softplus of what is given."""
    given, _ = case(2, 20, 4, 0, torch.float32, device)
    more = {"bias": rounded(np.linspace(-30, 30, 20), torch.float32, device), "softplus": True}
    want, state = formula(given, more)
    y, present = kernel.selective_step(**given, **more)
    assert_close(y, want, terms=8)
    assert_close(present, state, terms=8)


def test_small_steps_are_precise(device: torch.device) -> None:
    """The softplus of −9 is 1.2e-4 to the precision of f32, not to that of 1."""
    given, _ = case(1, 40, 4, 0, torch.float32, device)
    given |= {"past": torch.zeros_like(given["past"]), "d": None}
    given["delta"] = torch.linspace(-12, -6, 40, device=device)[None]
    _, present = kernel.selective_step(**given, softplus=True)
    step = np.log1p(np.exp(exact(given["delta"])))
    want = exact(given["b"])[:, :, None] * (step * exact(given["x"]))[:, None]
    error = np.abs(exact(present) - want) / np.abs(want)
    assert error.max() < 32 * torch.finfo(torch.float32).eps  # e^x of an x of 12 loses four bits


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_torch_fallback_agrees_with_float64(device: torch.device, dtype: torch.dtype) -> None:
    given, more = case(2, 9, 3, 5, dtype, device, gains=True)
    want = formula(given, more)
    inner = (0, dtype) if dtype == torch.float64 else (16, dtype)  # Δ, B and C are rounded on their way, y is twice
    for got, wanted in zip(kernel.selective_step(**given, **more, kernel=False), want, strict=True):
        assert_close(got, wanted, terms=27, inner=inner)


def test_float64_falls_back_to_torch(device: torch.device) -> None:
    given, more = case(1, 3, 2, 2, torch.float64, device)
    y, present = kernel.selective_step(**given, **more, present=given["past"].clone())
    want, state = formula(given, more)
    assert_close(y, want, terms=4)
    assert_close(present, state, terms=4)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    given, more = case(2, 3, 4, 2, torch.float32, device)
    past = torch.zeros(2, 3, 4, device=device).mT
    for changed, words in (
        ({"x": given["x"][:, :2]}, "do not fit a"),
        ({"b": given["b"][:, :2]}, r"must be \[2, 4\]"),
        ({"past": past}, "past and present must be contiguous"),
        ({"weight": torch.zeros(3, 5, device=device)}, r"must be 2 rows for the projection weight \[3, 5\]"),
        ({"bias": torch.zeros(4, device=device)}, r"bias \[4\] is not \[3\]"),
        ({"gate": given["x"][:1]}, r"gate \[1, 3\] must have the shape of x \[2, 3\]"),
        ({"norm": Norm("layer")}, "RMS norms only"),
        ({"norm": Norm("rms", torch.zeros(3, device=device))}, r"gain \[3\] of the norm is not \[2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.selective_step(**{**given, **more, **changed})


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    given, more = case(1, 3, 4, 2, torch.float32, device)
    more["weight"].requires_grad_()
    assert kernel.selective_step(**given, **more)[0].requires_grad
