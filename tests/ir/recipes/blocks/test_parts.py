"""Parts of blocks in the encodings of kernels, decoded bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes.blocks import Quantize
from weft.ir.recipes.blocks.parts import (
    DTYPES,
    Part,
    choose_kernel_bits,
    compute_part_widths,
    compute_row_bytes,
    encode_part,
    split_parts,
)
from weft.ir.recipes.combinators import Source
from weft.ir.recipes.readers import Array, MemoryReader

OUT, WIDTH, GROUP = 3, 64, 32
WEIGHT = np.random.default_rng(3).standard_normal((OUT, WIDTH)).astype(np.float32)
READER = MemoryReader({"w": WEIGHT})


def read(bits: int, part: str) -> Array:
    """Return a part of the weight, quantized to `bits` bits."""
    return Part(Quantize(Source("w"), bits, GROUP), part).evaluate(READER)


def spread(per_group: Array) -> Array:
    """Repeat the values of groups for their elements."""
    return np.repeat(per_group, GROUP, -1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_steps_and_offsets_give_the_weight(bits: int) -> None:
    wide = choose_kernel_bits(Quantize(Source("w"), bits, GROUP).layout(READER))
    assert wide == (8 if bits == 8 else 4)
    words, steps, offsets = (read(bits, part) for part in ("words", "steps", "offsets"))
    codes = np.zeros((OUT, WIDTH), int)
    for column in range(WIDTH):  # tiles of 32 codes: a pair per word, at the bits of the tile
        tile, (word, second) = column // 32, divmod(column % 32, 2)
        chunk, place = divmod(tile, 16 // wide)
        codes[:, column] = words.view(np.uint32)[:, 16 * chunk + word] >> place * wide + 16 * second & 2**wide - 1
    wanted = Quantize(Source("w"), bits, GROUP).evaluate(READER)
    found = spread(steps) * (codes - 2 ** (wide - 1)) + spread(offsets)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_signed_codes_minus_signed_zeros_times_steps_give_the_weight(bits: int) -> None:
    signed, zeros, steps = (read(bits, part) for part in ("signed", "signed_zeros", "steps"))
    wanted = Quantize(Source("w"), bits, GROUP).evaluate(READER)
    np.testing.assert_allclose(spread(steps) * (signed - spread(zeros.astype(int))), wanted, rtol=1e-6, atol=1e-7)


def test_halves_have_the_second_half_of_a_row_in_their_high_bits() -> None:
    halves, middles, steps = (read(4, part) for part in ("halves", "middles", "steps"))
    codes = np.concatenate([halves & 15, halves >> 4], -1).astype(int)
    wanted = Quantize(Source("w"), 4, GROUP).evaluate(READER)
    np.testing.assert_allclose(spread(steps) * (codes - spread(middles.astype(int))), wanted, rtol=1e-6, atol=1e-7)


def test_two_codes_of_4_bits_make_one_of_8() -> None:
    codes, scales, zeros, offsets = (read(8, part) for part in ("codes", "scales", "zeros", "offsets"))
    planes = np.stack([codes & 15, codes >> 4], -1).reshape(OUT, 2 * WIDTH).astype(int)
    eights = np.stack([zeros & 15, zeros >> 4], -1).reshape(OUT, -1)[:, : scales.shape[1]].astype(int)
    high, low = np.split(spread(scales) * (planes - spread(eights)), 2, -1)
    wanted = Quantize(Source("w"), 8, GROUP).evaluate(READER)
    np.testing.assert_allclose(high + low + spread(offsets), wanted, rtol=1e-4, atol=1e-5)


def test_joined_parts_are_the_bytes_of_each() -> None:
    layout = Quantize(Source("w"), 4, GROUP).layout(READER)
    names = ["packed", "steps", "points"]
    assert compute_row_bytes(layout, WIDTH, names) == [32, 8, 1]
    joined = read(4, "+".join(names))
    assert joined.shape == (OUT, 41) and joined.dtype == np.uint8
    for name, array in zip(names, split_parts(joined, layout, WIDTH, names), strict=True):
        np.testing.assert_array_equal(array, read(4, name))
        assert array.dtype == DTYPES[name].numpy


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_widths_are_those_of_the_arrays(bits: int) -> None:
    recipe = Quantize(Source("w"), bits, GROUP)
    layout, blocks = recipe.layout(READER), recipe.read_blocks(READER, 0, OUT)
    for name, width in compute_part_widths(layout, WIDTH).items():
        if name == "halves" and bits == 8:
            continue
        assert encode_part(layout, blocks, name).shape == (OUT, width), name
    assert encode_part(layout, blocks, "tensor_scale").tolist() == [[1]] * OUT


def test_dense_tensors_have_no_parts() -> None:
    with pytest.raises(WeftError, match="the blocks of w cannot be kept: it is stored as f32"):
        Part(Source("w"), "steps").shape(READER)
