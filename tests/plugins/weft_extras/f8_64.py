"""A block layout of floats: bytes in E4M3, 64 of them after an f32 scale."""

from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BYTES, BlockLayout, add_layout
from weft.ir.types.dtypes import DType

KIND = DType("f8_64", "block", 8, block=64, block_bytes=68)
add_layout(BlockLayout(KIND, BYTES, scale=dtypes.f32, floats=True))
