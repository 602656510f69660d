"""A block layout of floats: pairs of E2M1 codes, 64 of them after a scale that is a power of two (E8M0)."""

from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, Packing, add_layout, pack_pairs, unpack_codes
from weft.ir.types.dtypes import DType

KIND = DType("f4_64", "block", 4, block=64, block_bytes=33)
PAIRS = Packing(pack_pairs, lambda raw: unpack_codes(raw, 4, 64))
add_layout(BlockLayout(KIND, PAIRS, scale=dtypes.u8, floats=True))
