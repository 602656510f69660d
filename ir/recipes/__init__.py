"""Weight recipes: expressions that compute a parameter from a checkpoint, as data, and their evaluation.

Importing this package registers all recipes.
Never here: graphs, passes, file formats (their readers implement `TensorReader`).
"""

from . import blocks as blocks
from . import cache_scales as cache_scales
from . import frequencies as frequencies
from . import matrices as matrices
from .combinators import (
    MAPS,
    RANDOM,
    Add,
    Cast,
    Concat,
    Full,
    Literal,
    Map,
    MeanPool,
    Normal,
    Permute,
    Reshape,
    Scale,
    Shuffle,
    Slice,
    Source,
    Take,
    Uniform,
)
from .recipe import Recipe

__all__ = [
    "MAPS",
    "RANDOM",
    "Add",
    "Cast",
    "Concat",
    "Full",
    "Literal",
    "Map",
    "MeanPool",
    "Normal",
    "Permute",
    "Recipe",
    "Reshape",
    "Scale",
    "Shuffle",
    "Slice",
    "Source",
    "Take",
    "Uniform",
]
