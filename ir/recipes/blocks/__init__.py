"""Recipes for weights as quantized blocks: their layouts, the arrays that kernels read, and rounding to blocks.

Importing this package registers its recipes. Never here: the layouts that a backend supports; choosing codes with
calibration data (`weft.passes.fitting`).
"""

from .floats import Float4 as Float4
from .floats import Float8 as Float8
from .floats import InBytes as InBytes
from .floats import ToFloat4 as ToFloat4
from .floats import ToFloat8 as ToFloat8
from .floats import widen_small_floats as widen_small_floats
from .grids import OnGrid as OnGrid
from .grids import find_grid_layout as find_grid_layout
from .layouts import BlockRecipe as BlockRecipe
from .layouts import Kept as Kept
from .layouts import find_block_layout as find_block_layout
from .layouts import get_block_layout as get_block_layout
from .parts import Part as Part
from .parts import compute_part_widths as compute_part_widths
from .parts import split_parts as split_parts
from .quantize import Dequantize as Dequantize
from .quantize import Quantize as Quantize
from .stored import AsStored as AsStored
from .stored import Stored as Stored
from .stored import unwrap_stored_blocks as unwrap_stored_blocks
from .stored import wrap_stored_blocks as wrap_stored_blocks
