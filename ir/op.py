"""Everything that declarations of ops import: the decorator `op`, example cases, sizes, checks of operand types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from .graph import Op, Value
from .recipes.readers import Array
from .registry import Registry
from .schema.attributes import Attr, format_type
from .schema.cases import Case, Sample, bools, case, ints, normal, positive
from .schema.checks import broadcast_shapes, format_shape, normalize_axis, require, require_int, sum_sizes
from .schema.op_schema import OPS as SCHEMAS
from .schema.op_schema import Cost, Trait
from .schema.signature import OpCall, Operand
from .schema.states import Growth, StateKind, StateSpec, build_fixed_size_spec, list_cache_specs, list_cross_specs
from .types import Shape, TensorType, sizes
from .types.dtypes import DType
from .types.sizes import Poly, Size

OPS = cast(Registry[Op], SCHEMAS)  # every schema is declared by `op`
lookup = OPS.lookup

__all__ = [
    "OPS",
    "Array",
    "Attr",
    "Case",
    "Cost",
    "DType",
    "Growth",
    "Op",
    "OpCall",
    "Operand",
    "Poly",
    "Sample",
    "Shape",
    "Size",
    "StateKind",
    "StateSpec",
    "TensorType",
    "Trait",
    "Value",
    "bools",
    "broadcast_shapes",
    "build_fixed_size_spec",
    "case",
    "format_shape",
    "format_type",
    "ints",
    "list_cache_specs",
    "list_cross_specs",
    "lookup",
    "normal",
    "normalize_axis",
    "op",
    "positive",
    "require",
    "require_int",
    "sizes",
    "sum_sizes",
]


def op(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes a NumPy function the reference of a new op, and registers and returns the op.

    `outputs` has the names of the outputs, separated by spaces ("": a single output without a name); `cases` are
    example calls, which tests run.
    """

    def declare(reference: Callable[..., Any]) -> Op:
        new = Op(reference, outputs, traits, cases)
        OPS.add(new.name, new)
        return new

    return declare
