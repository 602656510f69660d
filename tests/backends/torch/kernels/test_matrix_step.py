"""One token of linear attention and of the delta rule, with norms, decay and gate, against the formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.backends.torch.kernels import matrix_step as kernel
from weft.backends.torch.kernels.shared.norm import Norm

from .close import DTYPES, assert_close, exact, rounded

Operands = tuple[dict[str, torch.Tensor], dict[str, Any]]
SHAPES = [  # batch, heads, groups, keys, width
    (3, 4, 2, 20, 40),
    (1, 2, 2, 5, 3),
    (2, 3, 1, 16, 33),
    (2, 1, 1, 1, 1),
]


def case(
    shape: tuple[int, int, int, int, int], decay: str, delta: bool, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Operands, those of a token as slices of wider rows, and keywords; `decay` is that of a "key", a "head", or ""."""
    (batch, heads, groups, keys, width), rng = shape, np.random.default_rng(0)
    sizes = [groups * keys, groups * keys, heads * width]
    q, k, v = rounded(rng.normal(size=(batch, sum(sizes))), dtype, device).split(sizes, -1)
    past = rounded(rng.normal(size=(batch, heads, keys, width)), torch.float32, device)
    gates, more = heads * keys if decay == "key" else heads, {"heads": heads, "groups": groups}
    fade, rate = rounded(np.concatenate([-rng.uniform(0, 2, (batch, gates)), rng.random((batch, heads))], 1), dtype,
                         device).split([gates, heads], -1)  # fmt: skip
    more |= {"decay": fade} if decay else {}
    return {"q": q, "k": k * keys**-0.5, "v": v, "past": past}, more | ({"beta": rate} if delta else {})


