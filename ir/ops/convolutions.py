"""Convolutions over time, of spectrograms and waveforms; `recurrences` has those that decoders carry on."""

from __future__ import annotations

import numpy as np

from ..op import Array, OpCall, Size, TensorType, Value, case, fixed, normal, op, sizes, want
from .elementwise import add, affine
from .products import matmul
from .tensor import expand, gather, iota, pad, reshape, slice_, swap, transpose, unsqueeze


@op(
    cases=[
        case(normal(2, 9, 6), normal(4, 6, 3)),
        case(normal(2, 9, 6), normal(4, 6, 3), normal(4), stride=2, padding=(1, 1)),
        case(normal(2, 7, 6), normal(6, 2, 4), normal(6), padding=(2, 1), groups=3),
        case(normal(1, 11, 1), normal(5, 1, 5), stride=3),
    ]
)
def conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: int = 1,
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
) -> Array:
    """Convolution over time: y_t = Σ_j W_j x_{t·stride + j − padding[0]} + bias, with zeros outside of x.

    x [batch, length, in], weight [out, in / groups, kernel], bias [out] → [batch, frames, out], frames =
    ⌊(length + padding before + padding behind − kernel) / stride⌋ + 1. Each of `groups` runs of output channels reads
    its own run of input channels.
    """
    out, width, kernel = weight.shape
    padded = np.pad(x, ((0, 0), tuple(padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, 1)[:, ::stride]  # [batch, frames, in, kernel]
    apart = windows.reshape(*windows.shape[:2], groups, width, kernel)
    y = np.einsum("btgik,goik->btgo", apart, weight.reshape(groups, out // groups, width, kernel))
    y = y.reshape(*windows.shape[:2], out)
    return y if bias is None else y + bias


def _frames(n: OpCall) -> Size:
    """The length of the output."""
    length: Size = n.x.shape[1] + sum(n.padding) - n.weight.shape[2]
    return sizes.floordiv(length, n.stride) + 1


@conv1d.infer
def _(n: OpCall) -> TensorType:
    x, weight, bias, groups = n.x, n.weight, n.bias, n.groups
    want(x.rank == weight.rank == 3, f"x {x} must be [batch, length, in], weight {weight} [out, in / groups, kernel]")
    want(x.dtype == weight.dtype, f"x {x} and weight {weight} differ in dtype; cast one of them")
    out, width, kernel = (fixed(s, f"weight {weight} must have fixed sizes") for s in weight.shape)
    want(groups >= 1 and out % groups == 0, f"groups={groups} does not divide the {out} outputs of weight {weight}")
    want(x.shape[2] == width * groups, f"x {x} has not the {width * groups} channels of weight {weight}")
    want(bias is None or bias == weight.with_shape(out), f"bias {bias} does not fit weight {weight}")
    want(n.stride >= 1, f"stride={n.stride} must be positive")
    pads = tuple(n.padding)
    want(len(pads) == 2 and min(pads) >= 0, f"padding={list(pads)} must say how many zeros stand before and behind x")
    frames = _frames(n)
    want(not isinstance(frames, int) or frames > 0, f"the kernel of weight {weight} is longer than x {x}")
    return x.with_shape(x.shape[0], frames, out)


@conv1d.cost
def _(n: OpCall) -> Size:
    batch: Size = n.x.shape[0]
    return batch * _frames(n) * n.weight.elements * 2


@conv1d.body
def _(n: OpCall) -> Value:
    (out, width, kernel), groups, (before, after) = n.weight.shape, n.groups, n.padding
    batch, frames = n.x.shape[0], _frames(n)
    padded = pad(n.x, axis=1, before=before, after=after) if before or after else n.x
    # `iota` counts along an axis that exists: one number, repeated for every frame, makes it.
    one = slice_(reshape(n.weight, shape=(out * width * kernel,)), axis=0, start=0, stop=1)
    starts = affine(iota(expand(one, shape=(frames,)), axis=0), by=n.stride)
    at = add(unsqueeze(starts, axes=(1,)), unsqueeze(iota(n.weight, axis=2), axes=(0,)))  # [frames, kernel]
    windows = reshape(gather(padded, at, axis=1), shape=(batch, frames, kernel, groups, width))
    rows = reshape(transpose(windows, axes=(0, 3, 1, 2, 4)), shape=(batch, groups, frames, kernel * width))
    taps = reshape(transpose(n.weight, axes=(0, 2, 1)), shape=(groups, out // groups, kernel * width))
    y = reshape(transpose(matmul(rows, swap(taps)), axes=(0, 2, 1, 3)), shape=(batch, frames, out))
    return y if n.bias is None else add(y, n.bias)
