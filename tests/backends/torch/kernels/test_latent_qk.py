"""Queries against latents and the row of the cache, against the formulas in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.backends.torch.kernels import latent_qk as module
from weft.backends.torch.kernels.latent_qk import latent_qk, refusal
from weft.backends.torch.kernels.shared.norm import Norm

from .oracles import assert_near, draw, norm64

reference = partial(latent_qk, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(
    rows: int, heads: int, rank: int, plain: int, rope: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Operands; q and latent are slices of wider rows, the cache has 7 slots."""
    wide = draw(rows, 1, heads * (plain + rope) + rank + rope, seed=1, dtype=dtype, device=device)
    q, latent = wide.split([heads * (plain + rope), rank + rope], -1)
    angle = draw(rows, rope // 2, seed=2, dtype=FP32, device=device)
    return {
        "q": q,
        "latent": latent,
        "weight": draw(heads * plain, rank, seed=3, dtype=dtype, device=device),
        "cache": draw(rows, 1, 7, rank + rope, seed=4, dtype=dtype, device=device),
        "positions": torch.tensor([[5], [0], [6]][:rows], device=device),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "norm": Norm("rms", draw(rank, seed=5, dtype=dtype, device=device), eps=0.1),
    }


def turned64(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, times e^iθ."""
    both = x.unflatten(-1, (-1, 2)).mT if interleaved else x.unflatten(-1, (2, -1))
    made = torch.view_as_real(torch.complex(both[..., 0, :], both[..., 1, :]) * torch.complex(cos, sin).to(both.device))
    return made.flatten(-2) if interleaved else made.mT.flatten(-2)


def formula(given: dict[str, Any], heads: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, the sizes of their terms, and the rows of the cache in float64."""
    cos, sin = given["cos"].double(), given["sin"].double()
    rope, weight = 2 * cos.shape[1], given["weight"].double().unflatten(0, (heads, -1))
    plain, rotary = given["q"][:, 0].double().unflatten(-1, (heads, -1)).split([weight.shape[1], rope], -1)
    ends = [turned64(rotary[:, h], cos, sin, interleaved) for h in range(heads)]
    absorbed, size = (
        torch.stack([a[:, h] @ b[h] for h in range(heads)], 1)
        for a, b in ((plain, weight), (plain.abs(), weight.abs()))
    )
    turned = torch.stack(ends, 1)
    latent, shared = given["latent"][:, 0].double().split([weight.shape[2], rope], -1)
    row = torch.cat([norm64(latent, given["norm"]), turned64(shared, cos, sin, interleaved)], -1)
    return torch.cat([absorbed, turned], -1), torch.cat([size, turned.abs() + 4], -1), row


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("rows", "heads", "rank", "plain", "rope", "interleaved"),
    [(3, 3, 9, 5, 4, True), (1, 2, 200, 16, 12, False), (2, 1, 17, 3, 2, False)],
)
def test_agrees_with_float64(
    device: torch.device,
    rows: int,
    heads: int,
    rank: int,
    plain: int,
    rope: int,
    interleaved: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NUMBERS", 512)  # so that a rank takes several blocks
    given = case(rows, heads, rank, plain, rope, dtype, device)
    exact, size, row = formula(given, heads, interleaved)
    for compute, inner in ((latent_qk, FP32), (reference, dtype)):
        cache = given["cache"].clone()
        found = compute(**{**given, "cache": cache}, interleaved=interleaved)
        assert found.dtype == dtype
        assert_near(found, exact, size, plain, inner=inner)
        at = given["positions"][:, 0]
        written = torch.stack([cache[b, 0, at[b]] for b in range(rows)])
        assert_near(written, row, row.abs() + 4, rank, inner=inner)
        for b in range(rows):
            cache[b, 0, at[b]] = given["cache"][b, 0, at[b]]
        assert torch.equal(cache, given["cache"])


@pytest.mark.parametrize(("keep", "slot"), [(0, 11 % 7), (2, 2 + 9 % 5)])
def test_a_rolling_cache(device: torch.device, keep: int, slot: int) -> None:
    given = case(2, 2, 8, 4, 2, FP32, device)
    given["positions"] = torch.tensor([11, 1], device=device)
    *_, row = formula(given, 2, False)
    for compute in (latent_qk, reference):
        cache = given["cache"].clone()
        compute(**{**given, "cache": cache}, rolling=True, keep_first=keep)
        changed = (cache != given["cache"]).any(-1)[:, 0]
        assert changed.nonzero().tolist() == [[0, slot], [1, 1]]
        assert_near(cache[0, 0, slot], row[0], row[0].abs() + 4, 8)


def test_positions_without_a_slot_write_nothing(device: torch.device) -> None:
    given = case(2, 2, 8, 4, 2, FP32, device)
    given["positions"] = torch.tensor([7, -1], device=device)
    for compute in (latent_qk, reference):
        cache = given["cache"].clone()
        compute(**{**given, "cache": cache})
        assert torch.equal(cache, given["cache"])


def test_latents_without_a_norm(device: torch.device) -> None:
    given = case(1, 2, 8, 4, 2, FP32, device) | {"norm": Norm()}
    *_, row = formula(given, 2, False)
    latent_qk(**given)
    assert_near(given["cache"][0, 0, 5], row[0], row[0].abs() + 4, 8)


def test_float64_falls_back_to_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "latent_qk_kernel", None)  # not to be launched
    given = case(1, 2, 8, 4, 2, torch.float64, device)
    exact, size, _ = formula(given, 2, True)
    assert_near(latent_qk(**given, interleaved=True), exact, size, 4)


def test_refusals_give_a_reason(device: torch.device) -> None:
    assert refusal(512, 128, 64, BF16) is None
    assert refusal(512, 128, 64, torch.float64) == "no kernel for torch.float64"
    assert "exceed 8192, 1024 and 1024" in str(refusal(512, 2000, 64, BF16))
    given = case(2, 2, 8, 4, 2, FP32, device)
    for changed, words in (
        ({"cos": given["cos"][:1]}, "do not fit a cache"),
        ({"weight": given["weight"][:, :7]}, "do not fit a cache"),
        ({"weight": given["weight"][:7]}, "do not match 2 rotated features"),
        ({"cache": given["cache"].expand(2, 1, 7, 10).mT.contiguous().mT}, "must be contiguous"),
        ({"positions": given["positions"][:1]}, "must have one token for each of 2 rows"),
        ({"norm": Norm("layer")}, "by RMS norm only"),
    ):
        with pytest.raises(ValueError, match=words):
            latent_qk(**{**given, **changed})
