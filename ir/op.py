"""Everything that declarations of ops import: the decorator `op`, example cases, sizes, checks of operand types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from .graph import Op as Op
from .graph import Value as Value
from .recipes.readers import Array as Array
from .registry import Registry
from .schema.attributes import Attr as Attr
from .schema.attributes import format_type as format_type
from .schema.cases import Case as Case
from .schema.cases import Sample as Sample
from .schema.cases import bools as bools
from .schema.cases import case as case
from .schema.cases import ints as ints
from .schema.cases import normal as normal
from .schema.cases import positive as positive
from .schema.checks import broadcast_shapes as broadcast_shapes
from .schema.checks import format_shape as format_shape
from .schema.checks import normalize_axis as normalize_axis
from .schema.checks import require as require
from .schema.checks import require_int as require_int
from .schema.op_schema import OPS as SCHEMAS
from .schema.op_schema import Cost as Cost
from .schema.op_schema import Trait as Trait
from .schema.signature import OpCall as OpCall
from .schema.signature import Operand as Operand
from .schema.states import Growth as Growth
from .schema.states import StateKind as StateKind
from .schema.states import StateSpec as StateSpec
from .schema.states import build_fixed_size_spec as build_fixed_size_spec
from .schema.states import list_cache_specs as list_cache_specs
from .schema.states import list_cross_specs as list_cross_specs
from .types import Shape as Shape
from .types import TensorType as TensorType
from .types import sizes as sizes
from .types.dtypes import DType as DType
from .types.sizes import Poly as Poly
from .types.sizes import Size as Size
from .types.sizes import sum_sizes as sum_sizes

OPS = cast(Registry[Op], SCHEMAS)  # every schema is declared by `op`
lookup = OPS.lookup


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
