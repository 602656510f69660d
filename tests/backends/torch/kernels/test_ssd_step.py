"""One token of Mamba-2, with softplus, gate and norm, against the formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import ssd_step as kernel
from weft.backends.torch.kernels.prefill.mamba2_scan import refusal
from weft.backends.torch.kernels.shared.norm import Norm

from .close import DTYPES, assert_close, exact, rounded

NAMES = ("x", "delta", "a", "b", "c", "d", "past")
Operands = tuple[dict[str, Any], dict[str, Any]]


def case(
    batch: int, heads: int, groups: int, states: int, width: int, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Operands, and keywords without a norm; what has a row for each text is a slice of wider rows."""
    rng = np.random.default_rng(0)
    sizes = [heads * width, heads * width, heads, groups * states, groups * states]
    x, gate, delta, b, c = rounded(rng.normal(size=(batch, sum(sizes))), dtype, device).split(sizes, -1)
    a, past = -rng.uniform(0.2, 2, heads), rng.normal(size=(batch, heads, states, width))
    d, bias = (rounded(t, dtype, device) for t in (rng.normal(size=heads), rng.uniform(-5, 1, heads)))
    f32 = torch.float32
    given = dict(zip(NAMES, (x, delta, rounded(a, f32, device), b, c, d, rounded(past, f32, device)), strict=True))
    return given, {"heads": heads, "groups": groups, "bias": bias, "softplus": True, "gate": gate}


def formula(given: dict[str, Any], more: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y and the state in float64."""
    x, delta, a, b, c, d, past = (exact(given[name]) for name in NAMES)
    batch, heads, share = len(x), more["heads"], more["heads"] // more["groups"]
    delta = delta + exact(more["bias"]) if "bias" in more else delta
    delta = np.logaddexp(0, delta) if more.get("softplus") else delta
    a = -np.exp(a) if more.get("log_a") else a
    x = x.reshape(batch, heads, -1)
    b, c = (t.reshape(batch, more["groups"], -1).repeat(share, 1) for t in (b, c))
    state = np.exp(delta * a)[..., None, None] * past + np.einsum("bh,bhn,bhp->bhnp", delta, b, x)
    y = (np.einsum("bhn,bhnp->bhp", c, state) + d[:, None] * x).reshape(batch, -1)
    if "gate" in more:
        gate = exact(more["gate"])
        y = y * gate / (1 + np.exp(-gate))
    if (norm := more.get("norm")) is not None:
        parts = y.reshape(batch, more.get("norm_groups", 1), -1)
        y = (parts / np.sqrt((parts * parts).mean(-1, keepdims=True) + norm.eps)).reshape(batch, -1)
        y = y if norm.gain is None else y * exact(norm.gain)
    return y, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "norm_groups"),
    [((3, 4, 2, 20, 40), 0), ((1, 4, 2, 5, 3), 2), ((2, 3, 1, 16, 33), 1), ((2, 2, 1, 3, 4), 2)],
)
def test_one_token_agrees_with_float64(
    device: torch.device, shape: tuple[int, int, int, int, int], norm_groups: int, dtype: torch.dtype
) -> None:
    given, more = case(*shape, dtype, device)
    if shape[0] == 2:
        given["a"], more["log_a"] = (-given["a"]).log(), True
    if norm_groups:
        gain = rounded(np.random.default_rng(1).normal(size=given["x"].shape[1]), dtype, device)
        more |= {"norm": Norm("rms", gain, eps=0.1), "norm_groups": norm_groups}
    assert refusal(given["x"], given["b"], heads=shape[1], groups=shape[2]) is None
    want, state = formula(given, more)
    y, present = kernel.ssd_step(**given, **more)
    assert y.dtype == dtype and present.dtype == torch.float32
    assert_close(y, want, terms=shape[3] + shape[4] * shape[1])
    assert_close(present, state, terms=4)
    tickets = torch.zeros(8, dtype=torch.int32, device=device)
    again, same = kernel.ssd_step(**given, **more, present=given["past"], tickets=tickets)
    assert same is given["past"]
    assert torch.equal(again, y) and torch.equal(same, present)
    assert not tickets.any()


def test_recurrence_without_softplus_gate_and_norm(device: torch.device) -> None:
    given, _ = case(2, 4, 2, 5, 6, torch.float32, device)
    given["delta"] = given["delta"].abs()
    want, state = formula(given, {"heads": 4, "groups": 2})
    y, present = kernel.ssd_step(**given, heads=4, groups=2)
    assert_close(y, want, terms=5)
    assert_close(present, state, terms=4)


def test_norms_of_long_rows_are_computed_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST", 16)
    given, more = case(1, 3, 1, 4, 13, torch.float32, device)
    more["norm"] = Norm("rms", eps=0.1)
    assert_close(kernel.ssd_step(**given, **more)[0], formula(given, more)[0], terms=43)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_torch_fallback_agrees_with_float64(device: torch.device, dtype: torch.dtype) -> None:
    given, more = case(2, 4, 2, 5, 6, dtype, device)
    more |= {"norm": Norm("rms", rounded(np.linspace(0.5, 2, 24), dtype, device), eps=0.1), "norm_groups": 2}
    inner = (0, dtype) if dtype == torch.float64 else (8, dtype)  # Δ twice, y, the gate and its product, the norm
    for got, wanted in zip(kernel.ssd_step(**given, **more, kernel=False), formula(given, more), strict=True):
        assert_close(got, wanted, terms=29, inner=inner)


def test_float64_falls_back_to_torch(device: torch.device) -> None:
    given, more = case(1, 2, 1, 3, 4, torch.float64, device)
    want, state = formula(given, more)
    y, present = kernel.ssd_step(**given, **more, present=given["past"])
    assert present is given["past"]
    assert_close(y, want, terms=4)
    assert_close(present, state, terms=4)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    given, more = case(2, 2, 1, 4, 3, torch.float32, device)
    for changed, words in (
        ({"heads": 4}, "cannot be split into 4 heads"),
        ({"past": torch.zeros(2, 2, 3, 4, device=device).mT}, "past and present must be contiguous"),
        ({"bias": torch.zeros(3, device=device)}, r"bias \[3\] is not \[2\]"),
        ({"gate": given["x"][:1]}, r"gate \[1, 6\] must have the shape of x \[2, 6\]"),
        ({"norm": Norm("layer")}, "by RMS norm only"),
        ({"norm": Norm("rms", torch.zeros(3, device=device))}, r"gain \[3\] of the norm is not \[6\]"),
        ({"norm": Norm("rms"), "norm_groups": 4}, "2 heads cannot be split into 4 norm groups"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.ssd_step(**{**given, **more, **changed})


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    given, more = case(1, 2, 1, 4, 3, torch.float32, device)
    more["bias"].requires_grad_()
    assert kernel.ssd_step(**given, **more)[0].requires_grad
