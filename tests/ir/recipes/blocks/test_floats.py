"""Weights rounded to floats of 4 bits: against tables of all values, by the rules of the specifications in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from weft.ir import WeftError
from weft.ir.recipes import Concat, Recipe, Reshape, Source, streams
from weft.ir.recipes.blocks import Float4, Stored, ToFloat4, find_block_layout, widen_small_floats
from weft.ir.recipes.blocks.floats import compute_tensor_scale
from weft.ir.recipes.readers import Array, MemoryReader
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.text.parser import parse
from weft.ir.types.block_layouts import LAYOUTS, BlockLayout, unpack_codes

HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = [*HALF, *(-v for v in HALF)]  # by code
# By byte: seven exponents of four bits with a bias of 7, three bits of fraction; the last one is NaN.
E4M3 = [2.0**-9 * m if e == 0 else 2.0 ** (e - 7) * (1 + m / 8) for e in range(16) for m in range(8)][:-1]
GROUP = {"mxfp4": 32, "nvfp4": 16}
FORMS = sorted(GROUP)
PARTS = {"c": "packed", "s": "levels", "t": "tensor_scale"}  # of a `Float4`


def nearest(x: float, values: list[float]) -> int:
    """The index of the value nearest to x, of two the even one."""
    distances = [abs(x - v) for v in values]
    best = [i for i, d in enumerate(distances) if d == min(distances)]
    return next((i for i in best if i % 2 == 0), best[0])


def scale_by_hand(largest: float, form: str, whole: float) -> float:
    if form == "mxfp4":
        exponent = math.floor(math.log2(largest)) - 2 if largest else -127
        return 2.0 ** min(max(exponent, -127), 127)
    if not largest:
        return 0.0
    return max(E4M3[nearest(largest / 6 / whole, E4M3)], 2.0**-9) * whole


def recipe_of(form: str, *matrices: Array, key: str = "w") -> ToFloat4:
    scales = tuple(compute_tensor_scale(float(np.abs(m).max())) for m in matrices) if form == "nvfp4" else ()
    return ToFloat4(Source(key), form, scales)


def check_rounded(found: Array, weight: Array, form: str, whole: float) -> None:
    """Every number is a float of the table times the scale of its group, and no other is nearer."""
    for row, exact in zip(found.astype(np.float64), weight.astype(np.float64), strict=True):
        for first in range(0, len(exact), GROUP[form]):
            group = slice(first, first + GROUP[form])
            scale = scale_by_hand(float(np.abs(exact[group]).max()), form, whole)
            values = np.array(E2M1) * scale
            near = np.abs(exact[group, None] - values).min(-1)
            slack = 6 * scale * 2.0**-22 + 2.0**-149  # scales and products are rounded to f32
            np.testing.assert_allclose(np.abs(row[group] - exact[group]), near, rtol=0, atol=slack)
            assert (np.abs(row[group, None] - values).min(-1) <= slack).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(5, 96), (1, 32), (1, 7), (3, 70), (4, 17)])
def test_numbers_are_the_nearest_floats(form: str, rows: int, width: int, rng: np.random.Generator) -> None:
    weight = (rng.standard_normal((rows, width)) * np.exp(2 * rng.standard_normal((rows, 1)))).astype(np.float32)
    weight[rows // 2, :5] = 0
    if rows > 1:
        weight[1] = 0
    found = recipe_of(form, weight).evaluate(MemoryReader({"w": weight}))
    assert found.shape == weight.shape and (rows == 1 or not found[1].any())
    check_rounded(found, weight, form, compute_tensor_scale(float(np.abs(weight).max())))


@pytest.mark.parametrize("form", FORMS)
def test_ties_go_to_the_even_code(form: str) -> None:
    """All halves between two floats, with a scale of 1; what is beyond 6 becomes 6."""
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    near = {math.nextafter(t, 9): HALF[HALF.index(v) + (v <= t)] for t, v in ties.items()}
    numbers = [*ties, -0.25, -2.5, -5.0, 0.0]
    weight = np.zeros((3, GROUP[form]), np.float32)
    weight[:2, : len(numbers)] = numbers
    weight[0, 15], weight[1, 15] = 6, -6
    weight[2, :7] = np.nextafter(np.float32(list(ties)), np.float32(9))
    weight[2, 15] = 6
    # The largest E4M3, and a matrix whose scale is a power of two.
    recipe = ToFloat4(Source("w"), form, (1.0,) if form == "nvfp4" else ())
    found = recipe.evaluate(MemoryReader({"w": weight}))
    expected = [*ties.values(), 0.0, -2.0, -4.0, 0.0]
    np.testing.assert_array_equal(found[:2, : len(numbers)], [expected, expected])
    np.testing.assert_array_equal(found[2, :7], list(near.values()))
    if form == "mxfp4":
        beyond = np.array([[7.9, -6.5, 5.1] + [0.0] * 29], np.float32)
        np.testing.assert_array_equal(recipe.evaluate(MemoryReader({"w": beyond}))[0, :3], [6, -6, 6])


def test_powers_of_two_end_where_e8m0_does() -> None:
    """Scales of the largest and smallest numbers of float32, zeros, and what no scale is small enough for."""
    weight = np.zeros((6, 32), np.float32)
    weight[:5, 0] = [np.finfo(np.float32).max, 2.0**127, 2.0**-126, 2.0**-149, 1.0]
    reader, recipe = MemoryReader({"w": weight}), ToFloat4(Source("w"))
    assert Stored(recipe, "levels").evaluate(reader)[:, 0].tolist() == [252, 252, 0, 0, 125, 0]
    found = recipe.evaluate(reader)
    assert found[:5, 0].tolist() == [6 * 2.0**125, 4 * 2.0**125, 2.0**-126, 0.0, 1.0] and not found[:, 1:].any()


def test_scales_of_8_bits_end_where_e4m3_does() -> None:
    """Groups that saturate, that need a subnormal scale, and that the least scale is too large for."""
    sizes = [2688.0, 6 * 416.0, 6 * 2.0**-6, 6 * 3.0 * 2.0**-9, 6 * 2.0**-9, 6 * 2.0**-12, 2.0**-13, 0.0]
    weight = np.zeros((1, 16 * len(sizes)), np.float32)
    weight[0, ::16] = sizes
    reader = MemoryReader({"w": weight, "twice": 2 * weight})
    levels = Stored(ToFloat4(Source("w"), "nvfp4", (1.0,)), "levels").evaluate(reader)
    assert levels.tolist() == [[0x7E, 0x7D, 0x08, 0x03, 0x01, 0x01, 0x01, 0x00]]
    found = ToFloat4(Source("w"), "nvfp4", (1.0,)).evaluate(reader)
    assert found[0, ::16].tolist() == [*sizes[:5], 2.0**-9, 0.0, 0.0]
    # A scale of a matrix that is too small for it: its largest numbers become 6 · 448 of it.
    over = ToFloat4(Source("twice"), "nvfp4", (1.0,)).evaluate(reader)
    assert over[0, ::16].tolist() == [2688.0, 2688.0, *(2 * s for s in sizes[2:5]), 3 * 2.0**-10, 0.0, 0.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-42, 1e-37, 1e-30, 1e30, 3e38])
def test_any_magnitude_has_a_scale(form: str, size: float, rng: np.random.Generator) -> None:
    weight = (rng.uniform(-1, 1, (3, 64)) * size).astype(np.float32)
    found = recipe_of(form, weight).evaluate(MemoryReader({"w": weight}))
    least = 0.25 * (2.0**-127 if form == "mxfp4" else 2.0**-135)  # half of the smallest float, times the least scale
    bound = np.maximum(np.abs(weight.astype(np.float64)) / 4, np.abs(weight).max() / 4 / 4 + least)
    assert (np.abs(found - weight.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_stored_matrix_is_that_which_was_rounded(form: str, rng: np.random.Generator) -> None:
    weight = (rng.standard_normal((3, 4, 40)) * [[[1.0]], [[9.0]], [[0.1]]]).astype(np.float32)
    reader, made = MemoryReader({"w": weight}), recipe_of(form, *weight)
    found = made.evaluate(reader)
    for one, matrix in zip(found, weight, strict=True):
        check_rounded(one, matrix, form, compute_tensor_scale(float(np.abs(matrix).max())))
    parts = {name: Stored(made, name).evaluate(reader) for name in ("packed", "levels", "steps", "tensor_scale")}
    groups, two_levels = -(-40 // GROUP[form]), form == "nvfp4"
    assert parts["packed"].shape == (3, 4, groups * GROUP[form] // 2) and parts["levels"].dtype == np.uint8
    codes = unpack_codes(parts["packed"], 4, groups * GROUP[form])
    scales = np.array([*E4M3, np.nan])[parts["levels"]] if two_levels else 2.0 ** (parts["levels"].astype(float) - 127)
    by_hand = np.array(E2M1)[codes].reshape(3, 4, groups, -1) * (scales * parts["tensor_scale"])[..., None]
    np.testing.assert_allclose(by_hand.reshape(3, 4, -1)[..., :40], found, rtol=2.0**-23, atol=0)
    stored = MemoryReader({"c": parts["packed"], "s": parts["levels"], "t": parts["tensor_scale"]})
    again = Float4(Source("c"), Source("s"), Source("t") if two_levels else None, 40, form)
    for recipe, source in ((made, reader), (again, stored)):
        np.testing.assert_array_equal(recipe.evaluate(source), found)
        np.testing.assert_array_equal(recipe.read(source, 1, 3), found[1:3])
        streamed = np.concatenate([part.reshape(-1) for part in streams.stream_rows(recipe, source)])
        np.testing.assert_array_equal(streamed, found.reshape(-1))
        for name, part in parts.items():
            np.testing.assert_array_equal(Stored(recipe, name).evaluate(source), part)
        text = f"graph g {{\n  param %w: f32[3, 4, 40] = {spell_recipe(recipe)}\n}}\n"
        assert parse(text).params["w"].recipe == recipe


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_of_a_stack_is_read_alone(form: str, rng: np.random.Generator) -> None:
    weight = (rng.standard_normal((12, 40)) * np.repeat([1, 9, 0.1], 4)[:, None]).astype(np.float32)
    reader, stack = MemoryReader({"w": weight}), Reshape(Source("w"), (3, 4, 40))
    made = replace(recipe_of(form, *weight.reshape(3, 4, 40)), item=stack)
    parts = {key: Stored(made, name).evaluate(reader) for key, name in PARTS.items()}
    stored = MemoryReader({key: part.reshape(12, -1) for key, part in parts.items()})
    codes, scales, whole = (Reshape(Source(key), (3, 4, -1)) for key in PARTS)
    again = Float4(codes, scales, whole if form == "nvfp4" else None, 40, form)
    for recipe, source in ((made, reader), (again, stored)):
        for i, expected in enumerate(made.evaluate(reader)):
            row = streams.select_row(recipe, source, i)
            assert row is not None
            np.testing.assert_array_equal(row.evaluate(source), expected)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_pack_and_unpack(form: str, rng: np.random.Generator) -> None:
    weights = {key: rng.standard_normal((2, 64)).astype(np.float32) * size for key, size in (("a", 1), ("b", 30))}
    reader = MemoryReader(weights)
    both = Concat(tuple(recipe_of(form, weights[key], key=key) for key in "ab"))
    layout = find_block_layout(both, reader)
    assert isinstance(layout, BlockLayout) and str(layout) == form
    assert layout.bits_per_weight == 4 + 8 / GROUP[form]
    assert layout.row_bits(70) == math.ceil(70 / GROUP[form]) * (4 * GROUP[form] + 8) + 32 * (form == "nvfp4")
    for key in "ab":
        blocks = recipe_of(form, weights[key], key=key).read_blocks(reader, 0, 2)
        raw = layout.pack(blocks)
        assert raw.shape == (2, 64 // GROUP[form] + (form == "nvfp4"), layout.dtype.block_bytes)
        for part, again in zip(blocks, layout.unpack(raw), strict=True):
            np.testing.assert_array_equal(part, again)  # or both are None


@pytest.mark.parametrize("form", FORMS)
def test_integers_of_8_bits_stand_for_the_same_numbers(form: str, rng: np.random.Generator) -> None:
    weights = {key: rng.standard_normal((2, 40)).astype(np.float32) * size for key, size in (("a", 1), ("b", 30))}
    reader = MemoryReader(weights)
    both = Concat(tuple(recipe_of(form, weights[key], key=key) for key in "ab"))
    integers = widen_small_floats(both, reader)
    assert str(find_block_layout(integers, reader)) == f"int8_{GROUP[form]}_f32"
    np.testing.assert_array_equal(integers.evaluate(reader), both.evaluate(reader))
    codes = Stored(integers, "signed").evaluate(reader).astype(int)
    assert np.isin(codes, [s * c for s in (1, -1) for c in (0, 1, 2, 3, 4, 6, 8, 12)]).all()
    text = f"graph g {{\n  param %w: f32[4, 40] = {spell_recipe(integers)}\n}}\n"
    assert parse(text).params["w"].recipe == integers


def test_mxfp4_is_that_of_gguf(rng: np.random.Generator) -> None:
    raw = rng.integers(0, 256, (6, 3, 17), dtype=np.uint8)
    raw[..., 0] = rng.integers(64, 190, (6, 3))
    layout = LAYOUTS["mxfp4"]
    expected = dequantize(raw.reshape(-1, 17), gguf.GGMLQuantizationType.MXFP4).reshape(6, -1)
    np.testing.assert_array_equal(layout.dequantize(layout.unpack(raw)), expected)
    np.testing.assert_array_equal(layout.pack(layout.unpack(raw)), raw)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (ToFloat4(Source("w"), "fp4"), "unknown format of 4-bit floats 'fp4'; known are mxfp4 and nvfp4"),
        (ToFloat4(Source("v")), r"v has shape \[8\], but only matrices can be"),
        (ToFloat4(Source("nan")), "a weight of nan is not finite"),
        (ToFloat4(Source("inf"), "nvfp4", (1.0,)), "a weight of inf is not finite"),
        (ToFloat4(Source("w"), "nvfp4"), r"w of shape \[2, 32\]: format=nvfp4 needs 1 tensor_scales"),
        (ToFloat4(Source("w"), "nvfp4", (0.0,)), r"needs 1 tensor_scales above 0, not \[0\.0\]"),
        (ToFloat4(Source("w"), "mxfp4", (1.0,)), "format=mxfp4 needs 0 tensor_scales"),
        (Float4(Source("c"), Source("s"), None, 70), r"c has shape \[2, 16\], but rows of 70 .* need \[2, 48\]"),
        (Float4(Source("c"), Source("s"), None, 32), "a scale of c, s is not finite"),
        (Float4(Source("c"), Source("s"), None, 32, "nvfp4"), "c, s: format=nvfp4 needs tensor_scales"),
    ],
)
def test_settings_that_do_not_fit_are_refused(recipe: Recipe, why: str) -> None:
    ones = np.ones((2, 32), np.float32)
    nan, inf = (np.where(np.arange(32) == 3, np.float32(x), ones) for x in (np.nan, np.inf))
    arrays = {"w": ones, "v": ones[0, :8], "nan": nan, "inf": inf}
    arrays |= {"c": np.zeros((2, 16), np.uint8), "s": np.full((2, 1), 255, np.uint8)}
    with pytest.raises(WeftError, match=why):
        recipe.evaluate(MemoryReader(arrays))
