"""Patch embedding of images (Dosovitskiy 2020, ViT), convolution over time, Fourier transform, and the short causal
convolution of recurrent layers."""

from __future__ import annotations

import functools
import math

import numpy as np

from ..op import Array, OpCall, Size, StateKind, StateSpec, TensorType, Value, build_fixed_size_spec, op
from ..schema.cases import case, normal
from ..schema.checks import require, require_int
from ..types import sizes
from .activation import activate, check_activation
from .declaration import composed_op
from .elementwise import add, cast, cos, sin
from .products import linear, matmul
from .reduce import max as greatest
from .tensor import concat, emit_indices, gather, iota, pad, reshape, slice_, swap_last_axes, transpose, unsqueeze


@composed_op(
    cases=[case(normal(2, 3, 8, 12), normal(5, 3, 4, 4)), case(normal(1, 2, 6, 6), normal(7, 2, 3, 2), normal(7))]
)
def patch_embedding(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Linear embeddings of image patches: a convolution whose stride is its kernel size.

    x [batch, channels, height, width], weight [dim, channels, patch height, patch width], bias [dim] or absent →
    [batch, patches, dim], in row-major order of the patches. The patch sizes must divide height and width.
    """
    batch, channels, height, width = x.shape
    dim, _, h, w = weight.shape
    rows, columns = sizes.floordiv(height, h), sizes.floordiv(width, w)
    by_patch = transpose(reshape(x, shape=(batch, channels, rows, h, columns, w)), axes=(0, 2, 4, 1, 3, 5))
    patches = reshape(by_patch, shape=(batch, rows * columns, channels * h * w))
    return linear(patches, reshape(weight, shape=(dim, channels * h * w)), bias)


@patch_embedding.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    weight, bias = n.weight, n.bias
    fits = x.rank == weight.rank == 4
    require(fits, f"x {x} must be [batch, channels, height, width], weight {weight} [dim, channels, h, w]")
    require(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    height, width = (require_int(x.shape[i], f"x {x} must have a fixed height and width") for i in (2, 3))
    dim, channels, h, w = (require_int(s, f"weight {weight} must have fixed sizes") for s in weight.shape)
    require(x.shape[1] == channels, f"x {x} does not have the {channels} channels of weight {weight}")
    require(height % h == 0 and width % w == 0, f"patches of {h} × {w} do not divide x {x}")
    require(bias is None or bias == weight.with_shape(dim), f"bias {bias} does not fit weight {weight}")
    return x.with_shape(x.shape[0], (height // h) * (width // w), dim)


patch_embedding.cost(lambda n: n.x.elements * n.weight.shape[0] * 2)


@composed_op(
    cases=[
        case(normal(2, 9, 6), normal(4, 6, 3)),
        case(normal(2, 9, 6), normal(4, 6, 3), normal(4), stride=2, padding=(1, 1)),
        case(normal(2, 7, 6), normal(6, 2, 4), normal(6), padding=(2, 1), groups=3),
        case(normal(1, 11, 1), normal(5, 1, 5), stride=3),
    ]
)
def conv1d(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    *,
    stride: int = 1,
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
) -> Value:
    """Convolution over time: y_t = Σ_j W_j x_{t·stride + j − padding[0]} + bias, where x is 0 out of range.

    x [batch, length, in], weight [out, in / groups, kernel] (W_j = weight[:, :, j]), bias [out] → [batch, frames, out],
    frames = ⌊(length + padding[0] + padding[1] − kernel) / stride⌋ + 1. `groups` is that of torch.nn.Conv1d.
    """
    (out, width, kernel), (before, after) = weight.shape, padding
    batch, frames = x.shape[0], _count_frames(x, weight, padding, stride)
    padded = pad(x, axis=1, before=before, after=after) if before or after else x
    starts = emit_indices(x, frames) * stride
    at = unsqueeze(starts, axes=(1,)) + unsqueeze(iota(weight, axis=2), axes=(0,))  # [frames, kernel]
    windows = reshape(gather(padded, at, axis=1), shape=(batch, frames, kernel, groups, width))
    rows = reshape(transpose(windows, axes=(0, 3, 1, 2, 4)), shape=(batch, groups, frames, kernel * width))
    taps = reshape(transpose(weight, axes=(0, 2, 1)), shape=(groups, out // groups, kernel * width))
    y = reshape(transpose(matmul(rows, swap_last_axes(taps)), axes=(0, 2, 1, 3)), shape=(batch, frames, out))
    return y if bias is None else y + bias


def _count_frames(x: Value | TensorType, weight: Value | TensorType, padding: tuple[int, ...], stride: int) -> Size:
    return sizes.floordiv(x.shape[1] + sum(padding) - weight.shape[2], stride) + 1


@conv1d.infer
def _(n: OpCall) -> TensorType:
    x: TensorType = n.x
    weight, bias, groups = n.weight, n.bias, n.groups
    fits = x.rank == weight.rank == 3
    require(fits, f"x {x} must be [batch, length, in], weight {weight} [out, in / groups, kernel]")
    require(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    out, width, _ = (require_int(s, f"weight {weight} must have fixed sizes") for s in weight.shape)
    require(groups >= 1 and out % groups == 0, f"groups={groups} does not divide the {out} outputs of weight {weight}")
    require(x.shape[2] == width * groups, f"x {x} does not have the {width * groups} channels of weight {weight}")
    require(bias is None or bias == weight.with_shape(out), f"bias {bias} does not fit weight {weight}")
    require(n.stride >= 1, f"stride={n.stride} must be positive")
    pads = tuple(n.padding)
    require(len(pads) == 2 and min(pads) >= 0, f"padding={list(pads)} must be the numbers of zeros before and after x")
    frames = _count_frames(x, weight, n.padding, n.stride)
    require(not isinstance(frames, int) or frames > 0, f"the kernel of weight {weight} is longer than x {x}")
    return x.with_shape(x.shape[0], frames, out)


@conv1d.cost
def _(n: OpCall) -> Size:
    x, weight = n.x, n.weight
    products: Size = x.shape[0] * _count_frames(x, weight, n.padding, n.stride) * weight.elements
    return products * 2


@op(cases=[case(normal(2, 5, 6)), case(normal(1, 1, 4)), case(normal(2, 12, 3)), case(normal(4, 7))])
def fourier(x: Array) -> Array:
    """Real part of the discrete Fourier transform of x [..., n, m] along its last two axes (Lee-Thorp 2021, FNet).

    Re(F_n x F_m) = C_n (x C_m) − S_n (x S_m); C_n and S_n [n, n] are the cosines and sines of 2π·i·j/n.
    """
    return np.asarray(np.fft.fft2(x).real)


fourier.infer(lambda n: require(n.x.rank >= 2, f"x {n.x} must have two axes to transform"))
fourier.cost(lambda n: sizes.multiply_sizes(n.x.shape) * sum(n.x.shape[-2:]) * 4)


@fourier.body
def _(n: OpCall) -> Value:
    (c_rows, s_rows), (c_columns, s_columns) = (
        _emit_dft_matrices(n.x, axis) for axis in (n.x.type.rank - 2, n.x.type.rank - 1)
    )
    real = matmul(c_rows, matmul(n.x, c_columns))
    return real - matmul(s_rows, matmul(n.x, s_columns))


def _emit_dft_matrices(x: Value, axis: int) -> tuple[Value, Value]:
    """Emit the cosines and sines [n, n] of 2π·i·j/n, n the size of `axis` of x; i·j is reduced modulo n as an integer,
    since f32 is not precise enough for large products."""
    at = iota(x, axis=axis)
    size = greatest(at, axes=(0,), keepdims=True) + 1
    turns = unsqueeze(at, axes=(1,)) * unsqueeze(at, axes=(0,)) % size
    angles = cast(turns, to=x.type.dtype) / cast(size, to=x.type.dtype) * (2 * math.pi)
    return cos(angles), sin(angles)


@composed_op(
    outputs="causal_conv present",
    cases=[
        case(normal(2, 7, 5), normal(5, 4)),
        case(normal(2, 7, 5), normal(5, 4), normal(5), activation="silu"),
        case(normal(2, 7, 5), normal(5, 4), normal(5), normal(2, 3, 5), activation="silu"),
        case(normal(2, 1, 5), normal(5, 3), None, normal(2, 2, 5)),
    ],
)
def causal_conv(
    x: Value, weight: Value, bias: Value | None = None, past: Value | None = None, *, activation: str = "identity"
) -> Value | tuple[Value, Value]:
    """Depthwise causal convolution over time: y_t = activation(Σ_j weight[:, j] x_{t − width + 1 + j} + bias).

    x [batch, seq, channels], weight [channels, width], bias [channels] → [batch, seq, channels]. The tokens before x (t
    < 0) are `past` [batch, width − 1, channels] or zeros; with `past` the last width − 1 tokens of past and x are also
    returned.
    """
    width, channels = weight.width, x.width
    padded = pad(x, axis=1, before=width - 1) if past is None else concat(past, x, axis=1)
    at = iota(x, axis=1)

    def tap(j: int) -> Value:
        column = reshape(slice_(weight, axis=1, start=j, stop=j + 1), shape=(channels,))
        return gather(padded, at + j if j else at, axis=1) * column

    y = functools.reduce(add, map(tap, range(width)))
    y = activate(y if bias is None else y + bias, activation)
    if past is None:
        return y
    seq = greatest(at, axes=(0,), keepdims=True) + 1
    return y, gather(padded, iota(past, axis=1) + seq, axis=1)


@causal_conv.infer
def _(n: OpCall) -> tuple[TensorType, ...]:
    x, weight, bias, past = n.x, n.weight, n.bias, n.past
    width = weight.shape[-1]
    require(isinstance(width, int) and width >= 2, f"weight {weight} must be [channels, width], width ≥ 2")
    require(x.rank == 3 and weight == x.with_shape(x.shape[2], width), f"weight {weight} does not fit x {x}")
    require(bias is None or bias == x.with_shape(x.shape[2]), f"bias {bias} does not fit x {x}")
    require(past is None or past == x.with_shape(x.shape[0], width - 1, x.shape[2]), f"past {past} does not fit x {x}")
    check_activation(n.activation)
    return (x,) if past is None else (x, past)


causal_conv.cost(lambda n: n.x.elements * n.weight.shape[1] * 2)


@causal_conv.states
def _(n: OpCall) -> tuple[StateSpec, ...]:
    channels, taps = n.weight.shape
    return (build_fixed_size_spec(StateKind.CONV, n.x, taps - 1, channels),)
