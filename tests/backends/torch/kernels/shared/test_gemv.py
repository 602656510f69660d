"""Tiles of skinny GEMMs, their operands, and the reasons to leave them to torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.gemv import (
    DOT_ROWS,
    MOST_ROWS,
    PROCESSORS,
    STAGED,
    check,
    choose_code_tile,
    choose_tile,
    flatten_rows,
    has_few_rows,
    norm_affine,
    pipeline_stages,
    weight_operands,
)
from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.norm import NO_NORM, Norm
from weft.backends.torch.kernels.shared.operands import power_of_2
from weft.backends.torch.kernels.shared.quantized_gemv import Codes

from ..oracles import assert_near, draw, make_norm, norm64


@jit
def affine_kernel(
    x, x_row, weight, scales, offsets, gain, shift, bias, y, M, N, K, eps,
    NORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = norm_affine(
        x, x_row, weight, scales, offsets, gain, shift, bias, tl.minimum(n, N - 1), M, N, K, eps,
        NORM, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR, STAGES, BITS, GROUP, EVEN, PDL,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    tl.store(y + m[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_products_of_normed_rows_with_a_bias(device: torch.device, rows: int, kind: str) -> None:
    """Up to 3 rows are multiplied on CUDA cores, more on tensor cores."""
    x, weight = (draw(n, 70, seed=n, dtype=torch.float32, device=device) for n in (rows, 9))
    bias, norm = draw(9, seed=2, dtype=torch.float32, device=device), make_norm(kind, 70, torch.float32, device)
    tile = choose_tile(rows, 9, 70, torch.float32)
    assert (tile.stages > 0) == (rows >= DOT_ROWS)
    y = torch.empty(rows, 9, device=device)
    affine_kernel[(-(-9 // tile.rows),)](
        x, x.stride(0), weight, None, None, norm.gain, norm.shift, bias, y, rows, 9, 70, norm.eps,
        NORM=kind, **tile.options(x),
    )  # fmt: skip
    normed = norm64(x, norm)
    size = normed.abs() @ weight.double().abs().T + bias.double().abs()
    assert_near(y, normed @ weight.double().T + bias.double(), size, 70)


SIZES = [*itertools.product((1, 3, 4, 16, 64), (8, 576, 8192), (64, 576, 4096))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_are_powers_of_two_that_fit_into_shared_memory(dtype: torch.dtype) -> None:
    for batch, outputs, inputs in SIZES:
        tile = choose_tile(batch, outputs, inputs, dtype)
        for size in (tile.batch, tile.rows, tile.columns, tile.warps):
            assert size == power_of_2(size)
        assert tile.batch >= batch
        assert tile.stages * (tile.rows + tile.batch) * tile.columns * dtype.itemsize <= STAGED or tile.stages == 2
        assert (tile.stages == 0) == (batch < DOT_ROWS)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (8, 128)])
def test_tiles_of_codes_take_whole_chunks(bits: int, group: int) -> None:
    for batch, outputs, inputs in SIZES:
        tile = choose_code_tile(batch, outputs, inputs, bits, group)
        assert (tile.bits, tile.group) == (bits, group)
        assert tile.columns % (512 // bits) == 0
        assert tile.even == (inputs % tile.columns == 0)
        assert tile.rows % (32 * tile.warps) == 0 and tile.batch >= batch


def test_many_outputs_give_every_multiprocessor_a_block() -> None:
    for outputs in (PROCESSORS * 4, PROCESSORS * 16, PROCESSORS * 64):
        assert outputs // choose_tile(1, outputs, 4096, torch.bfloat16).rows >= 4 * PROCESSORS
        assert choose_tile(1, outputs, 4096, torch.bfloat16, least=8).rows == 8


def test_a_tile_within_a_head_has_no_more_rows_than_it() -> None:
    tile = choose_tile(16, 8192, 4096, torch.bfloat16)
    assert (tile.rows, tile.within(24).rows, tile.within(10_000).rows) == (tile.rows, 16, tile.rows)


def test_small_steps_are_loaded_further_ahead() -> None:
    assert pipeline_stages(64 * 1024, 1024, 132) == 2
    assert pipeline_stages(16 * 1024, 1024, 132) == 4
    assert pipeline_stages(4 * 1024, 1024, 132) == 6
    assert pipeline_stages(16 * 1024, 1024, 8 * 132) == 3  # eight blocks of a multiprocessor load at once


def test_weights_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    check(x, weight, NO_NORM, torch.zeros(3))
    for given, message in (
        ((x, weight[:, 1:], NO_NORM, None), r"x \[2, 8\] does not fit weight \[3, 7\] \[out, in\]"),
        ((x, weight, NO_NORM, torch.zeros(4)), r"bias \[4\] does not fit weight \[3, 8\]"),
        ((x, weight, Norm("rms", torch.zeros(3)), None), r"gain \[3\] of the norm is not \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check(*given)


def test_rows_of_a_wider_tensor_are_not_copied() -> None:
    wide = torch.arange(48.0).view(2, 3, 8)
    part = wide[..., 2:6]
    rows = flatten_rows(part)
    assert rows.shape == (6, 4) and rows.data_ptr() == part.data_ptr() and rows.stride() == (8, 1)
    assert flatten_rows(wide.mT).stride(1) == 1


@pytest.mark.parametrize(("rows", "few"), [(0, False), (1, True), (MOST_ROWS, True), (MOST_ROWS + 1, False)])
def test_few_rows_are_1_to_64(rows: int, few: bool) -> None:
    assert has_few_rows(torch.zeros(rows, 8)) is few


def test_reasons_to_leave_a_product_to_torch(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(3, 8, device=device)
    reasons: dict[str | None, tuple[Any, ...]] = {
        None: (x, weight, None),
        "torch.float64 is not one of bf16, fp16, fp32": (x.double(), weight.double()),
        "an operand differs in dtype from x (torch.float32)": (x, weight.half()),
        "not 1 to 64 rows": (torch.zeros(65, 8, device=device), weight),
        "an operand is not contiguous": (x, torch.zeros(8, 3, device=device).T),
        "a gradient is required": (x, weight.clone().requires_grad_()),
    }
    assert {gemv.refusal(*given): given for given in reasons.values()}.keys() == reasons.keys()
    assert [gemv.refusal(*given) for given in reasons.values()] == [*reasons]


def test_operands_of_codes_are_their_parts() -> None:
    weight = torch.zeros(3, 8)
    assert weight_operands(weight) == (weight, None, None)
    codes = Codes(torch.zeros(3, 16, dtype=torch.int32), torch.ones(1, 3), None, 4, 32)
    assert weight_operands(codes) == (codes.packed, codes.scales, None)
