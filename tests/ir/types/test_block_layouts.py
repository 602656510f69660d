"""Blocks of several groups and codes of 5 bits, against the dequantization of the gguf package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize

from weft.ir.types.block_layouts import LAYOUTS, Packing

Array = np.ndarray[Any, Any]
SHAPE = (5, 3)  # rows, blocks in a row
# The bits and group of a layout, and the bytes of a block where it has a float16.
KINDS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "q5_0": (8, 32, (0,)),
    "q5_1": (8, 32, (0, 2)),
    "q2_k": (4, 16, (80, 82)),
    "q3_k": (4, 16, (108,)),
    "q4_k": (4, 32, (0, 2)),
    "q5_k": (8, 32, (0, 2)),
    "q6_k": (8, 16, (208,)),
}


def random_blocks(name: str, rng: np.random.Generator, shape: tuple[int, ...] = SHAPE) -> Array:
    """Random bytes of blocks [*shape, bytes], whose scales are normal, one in ten negative or 0."""
    raw = rng.integers(0, 256, (*shape, LAYOUTS[name].dtype.block_bytes), dtype=np.uint8)
    for at in KINDS[name][2]:
        scales = rng.uniform(1e-3, 2e-3, shape) * rng.choice([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, -1], shape)
        raw[..., at : at + 2] = scales[..., None].astype(np.float16).view(np.uint8)
    return raw


def exact(name: str, raw: Array) -> Array:
    numbers: Array = dequantize(raw.reshape(len(raw), -1), Type[name.upper()])
    return numbers


@pytest.mark.parametrize("name", KINDS)
def test_blocks_mean_what_the_gguf_package_says(name: str, rng: np.random.Generator) -> None:
    layout, raw = LAYOUTS[name], random_blocks(name, rng)
    blocks = layout.unpack(raw)
    bits, group, _ = KINDS[name]
    assert (layout.bits, layout.group) == (bits, group)
    assert blocks.codes.shape == (SHAPE[0], SHAPE[1] * layout.dtype.block // group, group)
    assert (blocks.codes.dtype, blocks.scales.dtype) == (np.uint8, np.float32)
    want, found = exact(name, raw), layout.dequantize(blocks)
    assert np.std(want) > 1e-3
    if layout.has_minimum:
        assert blocks.offsets is not None
        # An offset is a minimum and 2^{bits−1} scales, and three f32 roundings lead from both to a weight.
        reach = np.abs(blocks.offsets) + (1 << bits) * np.abs(blocks.scales)
        assert (np.abs(found - want) <= 3 * 2.0**-24 * reach.repeat(group, -1)).all()
    else:
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("name", ["q5_0", "q5_1"])
def test_codes_of_5_bits_are_packed_again(name: str, rng: np.random.Generator) -> None:
    layout, raw = LAYOUTS[name], random_blocks(name, rng)
    assert isinstance(layout.packing, Packing)
    head = 4 if layout.has_minimum else 2
    np.testing.assert_array_equal(layout.packing.pack(layout.packing.unpack(raw[..., head:])), raw[..., head:])


def test_blocks_of_several_groups_are_read_only(rng: np.random.Generator) -> None:
    layout = LAYOUTS["q4_k"]
    with pytest.raises(TypeError, match="q4_k cannot be written, only read"):
        layout.pack(layout.unpack(random_blocks("q4_k", rng)))
