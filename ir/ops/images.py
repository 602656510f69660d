"""Images as sequences: patches that are embedded (Dosovitskiy 2020, ViT)."""

from __future__ import annotations

from ..op import Array, OpCall, Size, TensorType, Value, case, fixed, normal, op, want
from ..types import sizes
from .products import linear
from .tensor import reshape, transpose


@op(
    cases=[
        case(normal(2, 3, 8, 12), normal(5, 3, 4, 4)),
        case(normal(1, 2, 6, 6), normal(7, 2, 3, 2), normal(7)),
    ]
)
def patch_embedding(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Patches of images as rows, each by one linear map: a convolution whose stride is its size.

    x [batch, channels, height, width], weight [dim, channels, patch height, patch width], bias [dim] →
    [batch, patches, dim], patches row by row from the top.
    """
    batch, channels, height, width = x.shape
    dim, _, h, w = weight.shape
    apart = x.reshape(batch, channels, height // h, h, width // w, w).transpose(0, 2, 4, 1, 3, 5)
    y: Array = apart.reshape(batch, -1, channels * h * w) @ weight.reshape(dim, -1).T
    return y if bias is None else y + bias


@patch_embedding.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    weight, bias = n.weight, n.bias
    want(x.rank == weight.rank == 4, f"x {x} must be [batch, channels, height, width], weight {weight} alike")
    want(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    height, width = (fixed(x.shape[i], f"x {x} must have a fixed height and width") for i in (2, 3))
    dim, channels, h, w = (fixed(s, f"weight {weight} must have fixed sizes") for s in weight.shape)
    want(x.shape[1] == channels, f"x {x} has not the {channels} channels of weight {weight}")
    want(height % h == 0 and width % w == 0, f"patches of {h} × {w} do not divide x {x}")
    want(bias is None or bias == weight.with_shape(dim), f"bias {bias} does not fit weight {weight}")
    return x.with_shape(x.shape[0], (height // h) * (width // w), dim)


@patch_embedding.cost
def _(n: OpCall) -> Size:
    x: TensorType = n.x
    outputs: Size = n.weight.shape[0]
    return x.elements * outputs * 2


@patch_embedding.body
def _(n: OpCall) -> Value:
    batch, channels, height, width = n.x.shape
    dim, _, h, w = n.weight.shape
    rows, columns = sizes.floordiv(height, h), sizes.floordiv(width, w)
    apart = transpose(reshape(n.x, shape=(batch, channels, rows, h, columns, w)), axes=(0, 2, 4, 1, 3, 5))
    patches = reshape(apart, shape=(batch, rows * columns, channels * h * w))
    return linear(patches, reshape(n.weight, shape=(dim, channels * h * w)), n.bias)
