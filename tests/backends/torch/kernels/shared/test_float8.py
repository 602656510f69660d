"""Conversions of FP8 (e4m3) and FP4 (e2m1), code by code."""

from __future__ import annotations

import math

import pytest
import torch

from weft.backends.torch.kernels.shared.float8 import (
    as_bytes,
    check_scales,
    decode_float4,
    decode_scales,
    float8_to,
    from_bytes,
    power_of_byte,
    round_float8,
    scale_of_byte,
    to_float8,
    unpack_float4,
    unpack_float8,
)
from weft.backends.torch.kernels.shared.launch import jit, tl

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats 1.0, table 5


def decode_e4m3(code: int) -> float:
    """Decode a byte by the definition of e4m3: bias 7, subnormals below 2⁻⁶."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)
    return -size if code & 0x80 else size


@jit
def round_kernel(x, codes, back):
    at = tl.arange(0, 256)
    y = round_float8(tl.load(x + at))
    tl.store(codes + at, y)
    tl.store(back + at, float8_to(y, tl.float32))


@jit
def scales_kernel(codes, floats, powers):
    at = tl.arange(0, 128)
    x = tl.load(codes + at)
    tl.store(floats + at, scale_of_byte(x, tl.float16).to(tl.float32))
    tl.store(powers + at, power_of_byte(x))


@jit
def unpack_kernel(words, out, TILE: tl.constexpr, DTYPE: tl.constexpr, FLOAT8: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(words + at)
    y = unpack_float8(x, TILE, DTYPE) if FLOAT8 else unpack_float4(x, None, TILE, DTYPE)
    tl.store(out + tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :], y.to(tl.float32))


def test_rounding_is_to_the_nearest_value_and_clamped(device: torch.device) -> None:
    values = torch.tensor([decode_e4m3(code) for code in FINITE], device=device)
    middle = torch.tensor([decode_e4m3(c) + decode_e4m3(c + 1) for c in range(126)], device=device) / 2
    x = torch.cat((values, torch.tensor([1e4, -1e4], device=device)))
    codes, back = torch.empty(256, dtype=torch.float8_e4m3fn, device=device), torch.empty(256, device=device)
    round_kernel[(1,)](x, codes, back)
    assert torch.equal(back[:254], values)  # every value is itself
    assert back[254:].tolist() == [448, -448]
    assert torch.equal(codes.float(), to_float8(x).float())
    ties = torch.cat((middle, middle, torch.zeros(4, device=device)))
    round_kernel[(1,)](ties, codes, back)
    even = [c if c % 2 == 0 else c + 1 for c in range(126)]
    assert back[:126].tolist() == [decode_e4m3(c) for c in even]
    assert torch.equal(to_float8(middle).float().cpu(), back[:126].cpu())


def test_scales_of_bytes(device: torch.device) -> None:
    codes = torch.arange(128, dtype=torch.uint8, device=device)
    floats, powers = torch.empty(128, device=device), torch.empty(128, device=device)
    scales_kernel[(1,)](codes, floats, powers)
    assert floats[:127].tolist() == [decode_e4m3(code) for code in range(127)]
    assert powers.tolist() == [2.0 ** (code - 127) for code in range(128)]


@pytest.mark.parametrize(("dtype", "power"), [("float16", -8), ("bfloat16", 0)])
def test_unpacked_float8_values_are_exact(device: torch.device, dtype: str, power: int) -> None:
    codes = torch.tensor([*FINITE[:252], 0, 1, 2, 3], dtype=torch.uint8, device=device)
    words = codes.view(torch.int32)  # bytes 0 and 2 of a word are in tile 0, bytes 1 and 3 in tile 1
    bytes = codes.view(64, 2, 2)
    for tile in (0, 1):
        out = torch.empty(4, 32, device=device)
        unpack_kernel[(1,)](words, out, TILE=tile, DTYPE=getattr(tl, dtype), FLOAT8=True)
        wanted = [decode_e4m3(int(c)) * 2.0**power for c in bytes[:, :, tile].flatten()]
        assert out.flatten().tolist() == wanted


@pytest.mark.parametrize(("dtype", "power"), [("float16", -14), ("bfloat16", 0)])
def test_unpacked_float4_values_are_exact(device: torch.device, dtype: str, power: int) -> None:
    words = torch.randint(-(2**31), 2**31, (64,), generator=torch.Generator().manual_seed(0)).int().to(device)
    for tile in range(4):
        out = torch.empty(4, 32, device=device)
        unpack_kernel[(1,)](words, out, TILE=tile, DTYPE=getattr(tl, dtype), FLOAT8=False)
        nibbles = [word >> 4 * tile + half & 15 for word in words.tolist() for half in (0, 16)]
        wanted = [(-1) ** (n >> 3) * E2M1[n & 7] for n in nibbles]
        assert (out.flatten() * 2.0**-power).tolist() == wanted
        if tile == 0:
            assert decode_float4(words).tolist() == wanted


def test_cache_bytes_are_values_divided_by_the_scale_of_their_head() -> None:
    x, scale = torch.tensor([1.0, 3.0, 500.0, -0.4]).view(1, 2, 1, 2), torch.tensor([2.0, 0.5])
    stored = as_bytes(x, scale)
    assert stored.dtype == torch.uint8
    assert [decode_e4m3(code) for code in stored.flatten().tolist()] == [0.5, 1.5, 448, -0.8125]
    back = from_bytes(stored, scale, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert back.flatten().tolist() == [1, 3, 224, -0.40625]


def test_float4_scales_are_powers_of_two_or_e4m3_times_a_factor() -> None:
    assert decode_scales(torch.tensor([[126], [128]], dtype=torch.uint8)).tolist() == [[0.5], [2]]
    scales = torch.tensor([[1.5, 0.25]]).to(torch.float8_e4m3fn)
    assert decode_scales(scales, torch.tensor([[2.0, 4.0]])).tolist() == [[3, 1]]


def test_scales_of_caches_are_checked() -> None:
    cache, scale = torch.zeros(1, 2, 4, 8, dtype=torch.uint8), torch.ones(2)
    check_scales(cache, cache, scale, scale)
    check_scales(cache.float(), cache.float(), None, None)
    for given, message in (
        ((cache, cache, scale, None), r"are not float32 \[2\] for keys and for values"),
        ((cache, cache, scale, torch.ones(3)), r"scales \[2\] torch.float32 and \[3\] torch.float32 are not"),
        ((cache, cache.float(), scale, scale), "caches with scales must be uint8, not torch.uint8 and torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            check_scales(*given)
