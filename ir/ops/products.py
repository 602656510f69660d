"""Matrix products and lookups."""

from __future__ import annotations

from ..op import Array, Cost, Size, TensorType, Trait, Value, broadcast, case, ints, normal, op, show, want
from .elementwise import add


@op(traits=[Trait.ROWWISE], cases=[case(normal(2, 3, 8), normal(5, 8)), case(normal(4, 8), normal(6, 8), normal(6))])
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x Wᵀ + b: x [..., in], weight [out, in], bias [out] → [..., out]."""
    y: Array = x @ weight.T
    return y if bias is None else y + bias


@linear.infer
def _(x: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
    want(weight.rank == 2, f"weight {weight} is not a matrix")
    want(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    want(x.rank >= 1 and x.shape[-1] == weight.shape[1], f"x {x} has not the input width of weight {weight}")
    want(bias is None or bias == weight.with_shape(weight.shape[0]), f"bias {bias} does not fit weight {weight}")
    return x.with_shape(*x.shape[:-1], weight.shape[0])


@linear.cost
def _(x: TensorType, weight: TensorType, bias: TensorType | None = None) -> Size:
    return x.elements * weight.shape[0] * 2


@linear.body
def _(x: Value, weight: Value, bias: Value | None = None) -> Value:
    from .tensor import transpose

    y = matmul(x, transpose(weight, axes=(1, 0)))
    return y if bias is None else add(y, bias)


@op(cases=[case(normal(2, 3, 8), normal(2, 8, 5)), case(normal(2, 3, 4, 8), normal(8, 5))])
def matmul(x: Array, y: Array) -> Array:
    """x y: [..., m, k] by [..., k, n] → [..., m, n]; leading axes broadcast."""
    result: Array = x @ y
    return result


@matmul.infer
def _(x: TensorType, y: TensorType) -> TensorType:
    want(x.dtype == y.dtype, f"operands {x} and {y} differ in dtype; cast one of them")
    want(x.rank >= 2 and y.rank >= 2, f"operands {x} and {y} must have two axes or more")
    want(x.shape[-1] == y.shape[-2], f"inner sizes of {x} and {y} differ")
    lead = broadcast(x.with_shape(*x.shape[:-2], 1, 1), y.with_shape(*y.shape[:-2], 1, 1))[:-2]
    return x.with_shape(*lead, x.shape[-2], y.shape[-1])


@matmul.cost
def _(x: TensorType, y: TensorType) -> Size:
    lead = broadcast(x.with_shape(*x.shape[:-2], 1, 1), y.with_shape(*y.shape[:-2], 1, 1))[:-2]
    return x.with_shape(*lead, x.shape[-2], x.shape[-1]).elements * y.shape[-1] * 2


@op(cases=[case(ints(2, 3, high=7), normal(7, 5)), case(ints(4, high=7), normal(7, 5))])
def embedding(ids: Array, table: Array) -> Array:
    """Rows of `table` [vocab, dim] picked by integer `ids` [...] → [..., dim]."""
    return table[ids]


@embedding.infer
def _(ids: TensorType, table: TensorType) -> TensorType:
    want(ids.dtype.is_int, f"ids {ids} are no integers")
    want(table.rank == 2, f"table {show(table.shape)} is not a matrix")
    return table.with_shape(*ids.shape, table.shape[1])


@embedding.cost
def _(ids: TensorType, table: TensorType) -> Cost:
    rows = table.with_shape(*ids.shape, table.shape[1]).bytes
    return Cost(0, rows + ids.bytes, rows)
