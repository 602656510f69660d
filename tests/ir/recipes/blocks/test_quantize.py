"""Weights rounded to integer blocks: by formulas of their own, whatever the bits, groups, zero points and shapes."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from weft.ir import WeftError
from weft.ir.recipes import Concat, Recipe, Source, streams
from weft.ir.recipes import recipe as recipe_module
from weft.ir.recipes.blocks import Dequantize, Float8, Quantize, Stored, ToFloat8, find_block_layout
from weft.ir.recipes.blocks.searches import MINIMA
from weft.ir.recipes.readers import Array, MemoryReader
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.text.parser import parse
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, build_integer_layout, build_offset_layout, pack_codes, unpack_codes

KINDS = list(itertools.product((2, 3, 4, 8), (16, 32), (True, False)))


def reader_of(**arrays: Array) -> MemoryReader:
    return MemoryReader(arrays)


def by_hand(row: Array, bits: int, group: int, zeros: bool) -> Array:
    """A row rounded number by number in Python's own arithmetic, with scales in half precision."""
    found: list[float] = []
    for first in range(0, len(row), group):
        numbers = [float(n) for n in row[first : first + group]]
        padded = [*numbers, 0.0]  # where the last group is filled up; 0 is within every range with a zero point
        if zeros:
            low, high = min(padded), max(padded)
            scale = float(np.float16(np.float32(high - low) / np.float32(2**bits - 1)))
            zero = min(max(round(-low / scale), 0), 2**bits - 1) if scale else 0
        else:
            whole = numbers if len(numbers) == group else padded
            largest = max(whole) if max(whole) > -min(whole) else min(whole)
            scale, zero = float(np.float16(np.float32(largest) / np.float32(-(2 ** (bits - 1))))), 2 ** (bits - 1)
        codes = [min(max(round(n / scale) + zero, 0), 2**bits - 1) if scale else zero for n in numbers]
        found += [scale * (code - zero) for code in codes]
    return np.array(found)


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
@pytest.mark.parametrize("width", [16, 40, 96])
def test_rows_are_rounded_as_by_hand(bits: int, group: int, zeros: bool, width: int, rng: np.random.Generator) -> None:
    weight = rng.standard_normal((5, width)).astype(np.float32)
    weight[1] = 0
    weight[2] = np.abs(weight[2])
    reader = reader_of(w=weight)
    found = Quantize(Source("w"), bits, group, zeros).evaluate(reader)
    expected = np.stack([by_hand(row, bits, group, zeros) for row in weight])
    # A number halfway between two codes may go either way: 1/scale is rounded here and the quotient there.
    apart = np.abs(found - expected)
    steps = np.abs(weight).max() / (2 ** (bits - 1) - 1) * 2
    assert (apart < 1e-6).mean() > 0.995 and apart.max() <= steps
    assert not found[1].any()


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_blocks_pack_and_unpack(bits: int, group: int, zeros: bool, rng: np.random.Generator) -> None:
    layout = build_integer_layout(bits, group, zeros)
    recipe = Quantize(Source("w"), bits, group, zeros)
    blocks = recipe.read_blocks(reader_of(w=rng.standard_normal((3, 2 * group)).astype(np.float32)), 0, 3)
    raw = layout.pack(blocks)
    assert raw.shape == (3, 2, layout.dtype.block_bytes)
    again = layout.unpack(raw)
    np.testing.assert_array_equal(layout.dequantize(again), layout.dequantize(blocks))
    np.testing.assert_array_equal(again.codes, blocks.codes)
    assert str(layout) == f"{'u' * zeros}int{bits}_{group}"
    assert layout.bits_per_weight == bits + (16 + bits * zeros) / group


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_lie_lowest_bits_first(bits: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 2**bits, (4, 24)).astype(np.uint8)
    packed = pack_codes(codes, bits)
    for row, numbers in zip(packed, codes, strict=True):
        whole = int.from_bytes(row.tobytes(), "little")
        assert [whole >> bits * i & (2**bits - 1) for i in range(24)] == numbers.tolist()
    np.testing.assert_array_equal(unpack_codes(packed, bits, 24), codes)


