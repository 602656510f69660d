"""A block layout: pairs of 4-bit codes, 64 of them behind an f32 scale."""

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, Packing, add_layout, pack_pairs
from weft.ir.types.dtypes import DType


def unpack_pairs(raw: Array) -> Array:
    """Take the two codes of every byte apart."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)


KIND = DType("q4_64", "block", 4, block=64, block_bytes=36)
Q4_64 = BlockLayout(KIND, Packing(pack_pairs, unpack_pairs), scale=dtypes.f32)
add_layout(Q4_64)
