"""Recipes for weights as quantized blocks: their layouts, the arrays that kernels read, and rounding to blocks.

Importing this package registers its recipes. Never here: the layouts that a backend supports; choosing codes with
calibration data (`weft.passes.fitting`).
"""

from .floats import Float4, Float8, InBytes, ToFloat4, ToFloat8, widen_small_floats
from .grids import OnGrid, find_grid_layout
from .layouts import BlockRecipe, Kept, find_block_layout
from .parts import Part, compute_part_widths, split_parts
from .quantize import Dequantize, Quantize
from .stored import AsStored, Stored, unwrap_stored_blocks, wrap_stored_blocks

__all__ = [
    "AsStored",
    "BlockRecipe",
    "Dequantize",
    "Float4",
    "Float8",
    "InBytes",
    "Kept",
    "OnGrid",
    "Part",
    "Quantize",
    "Stored",
    "ToFloat4",
    "ToFloat8",
    "compute_part_widths",
    "find_block_layout",
    "find_grid_layout",
    "split_parts",
    "unwrap_stored_blocks",
    "widen_small_floats",
    "wrap_stored_blocks",
]
