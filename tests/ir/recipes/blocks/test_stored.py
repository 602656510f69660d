"""Weights as their checkpoint's blocks: the parts make the dequantized numbers again, exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from weft.frontends.formats.gguf import GGUFTensors
from weft.frontends.formats.hf.merging import join_adapters
from weft.ir import WeftError
from weft.ir.recipes import Concat, Permute, Recipe, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.blocks import Stored, find_block_layout
from weft.ir.recipes.readers import Array, BlockTensorReader, MemoryReader
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.text.parser import parse
from weft.ir.types.block_layouts import LAYOUTS, BlockLayout

ROWS, WIDTH, BLOCK = 12, 96, 32


@pytest.fixture
def reader(tmp_path: Path, rng: np.random.Generator) -> GGUFTensors:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.BF16):
        for name in "ab":
            w = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
            w[0, :BLOCK] = 0  # a block without a scale
            writer.add_tensor(f"{name}.{kind.name.lower()}", quantize(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFTensors(tmp_path / "a.gguf")


def unpacked(packed: Array, count: int) -> Array:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :count].astype(np.float64)


def rebuilt(recipe: Recipe, reader: GGUFTensors) -> Array:
    """The weights that the parts stand for, in float64, by the formula of the module."""
    layout = str(find_block_layout(recipe, reader))
    rows, width = recipe.shape(reader)
    planes = 2 if layout == "q8_0" else 1
    blocks = planes * width // BLOCK
    part = {name: Stored(recipe, name).evaluate(reader) for name in ("codes", "scales", "zeros")}
    assert (part["codes"].dtype, part["scales"].dtype, part["zeros"].dtype) == (np.uint8, np.float32, np.uint8)
    codes = unpacked(part["codes"], planes * width).reshape(rows, blocks, BLOCK)
    zeros = unpacked(part["zeros"], blocks)[..., None]
    w = (part["scales"].astype(np.float64)[..., None] * (codes - zeros)).reshape(rows, planes, width).sum(1)
    if layout == "q4_1":
        w = w + np.repeat(Stored(recipe, "offsets").evaluate(reader).astype(np.float64), BLOCK, 1)
    return w


def recipes(kind: str) -> list[Recipe]:
    a, b = Source(f"a.{kind}"), Source(f"b.{kind}")
    halves = Reshape(Permute(Reshape(a, (2, 3, 2, -1)), (0, 2, 1, 3)), (ROWS, -1))
    heads = [Reshape(item, (3, ROWS // 3, -1)) for item in (a, b)]
    woven = Reshape(Concat((Slice(heads[0], 1, 1, 3), Take(heads[1], (3, 0), 1)), 1), (ROWS, -1))
    return [a, Concat((a, b)), Slice(b, 0, 3, 9), Take(a, (5, 1, 11)), halves, Concat((halves, b, a)), woven]


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_parts_make_the_dequantized_numbers(kind: str, reader: GGUFTensors) -> None:
    for recipe in recipes(kind):
        assert str(find_block_layout(recipe, reader)) == kind
        want = recipe.evaluate(reader)
        # Dequantizing rounds once to float32; q4_1 adds a rounded product and here 8 scales went into the offset.
        np.testing.assert_allclose(rebuilt(recipe, reader), want, rtol=0, atol=1e-6 if kind == "q4_1" else 0)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_words_make_the_dequantized_numbers(kind: str, reader: GGUFTensors) -> None:
    """By the formula of the module, code by code."""
    bits = 8 if kind == "q8_0" else 4
    size = 512 // bits  # codes in a chunk of 16 words
    for recipe in recipes(kind):
        words, steps = (Stored(recipe, name).evaluate(reader) for name in ("words", "steps"))
        rows, width = recipe.shape(reader)
        assert (words.dtype, words.shape) == (np.int32, (rows, -(-width // size) * 16))
        assert steps.shape == (rows, width // BLOCK)
        np.testing.assert_array_equal(steps, steps.astype(np.float16))
        n, k = np.indices((rows, width))
        block, tile = k // BLOCK, k % size // 32
        word, place = k // size * 16 + k % 32 // 2, 16 * (k % 2) + tile * bits
        codes = (words.astype(np.int64)[n, word] >> place) & ((1 << bits) - 1)
        made = steps.astype(np.float64)[n, block] * (codes - (1 << (bits - 1)))
        if kind == "q4_1":
            made += Stored(recipe, "offsets").evaluate(reader)[n, block]
        np.testing.assert_allclose(made, recipe.evaluate(reader), rtol=0, atol=1e-6 if kind == "q4_1" else 0)


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("q4_0", "q4_1", "q8_0")], ids=str)  # those of GGUF
def test_a_layout_unpacks_packs_and_means_what_the_gguf_package_says(layout: BlockLayout, reader: GGUFTensors) -> None:
    raw = reader.read_blocks(f"a.{layout}", 0, ROWS)
    blocks = layout.unpack(raw)
    assert blocks.codes.shape == (ROWS, WIDTH // layout.group, layout.group) and blocks.codes.dtype == np.uint8
    np.testing.assert_array_equal(layout.pack(blocks), raw)
    exact = dequantize(raw.reshape(ROWS, -1), Type[str(layout).upper()])
    np.testing.assert_allclose(layout.dequantize(blocks), exact, rtol=0, atol=1e-6 if layout.has_minimum else 0)


def test_slices_agree_with_the_whole(reader: GGUFTensors) -> None:
    for name in ("codes", "scales", "zeros", "offsets", "words", "steps"):
        recipe = Stored(recipes("q4_1")[-1], name)
        whole = recipe.evaluate(reader)
        np.testing.assert_array_equal(np.concatenate(list(recipe.blocks(reader, 7 * whole.shape[1]))), whole)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (Source("a.bf16"), "it is stored as bf16"),
        (Concat((Source("a.q4_0"), Source("b.q8_0"))), r"in different ways \(q4_0, q8_0\)"),
        (Scale(Source("a.q4_0"), 2.0), r"its recipe \(scale\)"),
        (Permute(Source("a.q4_0"), (1, 0)), r"its recipe \(permute\)"),
        (Slice(Source("a.q4_0"), 1, 0, 32), r"its recipe \(slice\)"),
        (Concat((Source("a.q4_0"), Source("b.q4_0")), 1), r"its recipe \(concat\)"),
        (Reshape(Source("a.q4_0"), (ROWS, WIDTH)), r"its recipe \(reshape\)"),
    ],
)
def test_rows_of_other_layouts_are_refused(recipe: Recipe, why: str, reader: GGUFTensors) -> None:
    with pytest.raises(WeftError, match=why):
        Stored(recipe, "codes").shape(reader)


def test_blocks_go_through_readers_of_other_readers(reader: GGUFTensors) -> None:
    joined = join_adapters(reader, [])
    assert isinstance(joined, BlockTensorReader) and str(find_block_layout(Source("a.q4_1"), joined)) == "q4_1"
    np.testing.assert_array_equal(joined.read_blocks("a.q4_1", 2, 5), reader.read_blocks("a.q4_1", 2, 5))


def test_dense_checkpoints_have_no_blocks() -> None:
    reader = MemoryReader({"w": np.zeros((4, 32), np.float32)})
    known = f"{', '.join(LAYOUTS)} or integers in groups"
    assert find_block_layout(Source("w"), reader) == f"it is stored as f32, not as {known}"


def test_text_round_trips() -> None:
    recipe = Stored(Reshape(Concat((Source("a"), Source("b"))), (4, -1)), "codes")
    text = f"graph g {{\n  param %w: u8[4, 16] = {spell_recipe(recipe)}\n}}\n"
    assert parse(text).params["w"].recipe == recipe
