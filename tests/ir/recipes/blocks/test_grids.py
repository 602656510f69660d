"""Floats that were in blocks of few bits once are recognized, and become these blocks again; no others are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from weft.ir import WeftError, parse
from weft.ir.recipes import Concat, Literal, Map, Source
from weft.ir.recipes.blocks import OnGrid, find_grid_layout
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, Blocks, build_integer_layout, build_offset_layout
from weft.ir.types.dtypes import DType
from weft.passes.fitting.quantizing import GRIDS

ROWS, WIDTH = 24, 256
FLOATS = {"f32": dtypes.f32, "f16": dtypes.f16, "bf16": dtypes.bf16}


class Written:
    """A reader of tensors as a file has them in `dtype`."""

    def __init__(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> None:
        self.stored, self.tensors = dtype, {key: written(value, dtype) for key, value in tensors.items()}

    def keys(self) -> list[str]:
        return list(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

    def dtype(self, key: str) -> DType:
        return self.stored

    def read(self, key: str, start: int, stop: int) -> np.ndarray:
        return self.tensors[key][start:stop]


def written(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """`numbers` rounded to `dtype`, f32."""
    numbers = numbers.astype(np.float32)
    if dtype == dtypes.bf16:
        bits = numbers.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return rounded.astype(np.uint32).view(np.float32).reshape(numbers.shape)
    return numbers.astype(dtype.numpy).astype(np.float32)


def blocks(layout: BlockLayout, seed: int = 0) -> Blocks:
    """Blocks as somebody makes them who covers the range of each group."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, WIDTH // layout.group)
    codes = rng.integers(0, 2**layout.bits, (*shape, layout.group))
    scales = (rng.uniform(0.5, 2, shape) * 0.01).astype(np.float16).astype(np.float32)
    if layout.has_minimum:
        codes[..., 0], codes[..., 1] = 0, 2**layout.bits - 1
        minima = (-scales * rng.uniform(3, 12, shape)).astype(np.float16).astype(np.float32)
        return Blocks(codes.astype(np.uint8), scales, minima + layout.middle * scales)
    if layout.has_zeros:
        codes[..., 0], codes[..., 1] = 0, 2**layout.bits - 1
        return Blocks(codes.astype(np.uint8), scales, None, rng.integers(1, 15, shape).astype(np.uint8))
    codes[..., 0] = 0 if layout.bits == 4 else 1  # as Q4_0 and Q8_0 have it
    return Blocks(np.maximum(codes, codes[..., :1]).astype(np.uint8), scales)


def numbers_of(layout: BlockLayout, made: Blocks) -> np.ndarray:
    codes = made.codes.astype(np.float32) - (layout.middle if made.zeros is None else made.zeros[..., None])
    values = codes * made.scales[..., None]
    return (values if made.offsets is None else values + made.offsets[..., None]).reshape(ROWS, WIDTH)


def recognized(numbers: np.ndarray, dtype: DType) -> BlockLayout | None:
    return find_grid_layout(Source("w"), Written({"w": numbers}, dtype), GRIDS)


