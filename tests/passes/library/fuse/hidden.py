"""The type of hidden states in tests of fusions."""

from __future__ import annotations

from weft.ir import TensorType
from weft.ir.types import dtypes, sizes

N = sizes.sym("n")


HIDDEN = TensorType(dtypes.f32, (N, 3, 10))
