"""Type aliases for the numpy arrays of the runtime, and conversion to float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def convert_to_float32(values: NDArray[Any], out: Floats) -> Floats:
    """Write `values` as float32 into `out`, which has the same shape, and return `out`; uint16 means bfloat16 bits."""
    if values.dtype == np.uint16:
        # A bfloat16 is the upper half of a float32.
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32, casting="same_kind")
    else:
        np.copyto(out, values)
    return out