def around(given: dict[str, torch.Tensor], more: dict[str, Any], norm_groups: int) -> dict[str, Any]:
    """`more` with all that may be computed around the recurrence."""
    v, heads, rng = given["v"], more["heads"], np.random.default_rng(1)
    dtype, device = v.dtype, v.device
    added: dict[str, Any] = {"unit": Norm("rms", eps=0.01), "q_scale": 0.5, "k_scale": 0.25, "beta_scale": 2.0}
    added["gate"] = rounded(rng.normal(size=(len(v), 2 * v.shape[1])), dtype, device)[:, v.shape[1] :]
    if "decay" in more:
        added["a_log"] = rounded(rng.normal(size=heads), dtype, device)
        added["bias"] = rounded(rng.normal(size=more["decay"].shape[1]), dtype, device)
    if norm_groups:
        gain = rounded(rng.normal(size=v.shape[1] // norm_groups), dtype, device)
        added |= {"norm": Norm("rms", gain, eps=0.1), "norm_groups": norm_groups}
    return more | added


def root_mean_square(x: NDArray[np.float64], norm: Norm) -> NDArray[np.float64]:
    """RMS of the last axis, which a norm divides by."""
    return np.asarray(np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps))


def formula(given: dict[str, Any], more: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y and the state in float64, head by head."""
    q, k, v, past = (exact(given[name]) for name in ("q", "k", "v", "past"))
    batch, heads, keys, width = past.shape
    share, y, state = heads // more["groups"], np.empty((batch, heads, width)), np.empty_like(past)
    for b in range(batch):
        for h in range(heads):
            own = slice(h // share * keys, (h // share + 1) * keys)
            query, key, kept, new = q[b, own], k[b, own], past[b, h], v[b, h * width : (h + 1) * width]
            if "unit" in more:
                query, key = (x / root_mean_square(x, more["unit"]) for x in (query, key))
            query, key = query * more.get("q_scale", 1.0), key * more.get("k_scale", 1.0)
            if "decay" in more:
                gates = exact(more["decay"])[b].reshape(heads, -1)[h]
                if "a_log" in more:
                    step = np.logaddexp(0, gates + exact(more["bias"]).reshape(heads, -1)[h])
                    gates = -np.exp(exact(more["a_log"])[h]) * step
                kept = np.exp(np.broadcast_to(gates, keys))[:, None] * kept
            if "beta" in more:
                new = more.get("beta_scale", 1.0) * exact(more["beta"])[b, h] * (new - kept.T @ key)
            state[b, h] = kept + np.outer(key, new)
            y[b, h] = state[b, h].T @ query
    made = y.reshape(batch, -1)
    if (norm := more.get("norm")) is not None:
        parts = made.reshape(batch, more["norm_groups"], -1)
        made = (parts / root_mean_square(parts, norm) * exact(norm.gain)).reshape(batch, -1)
    return made * exact(more["gate"]) if "gate" in more else made, state


@pytest.mark.halved
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ["", "head", "key"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_token_agrees_with_float64(
    device: torch.device, shape: tuple[int, int, int, int, int], decay: str, delta: bool, dtype: torch.dtype
) -> None:
    given, more = case(shape, decay, delta, dtype, device)
    assert kernel.refusal(given["v"], given["past"]) is None
    want, state = formula(given, more)
    y, present = kernel.matrix_step(**given, **more, kernel=True)
    assert y.dtype == dtype and present.dtype == torch.float32
    assert_close(y, want, terms=4 * shape[3])
    assert_close(present, state, terms=4 * shape[3])
    again, same = kernel.matrix_step(**given, **more, present=given["past"])
    assert same is given["past"]
    assert torch.equal(again, y) and torch.equal(same, present)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "decay", "delta", "norm_groups"),
    [
        ((3, 4, 2, 20, 40), "head", True, 4),
        ((1, 2, 2, 5, 33), "key", True, 2),
        ((2, 4, 4, 16, 9), "head", False, 1),
        ((2, 3, 3, 8, 4), "", True, 0),
        ((2, 4, 2, 3, 5), "key", False, 2),
    ],
)
def test_norms_decay_and_gate_around_a_token(
    device: torch.device,
    shape: tuple[int, int, int, int, int],
    decay: str,
    delta: bool,
    norm_groups: int,
    dtype: torch.dtype,
) -> None:
    given, more = case(shape, decay, delta, dtype, device)
    more = around(given, more, norm_groups)
    want, state = formula(given, more)
    y, present = kernel.matrix_step(**given, **more, kernel=True)
    assert y.dtype == dtype
    assert_close(y, want, terms=8 * shape[3] + shape[4] * shape[1])
    assert_close(present, state, terms=8 * shape[3])
    tickets = torch.zeros(16, dtype=torch.int32, device=device)
    again, same = kernel.matrix_step(**given, **more, present=given["past"], tickets=tickets)
    assert same is given["past"] and torch.equal(again, y) and torch.equal(same, present)
    assert not tickets.any()


def test_long_keys_have_fewer_columns_per_program(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 128)
    given, more = case((1, 2, 1, 20, 9), "key", True, torch.float32, device)
    for got, want in zip(kernel.matrix_step(**given, **more), formula(given, more), strict=True):
        assert_close(got, want, terms=80)


def test_a_decay_of_zero_clears_the_state(device: torch.device) -> None:
    """A gate of −∞ is a factor of 0."""
    given, more = case((1, 2, 2, 3, 4), "head", False, torch.float32, device)
    more["decay"] = torch.full_like(more["decay"], -torch.inf)
    for got, want in zip(kernel.matrix_step(**given, **more), formula(given, more), strict=True):
        assert_close(got, want, terms=4)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("norm_groups", [0, 1, 4])
@pytest.mark.parametrize("decay", ["", "head", "key"])
def test_torch_fallback_agrees_with_float64(
    device: torch.device, decay: str, norm_groups: int, dtype: torch.dtype
) -> None:
    given, more = case((2, 4, 2, 5, 6), decay, bool(norm_groups), dtype, device)
    more = around(given, more, norm_groups) if norm_groups else more
    for got, want in zip(kernel.matrix_step(**given, **more, kernel=False), formula(given, more), strict=True):
        assert_close(got, want, terms=20)


def test_float64_falls_back_to_torch(device: torch.device) -> None:
    given, more = case((1, 2, 1, 3, 4), "key", True, torch.float64, device)
    given["past"] = given["past"].double()
    want, state = formula(given, more)
    y, present = kernel.matrix_step(**given, **more, present=given["past"])
    assert present is given["past"]
    np.testing.assert_allclose(exact(y), want, rtol=1e-12)
    np.testing.assert_allclose(exact(present), state, rtol=1e-12)


def test_long_keys_fall_back_to_torch(device: torch.device) -> None:
    given, more = case((1, 1, 1, 1025, 2), "", True, torch.float32, device)
    assert kernel.refusal(given["v"], given["past"]) == "keys have more than 1024 features"
    with pytest.raises(ValueError, match="keys have more than 1024 features"):
        kernel.matrix_step(**given, **more, kernel=True)
    assert_close(kernel.matrix_step(**given, **more)[0], formula(given, more)[0], terms=4 * 1025)


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    given, more = case((2, 2, 1, 4, 3), "head", True, torch.float32, device)
    for changed, words in (
        ({"heads": 4}, "cannot be split into 1 groups and 4 heads"),
        ({"groups": 3}, "cannot be split into 3 groups and 2 heads"),
        ({"k": given["k"][:, :3]}, "q as wide as k"),
        ({"q": given["q"][:1], "k": given["k"][:1]}, "must have 2 rows"),
        ({"past": given["past"].mT}, r"past \[2, 2, 3, 4\] is not \[2, 2, 4, 3\]"),
        ({"past": torch.zeros(2, 2, 3, 4, device=device).mT}, "past and present must be contiguous"),
        ({"present": torch.zeros(2, 2, 3, 4, device=device)}, "must have the shape of past"),
        ({"decay": more["decay"][:, :1]}, r"decay \[2, 1\] is neither \[2, 2\] nor \[2, 8\]"),
        ({"beta": more["beta"][:, :1]}, r"beta \[2, 1\] is not \[2, 2\]"),
        ({"a_log": given["v"][0]}, r"a_log \[6\] must be \[2\]"),
        ({"a_log": given["v"][0, :2], "decay": None}, "needs a decay"),
        ({"bias": given["v"][0, :2]}, r"and needs a_log"),
        ({"a_log": given["v"][0, :2], "bias": given["v"][0, :3]}, r"and needs a_log"),
        ({"gate": given["v"][:1]}, r"gate \[1, 6\] must have the shape of v \[2, 6\]"),
        ({"norm": Norm("rms"), "norm_groups": 3}, "2 heads cannot be split into 3 norm groups"),
        ({"norm": Norm("rms", given["v"][0, :2])}, r"gain \[2\] of the norm is not \[6\]"),
        ({"norm": Norm("layer")}, "by RMS norm only"),
        ({"unit": Norm("rms", given["q"][0])}, "queries and keys without a gain"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.matrix_step(**{**given, **more, **changed})


def test_gradients_fall_back_to_torch(device: torch.device) -> None:
    given, more = case((1, 2, 1, 4, 3), "key", True, torch.float32, device)
    more["beta"].requires_grad_()
    assert kernel.matrix_step(**given, **more)[0].requires_grad
