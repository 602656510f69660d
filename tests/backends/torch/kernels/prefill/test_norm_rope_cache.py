"""QK-norm, RoPE and cache write of many tokens, against complex numbers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.prefill.norm_rope_cache import (
    check_operands,
    head_constants,
    heads_refusal,
    norm_rope_cache,
    refusal,
)
from weft.backends.torch.kernels.shared.norm import NO_NORM, Norm

from ..oracles import draw, norm64

HEADS, KV_HEADS, WIDTH, CAPACITY = 4, 2, 10, 7


def turned(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [tokens, heads, WIDTH] by `angle` [tokens, pairs] in complex numbers."""
    pairs = angle.shape[1]
    first, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        spun = torch.view_as_complex(first.unflatten(-1, (-1, 2)).contiguous())
    else:
        spun = torch.complex(*(part.contiguous() for part in first.chunk(2, -1)))
    spun = spun * torch.polar(torch.ones_like(angle), angle)[:, None]
    both = torch.view_as_real(spun)
    return torch.cat((both.flatten(-2) if interleaved else both.mT.flatten(-2), rest), -1)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(
    ("normed", "pairs", "interleaved"), [(False, 5, False), (True, 3, True), (True, 0, False), (False, 2, False)]
)
def test_heads_are_normed_rotated_and_stored(
    device: torch.device, normed: bool, pairs: int, interleaved: bool, kernel: bool
) -> None:
    """Two sequences of three tokens each; the last position of the second is outside of the cache."""
    rows, heads = 6, HEADS + 2 * KV_HEADS
    projected = draw(rows, heads * WIDTH, seed=0, dtype=torch.float32, device=device)
    positions = torch.tensor([0, 1, 2, 5, 6, 7], device=device)
    angle = draw(rows, pairs, seed=1, dtype=torch.float32, device=device).abs() if pairs else None
    gains = (draw(WIDTH, seed=s, dtype=torch.float32, device=device) if normed else None for s in (2, 3))
    q_norm, k_norm = (Norm("rms", gain, eps=1e-3) if normed else NO_NORM for gain in gains)
    caches = [torch.zeros(2, KV_HEADS, CAPACITY, WIDTH, device=device) for _ in "kv"]
    tables: dict[str, Any] = {} if angle is None else {"cos": angle.cos(), "sin": angle.sin()}
    q = norm_rope_cache(projected, *caches, positions, q_norm, k_norm, interleaved=interleaved, kernel=kernel, **tables)
    x = projected.double().view(rows, heads, WIDTH)
    parts = [norm64(x[:, :HEADS], q_norm), norm64(x[:, HEADS : HEADS + KV_HEADS], k_norm)]
    if angle is not None:
        parts = [turned(part, angle.double(), interleaved) for part in parts]
    torch.testing.assert_close(q.double(), parts[0], rtol=1e-5, atol=1e-5)
    for cache, new in zip(caches, (parts[1], x[:, HEADS + KV_HEADS :]), strict=True):
        wanted = torch.zeros(2, KV_HEADS, CAPACITY, WIDTH, dtype=torch.float64, device=device)
        for token, at in enumerate(positions.tolist()):
            if at < CAPACITY:
                wanted[token // 3, :, at] = new[token]
        torch.testing.assert_close(cache.double(), wanted, rtol=1e-5, atol=1e-5)


def test_float8_caches_hold_scaled_values(device: torch.device) -> None:
    projected = draw(1, 4 * 8, seed=0, dtype=torch.float32, device=device)  # two query heads, a key and a value head
    scale = torch.tensor([0.125], device=device)
    found = []
    for kernel in (True, False):
        caches = [torch.zeros(1, 1, 2, 8, dtype=torch.uint8, device=device) for _ in "kv"]
        norm_rope_cache(
            projected, *caches, torch.tensor([1], device=device), k_scale=scale, v_scale=2 * scale, kernel=kernel
        )
        found.append(caches)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) and ours[0, 0, 1].any() and not ours[0, 0, 0].any()
    keys = found[0][0].view(torch.float8_e4m3fn).float()[0, 0, 1] * scale
    torch.testing.assert_close(keys, projected[0, 16:24], rtol=2**-4, atol=0.125 * 2**-9)


CACHE = torch.zeros(2, 1, 4, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v_cache": CACHE[:, :, :3]}, r"caches \[2, 1, 4, 8\] and \[2, 1, 3, 8\] .* differ"),
        ({"rows": 3}, "3 tokens are not the same number of tokens for each of the 2 rows"),
        ({"rolling": True}, "4 tokens are not one token, as rolling caches take them, for each of the 2 rows"),
        ({"cos": torch.zeros(4, 2)}, r"cos \[4, 2\] and sin None must both be \[4, n\], n ≤ 4"),
        ({"cos": torch.zeros(4, 5), "sin": torch.zeros(4, 5)}, r"must both be \[4, n\], n ≤ 4"),
        ({"q_norm": Norm("rms", torch.ones(7))}, r"gain \[7\] of the norm is not \[8\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {"rows": 4, "k_cache": CACHE, "v_cache": CACHE}
    check_operands(**given)
    with pytest.raises(ValueError, match=message):
        check_operands(**{**given, **changed})


def test_reasons_to_leave_heads_to_torch(device: torch.device) -> None:
    cache, rms = CACHE.to(device), Norm("rms", torch.ones(8))
    assert heads_refusal(cache, cache, NO_NORM, NO_NORM) is None
    for given, reason in (
        ((CACHE[..., :7], CACHE[..., :7], NO_NORM, NO_NORM), "an odd number of elements per head"),
        ((CACHE, CACHE, rms, NO_NORM), "the same settings for queries and keys"),
        ((CACHE, CACHE, Norm("layer"), Norm("layer")), "the norms of heads are not RMS norms"),
        ((CACHE, CACHE, rms, Norm("rms")), "the norm of queries has a gain and that of keys has none"),
        ((CACHE, CACHE.half(), NO_NORM, NO_NORM), "caches are torch.float32 and torch.float16"),
        ((CACHE, CACHE.mT.contiguous().mT, NO_NORM, NO_NORM), "differ in strides"),
    ):
        assert reason in str(heads_refusal(*given))
    x = torch.zeros(4, 32, device=device)
    assert refusal(x, cache, cache) is None
    assert refusal(x.double(), cache, cache) == "torch.float64 is not one of bf16, fp16, fp32"
    assert refusal(x.T, cache, cache) == "the projections are not contiguous"
    assert refusal(x.clone().requires_grad_(), cache, cache) == "a gradient is required"


def test_heads_are_padded_to_powers_of_two() -> None:
    assert head_constants(80, 32) == {"HEAD_DIM": 80, "HALF": 64, "ROTARY": 32}
