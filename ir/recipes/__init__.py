"""Weight recipes: expressions that compute a parameter from a checkpoint, as data, and their evaluation.

Importing this package registers all recipes.
Never here: graphs, passes, file formats (their readers implement `TensorReader`).
"""

from . import blocks as blocks
from . import cache_scales as cache_scales
from . import frequencies as frequencies
from . import matrices as matrices
from .combinators import MAPS as MAPS
from .combinators import RANDOM as RANDOM
from .combinators import Add as Add
from .combinators import Cast as Cast
from .combinators import Concat as Concat
from .combinators import Full as Full
from .combinators import Literal as Literal
from .combinators import Map as Map
from .combinators import MeanPool as MeanPool
from .combinators import Normal as Normal
from .combinators import Permute as Permute
from .combinators import Reshape as Reshape
from .combinators import Scale as Scale
from .combinators import Shuffle as Shuffle
from .combinators import Slice as Slice
from .combinators import Source as Source
from .combinators import Take as Take
from .combinators import Uniform as Uniform
from .recipe import Recipe as Recipe
