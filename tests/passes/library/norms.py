"""The type of hidden states, and reasons of refusals, in tests of norms."""

from __future__ import annotations

from weft.ir import TensorType
from weft.ir.types import dtypes, sizes
from weft.passes import Trace

FEED = TensorType(dtypes.f32, (sizes.sym("n"), 3, 6))


def reasons(trace: Trace) -> list[str]:
    return [refused.reason for refused in trace.refusals]
