"""Weights in codes that PyTorch packs for its kernels on CPUs: products, and when they are packed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from weft.backends.torch.kernels.cpu import packed
from weft.backends.torch.kernels.cpu.packed import FEW_ROWS, MOST_ROWS, packed_linear
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.kernels.shared.quantized_gemv import Codes, dequantize
from weft.backends.torch.lib.quantized import block_linear

from .packed_products import DTYPES, SHAPES, draw, excess, tokens


@pytest.fixture(autouse=True)
def _as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter widens what is not packed."""
    monkeypatch.setattr(launch, "INTERPRETED", False)


def product(x: torch.Tensor, weight: Codes) -> torch.Tensor:
    return block_linear(x, *weight.parts, bits=weight.bits)


def packs(x: torch.Tensor, weight: Codes) -> bool:
    """Return whether x is multiplied by packed weights, if not at once, the next time."""
    return any(packed_linear(x, *weight.parts, weight.bits) is not None for _ in range(2))


@pytest.mark.parametrize("rows", [1, 2, 5, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_packed_weights(shape: tuple[int, int, int, int], dtype: torch.dtype, rows: int) -> None:
    """Against codes worked out in float64."""
    for offsets in (True, False):
        drawn, x = draw(*shape, offsets=offsets), tokens(shape[3], rows, dtype)
        assert packs(x, drawn.given) == (packed.refusal(dtype) is None)
        assert excess(drawn, x) <= 1
        zeros = product(x, drawn.given)[..., 6::7]
        # Zeros as a product of rounded scales and one rounded offset: what is left is that rounding.
        assert zeros.numel() == 0 or dtype == torch.bfloat16 or not zeros.any()


@pytest.mark.long
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_packed_products_on_cpus_with_fewer_instructions(capability: str) -> None:
    """The same on CPUs with fewer instructions, and by the readable path where there is no operator for them."""
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("packed_products.py")
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["worst"] <= 1
    assert (found["refusals"]["bfloat16"] is None) == (found["capability"] in ("AVX2", "AVX512"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_rows_use_dequantized_weights(dtype: torch.dtype) -> None:
    for bits in (4, 8):
        drawn, most = draw(bits, 32, 48, 96), MOST_ROWS.get((dtype, bits))
        rows = (most or 100) + 1
        x = tokens(96, 2 * rows, dtype)[:1]
        assert packs(x, drawn.given) == (most is None and packed.refusal(dtype) is None)
        assert packs(x[:, 1:], drawn.given) == (packed.refusal(dtype) is None)
        assert excess(drawn, x) <= 1
    assert not packs(x[:, :0], drawn.given)
    assert product(x[:, :0], drawn.given).shape == (1, 0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_packed_block_by_block(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, x = draw(bits, 32, 600, 64), tokens(64, 2, dtype)
    whole = product(x, drawn.given)
    monkeypatch.setattr(packed, "AT_ONCE", 1)
    assert torch.equal(product(x, draw(bits, 32, 600, 64).given), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_packed_once_until_they_change(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, x = draw(4, 32, 48, 96), tokens(96, 1, dtype)
    codes, scales, offsets = drawn.given.parts
    before = product(x, drawn.given)
    pack, built = packed.Codes, []
    monkeypatch.setattr(packed, "Codes", lambda *given: built.append(given) or pack(*given))
    assert torch.equal(product(x, drawn.given), before) and not built
    scales.mul_(2)
    offsets.mul_(2)
    twice = product(x, drawn.given)
    assert torch.equal(twice, 2 * before)
    codes.copy_(draw(4, 32, 48, 96, seed=1).given.packed)
    assert not torch.equal(product(x, drawn.given), twice)
    assert len(built) == (2 if packed.refusal(dtype) is None else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_product_of_many_rows_packs_nothing(dtype: torch.dtype) -> None:
    """Its first time: whoever multiplies so many rows again has them packed."""
    drawn, able = draw(4, 32, 48, 96), packed.refusal(dtype) is None
    many, few = tokens(96, 2 * (FEW_ROWS + 1), dtype)[:1], tokens(96, 2 * FEW_ROWS, dtype)[:1]
    for x, results in ((many, [False, able]), (few, [able, able])):
        parts = draw(4, 32, 48, 96).given.parts
        assert [packed_linear(x, *parts, 4) is not None for _ in range(2)] == results
        assert excess(drawn, x) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_leaves_three_quarters_of_the_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    x, able = tokens(96, 1, dtype), packed.refusal(dtype) is None
    taken = sum(form.nbytes for _, known in packed._packed.values() for _, form in known.values() if form is not None)
    first, second = draw(4, 32, 48, 96), draw(4, 32, 48, 96)
    each = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 1}[dtype] * 48 * 96
    monkeypatch.setattr(packed, "memory", lambda: 4 * (taken + each))
    assert packs(x, first.given) == able and not packs(x, second.given)
    assert excess(first, x) <= 1 and excess(second, x) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_and_nan_scales_stay(dtype: torch.dtype) -> None:
    given = draw(4, 32, 48, 96).given
    given.scales[0, 5], given.scales[1, 7] = torch.inf, torch.nan
    y = product(tokens(96, 1, dtype), given)
    assert not y[..., [5, 7]].isfinite().any() and y[..., 8:].isfinite().all()


@pytest.mark.parametrize(("bits", "most"), [(4, 1.05), (8, 0.95)])
def test_rounded_scales_err_no_more_than_rounded_weights(bits: int, most: float) -> None:
    """The root mean square of errors in bf16, to that of a product of numbers rounded to bf16."""
    drawn, x = draw(bits, 32, 512, 576), tokens(576, 8, torch.bfloat16)
    weight = drawn.number(drawn.given.scales) * (drawn.codes - (1 << (bits - 1))) + drawn.number(drawn.given.offsets)
    want = x.double() @ torch.from_numpy(weight).T
    numbers = F.linear(x, torch.from_numpy(weight).bfloat16())
    errors = [(y.double() - want).square().mean().sqrt() for y in (product(x, drawn.given), numbers)]
    assert errors[0] <= most * errors[1] or packed.refusal(torch.bfloat16) is not None


def test_packed_weights_are_freed_with_their_codes() -> None:
    gc.collect()
    before = len(packed._packed)
    drawn = draw(4, 32, 48, 96)
    product(tokens(96, 1, torch.float32), drawn.given)
    assert len(packed._packed) == before + (packed.refusal(torch.float32) is None)
    del drawn
    gc.collect()
    assert len(packed._packed) == before


def test_gradients_use_dequantized_weights() -> None:
    given = draw(4, 32, 48, 96).given
    x = tokens(96, 2, torch.float32).requires_grad_()
    assert not packs(x, given)
    product(x, given).sum().backward()
    want = dequantize(*given.parts, bits=4, width=96).sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, want.expand_as(x), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert packs(x, given) == (packed.refusal(torch.float32) is None)


def test_refusals_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed.refusal(torch.float64) == "weights are not packed for torch.float64"
    given, x = draw(8, 32, 48, 96).given, tokens(96, 1, torch.float64)
    assert not packs(x, given)
    want = x @ dequantize(*given.parts, bits=8, width=96).double().T
    torch.testing.assert_close(product(x, given), want, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(packed, "refusal", lambda dtype: "this CPU")
    for dtype in DTYPES:
        drawn = draw(4, 32, 48, 96)
        assert excess(drawn, tokens(96, 2, dtype)) <= 1