class Counting(MemoryReader):
    """A reader that counts the numbers it hands out."""

    numbers = 0

    def read(self, key: str, start: int, stop: int) -> Array:
        rows = super().read(key, start, stop)
        self.numbers += rows.size
        return rows


def parts_of(recipe: Recipe, reader: MemoryReader, names: str) -> dict[str, Array]:
    return {name: Stored(recipe, name).evaluate(reader) for name in names.split()}


@pytest.mark.parametrize(("bits", "group", "zeros"), KINDS)
def test_every_form_of_the_parts_means_the_same(bits: int, group: int, zeros: bool, rng: np.random.Generator) -> None:
    reader = reader_of(a=rng.standard_normal((4, 64)).astype(np.float32), b=rng.standard_normal((2, 64)))
    recipe = Concat(tuple(Quantize(Source(key), bits, group, zeros) for key in "ab"))
    expected = recipe.evaluate(reader)
    layout = find_block_layout(recipe, reader)
    assert isinstance(layout, BlockLayout)
    native = parts_of(recipe, reader, "packed steps points offsets codes scales zeros")
    count = 64 // group
    codes = unpack_codes(native["packed"], bits, 64).reshape(6, count, group).astype(np.float64)
    points = unpack_codes(native["points"], bits, count)[..., None].astype(np.float64)
    own = (native["steps"][..., None] * (codes - points)).reshape(6, 64)
    np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6)
    # Kernels of 4-bit codes: an 8-bit code is two, and what zero points are beyond 128 is in the offsets.
    planes = 2 if bits == 8 else 1
    four = unpack_codes(native["codes"], 4, planes * 64).reshape(6, planes * count, group).astype(np.float64)
    eights = unpack_codes(native["zeros"], 4, planes * count)[..., None].astype(np.float64)
    nibbles = (native["scales"][..., None] * (four - eights)).reshape(6, planes, 64).sum(1)
    if bits == 8:
        nibbles += native["offsets"].repeat(group, 1)
    np.testing.assert_allclose(nibbles, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("names", ["packed steps points", "signed offsets", "words largest steps", "levels", "halves"])
@pytest.mark.parametrize("elements", [1, 1 << 19])
def test_parts_that_are_read_together_are_those_read_alone(
    names: str, elements: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (recipe_module, streams):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    counting = Counting({key: rng.standard_normal((3, 4, 40)).astype(np.float32) for key in "ab"})
    recipe = Concat(tuple(Quantize(Source(key), 4, 16) for key in "ab"), 1)  # a stack, whose rows end within a group
    alone = parts_of(recipe, counting, names)
    counting.numbers = 0
    columns = zip(*streams.stream_parts([Stored(recipe, name) for name in names.split()], counting), strict=True)
    for (name, expected), blocks in zip(alone.items(), columns, strict=True):
        assert {block.dtype for block in blocks} == {expected.dtype}, name
        np.testing.assert_array_equal(np.concatenate([b.reshape(-1) for b in blocks]), expected.reshape(-1), name)
    assert counting.numbers == 2 * 3 * 4 * 40


def test_a_stored_matrix_is_that_which_was_rounded(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((3, 4, 40)).astype(np.float32)  # a stack, whose rows end within a group
    made = Quantize(Source("w"), 4, 16, True)
    reader = reader_of(w=weight)
    parts = parts_of(made, reader, "packed steps points")
    stored = reader_of(c=parts["packed"], s=parts["steps"].astype(np.float16), z=parts["points"])
    again = Dequantize(Source("c"), Source("s"), Source("z"), width=40, bits=4, group=16)
    np.testing.assert_array_equal(again.evaluate(stored), made.evaluate(reader))
    for recipe, source in ((made, reader), (again, stored)):
        streamed = np.concatenate([part.reshape(-1) for part in streams.stream_rows(recipe, source)])
        np.testing.assert_array_equal(streamed, made.evaluate(reader).reshape(-1))
        text = f"graph g {{\n  param %w: f32[3, 4, 40] = {spell_recipe(recipe)}\n}}\n"
        assert parse(text).params["w"].recipe == recipe


@pytest.mark.parametrize("width", [128, 300])
def test_floats_of_8_bits_are_the_nearest(width: int, rng: np.random.Generator) -> None:
    """Against a search among all 256 floats, and the same numbers from what is stored."""
    weight = (rng.standard_normal((2, 150, width)) * np.exp(rng.standard_normal((2, 150, 1)))).astype(np.float32)
    weight[1, 128:, :128] = 0
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    every = np.sort(every[np.isfinite(every)])
    reader, made = reader_of(w=weight), ToFloat8(Source("w"))
    found = made.evaluate(reader)
    for one, i, j in np.ndindex(2, 2, -(-width // 128)):
        tile = np.s_[one, 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        exact = weight[tile].astype(np.float64)
        scale = np.float64(np.float32(np.abs(exact).max() / np.float32(448)))
        near = np.abs(exact[..., None] - scale * every).min(-1)
        error = np.abs(found[tile] - exact)
        np.testing.assert_allclose(error, near, rtol=0, atol=448 * 2.0**-22 * scale)  # products are rounded to f32
    parts = parts_of(made, reader, "packed steps")
    stored = reader_of(c=parts["packed"], s=parts["steps"])
    again = Float8(Source("c"), Source("s"), width)
    for recipe, source in ((made, reader), (again, stored)):
        np.testing.assert_array_equal(recipe.evaluate(source), found)
        streamed = np.concatenate([part.reshape(-1) for part in streams.stream_rows(recipe, source)])
        np.testing.assert_array_equal(streamed, found.reshape(-1))
        text = f"graph g {{\n  param %w: f32[2, 150, {width}] = {spell_recipe(recipe)}\n}}\n"
        assert parse(text).params["w"].recipe == recipe
    matrix = reader_of(w=weight[0])
    for start, stop in ((0, 150), (3, 5), (100, 140), (149, 150)):
        np.testing.assert_array_equal(made.read(matrix, start, stop), found[0, start:stop])


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (Quantize(Source("w"), 5), "codes of 5 bits are not supported; choose 2, 3, 4, 8"),
        (Quantize(Source("w"), 4, 12), "groups of 12 elements do not fill bytes"),
        (Quantize(Source("v")), r"v has shape \[8\], but only matrices can be quantized"),
        (Quantize(Source("nan")), "a weight of nan is not finite"),
        (Quantize(Source("huge")), "a weight of huge exceeds the range of scales in f16"),
        (
            Dequantize(Source("c"), Source("s"), None, width=40, bits=4, group=16),
            r"codes of c, s have shape \[2, 20\], but rows of 40 codes of 4 bits in groups of 16 need \[2, 24\]",
        ),
        (Dequantize(Source("c"), Source("inf"), None, width=40, bits=4, group=8), "a scale of inf is not finite"),
        (ToFloat8(Source("v")), r"v has shape \[8\], but only matrices can be quantized"),
        (ToFloat8(Source("nan")), "a weight of nan is not finite"),
        (Float8(Source("c"), Source("s"), 40), r"c has shape \[2, 20\], but rows of 40 floats .* need \[2, 128\]"),
        (Float8(Source("f"), Source("one"), 128), "an element of f, one is not finite"),
    ],
)
def test_settings_that_do_not_fit_are_refused(recipe: Recipe, why: str) -> None:
    ones = np.ones((2, 32), np.float32)
    reader = reader_of(
        w=ones,
        v=np.ones(8, np.float32),
        nan=np.where(np.arange(32) == 3, np.nan, ones),
        huge=ones * np.float32(1e7),
        c=np.zeros((2, 20), np.uint8),
        s=np.ones((2, 3), np.float16),
        inf=np.full((2, 5), np.inf, np.float16),
        f=np.full((2, 128), 0x7F, np.uint8),
        one=np.ones((2, 1), np.float32),
    )
    with pytest.raises(WeftError, match=why):
        recipe.evaluate(reader)


def test_scales_of_another_dtype_keep_small_weights(rng: np.random.Generator) -> None:
    weight = (rng.standard_normal((2, 32)) * 1e-8).astype(np.float32)
    reader = reader_of(w=weight)
    assert not Quantize(Source("w")).evaluate(reader).any()  # the scale rounds to 0 in f16
    found = Quantize(Source("w"), scale="bf16").evaluate(reader)
    assert np.abs(found - weight).max() < 4e-9 < np.abs(weight).max() / 5
    assert str(build_integer_layout(4, 32, True, dtypes.bf16)) == "uint4_32_bf16"


@pytest.mark.parametrize(("bits", "zeros"), list(itertools.product((2, 3, 4, 8), (True, False))))
def test_searched_scales_lose_less(bits: int, zeros: bool, rng: np.random.Generator) -> None:
    weight = rng.standard_t(5, (64, 96)).astype(np.float32)
    weight[3] = 0
    reader = reader_of(w=weight)
    plain = Quantize(Source("w"), bits, 32, zeros)
    searched = Quantize(Source("w"), bits, 32, zeros, search="kquant")
    groups = weight.reshape(64, 3, 32)
    importance = np.sqrt(np.square(groups).mean(-1, keepdims=True)) + np.abs(groups)

    def error(recipe: Recipe) -> Array:
        found = recipe.evaluate(reader).reshape(64, 3, 32)
        summed: Array = (importance * np.square(found - groups)).sum(-1, dtype=np.float64)
        return summed

    before, after = error(plain), error(searched)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.97 * before.sum()
    np.testing.assert_array_equal(searched.evaluate(reader)[3], 0)
    assert spell_recipe(searched).endswith('search="kquant")')


def half_quadratic(group: Array) -> tuple[float, float]:
    """The scale and the zero point of HQQ for one group, step by step, in float64."""
    scale = (group.max() - group.min()) / 15
    zero, beta = -group.min() / scale, 10.0
    found = []
    for _ in range(20):
        codes = np.clip(np.round(group / scale + zero), 0, 15)
        error = group / scale - (codes - zero)
        found.append(((np.abs(error) ** 0.7).mean(), zero))
        kept = np.maximum(np.abs(error), 1e-30)
        forgiven = np.sign(error) * np.maximum(0, kept - kept**-0.3 / beta)
        zero = float((codes - (group / scale - forgiven)).mean())
        beta *= 1.01
    return float(scale), min(found)[1]


def test_hqq_minimizes_the_norm_of_the_errors(rng: np.random.Generator) -> None:
    weight = rng.standard_t(4, (12, 64)).astype(np.float32)
    groups = weight.reshape(12, 2, 32)
    scales, offsets = MINIMA["hqq"](groups, build_offset_layout(4, 32))
    for row in range(12):
        for g in range(2):
            scale, zero = half_quadratic(groups[row, g].astype(np.float64))
            assert scales[row, g] == pytest.approx(scale, rel=1e-5)
            assert offsets[row, g] == pytest.approx((8 - zero) * scale, abs=2e-4 * scale)


def test_hqq_loses_less_than_integer_zero_points(rng: np.random.Generator) -> None:
    weight = (rng.standard_t(5, (64, 96)) * 0.02).astype(np.float32)
    weight[3], weight[4], weight[5] = 0, 0.3, 1.0 + np.arange(96) * 1e-3
    reader = reader_of(w=weight)
    plain, searched = Quantize(Source("w")), Quantize(Source("w"), search="hqq")
    assert searched.layout(reader) == build_offset_layout(4, 32)
    errors = [np.abs(recipe.evaluate(reader) - weight) for recipe in (plain, searched)]
    ordinary = np.delete(np.arange(64), [3, 4, 5])
    assert (errors[1][ordinary] ** 0.7).mean() < 0.95 * (errors[0][ordinary] ** 0.7).mean()
    assert np.square(errors[1][ordinary]).mean() < np.square(errors[0][ordinary]).mean()
    assert (errors[1][3] == 0).all() and errors[1][4].max() < 0.003 and errors[1][5].max() < 0.05
    assert spell_recipe(searched).endswith('search="hqq")')
    np.testing.assert_array_equal(searched.read(reader, 5, 20), searched.read(reader, 0, 64)[5:20])


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(WeftError, match="unknown search 'best' for scales; known are kquant and hqq"):
        Quantize(Source("w"), search="best").shape(reader_of(w=np.zeros((2, 32), np.float32)))
