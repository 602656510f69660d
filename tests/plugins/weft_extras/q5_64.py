"""A block layout of another width: 64 codes of 5 bits behind an f32 scale and minimum. Kernels see codes of 8 bits."""

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, Packing, add_layout
from weft.ir.types.dtypes import DType


def pack_fives(codes: Array) -> Array:
    """Put codes below 32 into bits, the lowest first."""
    bits = np.unpackbits(codes[..., None], axis=-1, count=5, bitorder="little")
    return np.packbits(bits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_fives(raw: Array) -> Array:
    """Take them out again, into a byte each."""
    bits = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, 5)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


KIND = DType("q5_64", "block", 8, block=64, block_bytes=48)
Q5_64 = BlockLayout(KIND, Packing(pack_fives, unpack_fives), has_minimum=True, scale=dtypes.f32)
add_layout(Q5_64)