@pytest.mark.parametrize("layout", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_grids_are_recognized_and_become_their_codes_again(layout: BlockLayout, dtype: DType) -> None:
    made = blocks(layout)
    exact = numbers_of(layout, made)
    reader = Written({"w": exact}, dtype)
    found = find_grid_layout(Source("w"), reader, GRIDS)
    if layout.bits == 8 and dtype == dtypes.bf16:
        assert found is None, "bf16 rounds as much as a step of 8 bits is"
        return
    assert found == layout
    recipe = OnGrid(Source("w"), layout.bits, layout.group, layout.has_zeros and not layout.sums, "codes" * layout.sums)
    again = recipe.read_blocks(reader, 0, ROWS)
    assert recipe.layout(reader) == layout
    step = made.scales.repeat(layout.group, -1).reshape(ROWS, WIDTH)
    off = np.abs(recipe.read(reader, 0, ROWS) - exact) / step
    if layout.sums:
        # Scales are rounded to 255ths of the largest of a row, and minima to codes.
        groups = WIDTH // layout.group
        assert (again.codes[:, :groups] == made.codes).mean() > 0.95 and np.square(off).mean() < 0.004
        return
    assert off.max() < {"f32": 0.01, "f16": 0.02, "bf16": 0.15}[str(dtype)] * (16 if layout.bits == 8 else 1)
    if dtype != dtypes.bf16:
        np.testing.assert_array_equal(again.codes, made.codes)
        np.testing.assert_allclose(again.scales, made.scales, rtol=1e-3)
    if layout.has_zeros:
        np.testing.assert_array_equal(again.zeros, made.zeros)
    np.testing.assert_array_equal(recipe.read(reader, 5, 9), recipe.read(reader, 0, ROWS)[5:9])


def other_numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((ROWS, WIDTH))
    grid = numbers_of(GRIDS[0], blocks(GRIDS[0]))
    one_off = grid.copy()
    one_off[0, 5] += 0.003  # a third of a step
    return {
        "normal": normal,
        "uniform": rng.uniform(-1, 1, (ROWS, WIDTH)),
        "sparse": np.where(rng.random((ROWS, WIDTH)) < 0.7, 0, normal),
        "zeros": np.zeros((ROWS, WIDTH)),
        "ones": np.ones((ROWS, WIDTH)),
        "of two values": np.where(normal > 0, 0.5, -0.25),
        "repeated": normal[:, :20].repeat(13, 1)[:, :WIDTH],
        "logarithmic": np.sign(normal) * 2.0 ** np.round(3 * normal),
        "normal float 4": rng.standard_normal(16)[rng.integers(0, 16, (ROWS, WIDTH))],
        "not finite": np.where(np.arange(WIDTH) == 7, np.nan, grid),
        "one that is off": one_off,
        "narrow": normal[:, :3],
    }


@pytest.mark.parametrize("kind", other_numbers())
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_other_numbers_are_on_no_grid(kind: str, dtype: DType) -> None:
    assert recognized(other_numbers()[kind], dtype) is None


def test_random_numbers_are_never_taken_for_codes() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        width = 32 * int(rng.integers(1, 6))
        numbers = rng.standard_normal((int(rng.integers(1, 5)), width)) * rng.uniform(1e-4, 100)
        assert all(recognized(numbers, dtype) is None for dtype in FLOATS.values())


def test_minima_are_those_of_whole_groups() -> None:
    """A group that is filled up with 0 may lie on a grid, too, but the sum of its activations is nobody's."""
    numbers = (np.random.default_rng(6).integers(0, 16, (ROWS, 48)) - 3.0) * 0.01
    numbers[:, :2], numbers[:, 32:34] = (-0.03, 0.12), (-0.03, 0.12)
    found = recognized(numbers, dtypes.f32)
    assert found is not None and not found.has_minimum
    assert find_grid_layout(Source("w"), Written({"w": numbers}, dtypes.f32), [build_offset_layout(4, 32)]) is None
    assert (
        find_grid_layout(Source("w"), Written({"w": numbers[:, :32]}, dtypes.f32), [build_offset_layout(4, 32)])
        is not None
    )


def test_rows_of_several_tensors() -> None:
    layout = build_integer_layout(4, 32, False)
    grid, normal = numbers_of(layout, blocks(layout)), np.random.default_rng(3).standard_normal((ROWS, WIDTH))
    reader = Written({"a": grid, "b": grid[::-1], "c": normal, "stack": np.stack([grid, grid * 2])}, dtypes.f32)
    assert find_grid_layout(Concat((Source("a"), Source("b")), 0), reader, GRIDS) == layout
    assert find_grid_layout(Concat((Source("a"), Source("c")), 0), reader, GRIDS) is None
    assert find_grid_layout(Source("stack"), reader, GRIDS) == layout
    assert find_grid_layout(Map(Source("a"), "exp"), reader, GRIDS) is None
    assert find_grid_layout(Literal(((1.0, 2.0),)), reader, GRIDS) is None
    both = OnGrid(Source("stack"), 4, 32)
    np.testing.assert_allclose(both.read(reader, 0, 2), np.stack([grid, grid * 2]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("zeros", "minima"), [(False, ""), (True, ""), (False, "codes"), (False, "numbers")])
def test_a_group_that_is_on_no_grid_is_rounded(zeros: bool, minima: str) -> None:
    layout = build_offset_layout(4, 32) if minima else build_integer_layout(4, 32, zeros)
    made = blocks(layout)
    numbers, steps = numbers_of(layout, made), made.scales.repeat(32, -1)
    strange = np.random.default_rng(4).standard_normal(32) * 0.05
    numbers[3, 32:64], steps[3, 32:64] = strange, np.ptp(np.append(strange, 0)) / 15
    found = OnGrid(Source("w"), 4, 32, zeros, minima).read(Written({"w": numbers}, dtypes.f32), 0, ROWS)
    off = np.abs(found - numbers) / steps
    assert 0.3 < off[3, 32:64].max() < 0.6
    assert np.delete(off, 3, 0).max() < (0.15 if minima == "codes" else 1e-5)


def test_tensors_that_cannot_be_kept_have_a_reason() -> None:
    layout = build_integer_layout(4, 32, False)
    numbers = numbers_of(layout, blocks(layout))
    numbers[ROWS // 2 + 3, 9] = np.inf
    with pytest.raises(WeftError, match="a weight of w is not finite: it cannot be quantized"):
        OnGrid(Source("w")).read(Written({"w": numbers}, dtypes.f32), 0, ROWS)
    with pytest.raises(WeftError, match="a weight of w exceeds the range of scales in f16"):
        OnGrid(Source("w")).read(Written({"w": np.full((2, 64), 1e6)}, dtypes.f32), 0, 2)


def test_text_round_trips() -> None:
    recipe = OnGrid(Source("w"), 4, 64, True)
    text = f"graph g {{\n  param %w: f32[24, 256] = {spell_recipe(recipe)}\n}}\n"
    assert parse(text).params["w"].recipe == recipe
    assert str(parse(text)) == text
