"""Matrix products and embedding lookups."""

from __future__ import annotations

from ..op import Array, OpCall, TensorType, Trait, Value, case, format_shape, ints, normal, op, require
from ..schema.checks import broadcast_shapes
from .tensor import count_gather, transpose


@op(traits=[Trait.ROWWISE], cases=[case(normal(2, 3, 8), normal(5, 8)), case(normal(4, 8), normal(6, 8), normal(6))])
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x Wᵀ + b: x [..., in], weight [out, in], bias [out] or absent → [..., out]."""
    y: Array = x @ weight.T
    return y if bias is None else y + bias


@linear.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    weight, bias = n.weight, n.bias
    require(weight.rank == 2, f"weight {weight} is not a matrix")
    require(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    require(x.rank >= 1 and x.shape[-1] == weight.shape[1], f"x {x} does not have the input width of weight {weight}")
    require(bias is None or bias == weight.with_shape(weight.shape[0]), f"bias {bias} does not fit weight {weight}")
    return x.with_shape(*x.shape[:-1], weight.shape[0])


linear.cost(lambda n: n.x.elements * n.weight.shape[0] * 2)


@linear.body
def _(n: OpCall) -> Value:
    y = matmul(n.x, transpose(n.weight, axes=(1, 0)))
    return y if n.bias is None else y + n.bias


@op(cases=[case(normal(2, 3, 8), normal(2, 8, 5)), case(normal(2, 3, 4, 8), normal(8, 5))])
def matmul(x: Array, y: Array) -> Array:
    """Matrix product: x [..., m, k], y [..., k, n] → [..., m, n]; leading axes broadcast."""
    result: Array = x @ y
    return result


@matmul.infer
def _product_type(n: OpCall) -> TensorType:
    x: TensorType = n.x
    y: TensorType = n.y
    require(x.dtype == y.dtype, f"operands {x} and {y} differ in dtype; cast one of them")
    require(x.rank >= 2 and y.rank >= 2, f"operands {x} and {y} must have two axes or more")
    require(x.shape[-1] == y.shape[-2], f"inner sizes of {x} and {y} differ")
    lead = broadcast_shapes(x.with_shape(*x.shape[:-2], 1, 1), y.with_shape(*y.shape[:-2], 1, 1))[:-2]
    return x.with_shape(*lead, x.shape[-2], y.shape[-1])


matmul.cost(lambda n: _product_type(n).elements * n.x.shape[-1] * 2)


@op(cases=[case(ints(2, 3, high=7), normal(7, 5)), case(ints(4, high=7), normal(7, 5))])
def embedding(ids: Array, table: Array) -> Array:
    """Rows `ids` [...] (integers) of `table` [vocab, dim] → [..., dim]."""
    return table[ids]


@embedding.infer
def _rows_type(n: OpCall) -> TensorType:
    table: TensorType = n.table
    require(n.ids.dtype.is_int, f"ids {n.ids} must be integers")
    require(table.rank == 2, f"table {format_shape(table.shape)} is not a matrix")
    return table.with_shape(*n.ids.shape, table.shape[1])


embedding.cost(lambda n: count_gather(_rows_type(n), n.ids))
