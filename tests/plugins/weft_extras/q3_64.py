"""A block layout without a minimum: 64 codes of 3 bits behind a bf16 scale. Kernels see codes of 4 bits."""

import numpy as np

from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, Packing, add_layout
from weft.ir.types.dtypes import DType

CENTRE = 8 - 4  # 4-bit codes stand for code − 8, these for code − 4


def pack_threes(codes: Array) -> Array:
    """Put codes, from which CENTRE is taken, into 3 bits each, the lowest first."""
    bits = np.unpackbits((codes - CENTRE)[..., None], axis=-1, count=3, bitorder="little")
    return np.packbits(bits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_threes(raw: Array) -> Array:
    """Take them out again, into a byte each."""
    bits = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, 3)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0] + np.uint8(CENTRE)


KIND = DType("q3_64", "block", 4, block=64, block_bytes=26)
Q3_64 = BlockLayout(KIND, Packing(pack_threes, unpack_threes), scale=dtypes.bf16)
add_layout(Q3_64)
