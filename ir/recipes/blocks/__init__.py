"""Weights as quantized blocks: the block layout of a recipe, its parts in the forms of kernels, rounding to blocks.

Importing this package registers its recipes. Never here: the layouts that a backend supports; choosing codes with
calibration text (`weft.passes.fitting`).
"""

from .floats import Float4, Float8, InBytes, ToFloat4, ToFloat8, in_bytes
from .grids import OnGrid, grid_layout
from .layouts import BlockRecipe, Kept, block_layout
from .parts import Part, part_shapes, split_parts
from .quantize import Dequantize, Quantize
from .stored import AsStored, Stored, as_stored, in_file

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
    "as_stored",
    "block_layout",
    "grid_layout",
    "in_bytes",
    "in_file",
    "part_shapes",
    "split_parts",
]
