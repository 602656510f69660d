"""Linear layers and embeddings with packed weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.backends.torch.lib.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    block_linear,
    dequantize_rows,
    float8_linear,
)


def place(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack codes [out, in] code by code, as the docstring of `Quantized` describes the words."""
    words = np.zeros((len(codes), -(-codes.shape[1] * bits // 512) * 16), np.uint32)
    for column in range(codes.shape[1]):
        chunk, place = divmod(column, 512 // bits)
        tile, at = divmod(place, 32)
        words[:, 16 * chunk + at // 2] |= codes[:, column].astype(np.uint32) << (16 * (at % 2) + tile * bits)
    return torch.from_numpy(words.view(np.int32))


def fill(module: Any, bits: int, group: int) -> torch.Tensor:
    """Fill a module with random codes, scales and offsets; return its weight in float64."""
    rng = np.random.default_rng(bits)
    out, width = len(module.codes), module.width
    codes = rng.integers(0, 1 << bits, (out, width))
    module.codes.copy_(place(codes, bits))
    module.scales.copy_(torch.from_numpy(rng.uniform(0.5, 1, (width // group, out))))
    weight = (codes - (1 << bits - 1)) * module.scales.double().numpy().T.repeat(group, 1)
    if module.offsets is not None:
        module.offsets.copy_(torch.from_numpy(rng.uniform(-1, 1, (width // group, out))))
        weight = weight + module.offsets.double().numpy().T.repeat(group, 1)
    return torch.from_numpy(weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
def test_quantized_linear_multiplies_by_its_dequantized_weight(bits: int, offsets: bool) -> None:
    module = QuantizedLinear(96, 5, bias=True, bits=bits, group=32, offsets=offsets)
    weight = fill(module, bits, 32)
    assert module.bias is not None
    with torch.no_grad():
        module.bias.copy_(torch.arange(5.0))
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1))
    wanted = F.linear(x.double(), weight, module.bias.detach().double())
    largest = float(wanted.abs().max())
    torch.testing.assert_close(module(x).detach().double(), wanted, rtol=0, atol=0.02 * largest)
    y = block_linear(x.double(), *module.blocks().parts, bits=bits).double() + module.bias.detach()
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_embedding_looks_up_rows(bits: int) -> None:
    table = QuantizedEmbedding(7, 64, bits=bits, group=32, offsets=True)
    weight = fill(table, bits, 32)
    ids = torch.tensor([[6, 0, 6]])
    torch.testing.assert_close(table(ids).double(), weight[ids], rtol=0, atol=1e-5 * float(weight.abs().max()))


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=["mxfp4", "nvfp4"])
def test_fp4_rows_are_floats_times_8_bit_scales(scales: torch.dtype) -> None:
    """Codes 0 to 15 are 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0)."""
    group = 32 if scales == torch.float8_e8m0fnu else 16
    table = QuantizedEmbedding(1, 32, bits=4, group=group, floats=True, scales=scales)
    table.codes.copy_(place(np.resize(np.arange(16), (1, 32)), 4))
    table.scales.copy_(torch.full((32 // group, 1), 0.25).to(scales).view(torch.uint8))
    if table.tensor_scales is not None:
        table.tensor_scales.fill_(2.0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / (2 if group == 16 else 4)
    assert torch.equal(table(torch.tensor([0]))[0], torch.cat((values, -values)).repeat(2))


def test_scales_keep_their_dtype_when_the_module_is_cast() -> None:
    module = QuantizedLinear(64, 2, bias=True, bits=4, group=32, offsets=True).to(torch.bfloat16)
    dtypes = {name: buffer.dtype for name, buffer in module.named_buffers()}
    assert dtypes == {"codes": torch.int32, "scales": torch.float16, "offsets": torch.float32}
    assert module.bias is not None and module.bias.dtype == torch.bfloat16
    assert module.blocks().shape == (2, 64)


def test_float8_linear_rounds_x_only_for_many_rows() -> None:
    """0.3 is not an FP8 value: 64 rows multiply it as it is, 65 rows its nearest multiple of max|x| / 448."""
    codes = place(np.eye(32)[:1] * torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8).item(), 8)
    weight = codes.view(torch.float8_e4m3fn)
    x = torch.zeros(65, 32)
    x[:, 0], x[:, 1] = 0.3, 448.0
    scales = torch.ones(1, 1)
    few = float8_linear(x[:64], weight, scales)
    assert torch.equal(few, x[:64, :1])
    many = float8_linear(x, weight, scales)
    assert torch.equal(many, torch.full((65, 1), 0.3125))  # e4m3 has steps of 1/32 from 1/4 on


def test_dequantize_rows_of_one_word_by_hand() -> None:
    codes = torch.zeros(1, 16, dtype=torch.int32)
    codes[0, 0] = 3 | 12 << 16  # codes 0 and 1 of tile 0; all others are 0, the value −8
    row = dequantize_rows(codes, torch.full((1, 1), 2.0), torch.tensor([[1.0]]), 4, 4)
    assert row.tolist() == [[-9, 9, -15, -15]]
