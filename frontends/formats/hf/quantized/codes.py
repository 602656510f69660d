"""Quantized matrices of integers: codes of a few bits, a scale for each group of codes, optionally zero points."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import INTEGER_BITS, BlockLayout, Blocks, build_integer_layout
from weft.ir.types.dtypes import DType

from .tensor import QuantizedTensor, check_finite, read_all

GROUPS = (128, 64, 32, 16)  # sizes into which larger groups are split, with equal scales, as kernels support them
_SUPPORTED = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Integers(QuantizedTensor):
    """A matrix [rows, width]: weight[n, k] = scales[n, g] · (codes[n, k] − zeros[n, g]).

    Codes and zero points are unsigned, `bits` wide; if not `has_zeros`, all zeros are 2^{bits−1}. Column k belongs to
    group g = k // group, or, if `index` is not "", to the group that the tensor of this name lists for it (act-order).
    `scale` is the dtype of the scales.
    """

    rows: int
    width: int
    bits: int
    group: int
    scale: DType
    has_zeros: bool
    index: str

    @abstractmethod
    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return the codes u8 of rows ``start:stop``, [stop - start, width]."""

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return the scales f32 of rows ``start:stop``, [stop - start, groups]."""
        return reader.read(self.keys["scales"], start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return the zero points u8 of rows ``start:stop``, [stop - start, groups]; only called if `has_zeros`."""
        raise TypeError(f"{type(self).__name__} defines no zero points")

    @property
    def layout(self) -> BlockLayout | None:
        """Return the block layout of the codes, or None if weft has none for them."""
        group = find_group(self.group)
        if self.index or self.bits not in INTEGER_BITS or not group or self.width % self.group:
            return None
        return build_integer_layout(self.bits, group, self.has_zeros, self.scale)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.rows, self.width)

    def dtype(self, reader: TensorReader) -> DType:
        if (layout := self.layout) is not None:
            return layout.dtype
        order = "_act_order" if self.index else ""
        name = f"{'u' * self.has_zeros}int{self.bits}_g{self.group}{order}"  # not the name of a layout
        size = -(-self.group * self.bits // 8) + self.scale.bits // 8 + self.has_zeros
        return DType(name, "block", self.bits, self.group, size)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        values = self.codes(reader, start, stop).astype(np.float32)
        scales, zeros = self._scales(reader, start, stop), self._zeros(reader, start, stop)
        if not self.index and self.width % self.group == 0:
            grouped = values.reshape(len(values), self.width // self.group, self.group)  # a view
            grouped -= np.float32(1 << (self.bits - 1)) if zeros is None else zeros[..., None]
            grouped *= scales[..., None]
            return values
        groups = read_all(reader, self.index) if self.index else np.arange(self.width) // self.group
        values -= np.float32(1 << (self.bits - 1)) if zeros is None else zeros[:, groups]
        values *= scales[:, groups]
        return values

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        layout = self.layout
        if layout is None:
            return super().read_blocks(reader, start, stop)
        codes, repeats = self.codes(reader, start, stop), self.group // layout.group
        scales, zeros = self._scales(reader, start, stop), self._zeros(reader, start, stop)
        return layout.pack(
            Blocks(
                np.ascontiguousarray(codes).reshape(len(codes), self.width // layout.group, layout.group),
                scales.repeat(repeats, 1),
                None,
                None if zeros is None else zeros.repeat(repeats, 1),
            )
        )

    def _scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return check_finite(self.scales(reader, start, stop), self.keys["scales"], reader)

    def _zeros(self, reader: TensorReader, start: int, stop: int) -> Array | None:
        return self.zeros(reader, start, stop) if self.has_zeros else None


def find_group(group: int) -> int:
    """Return the group size of the block layout that stores groups of `group` values: `group` itself if kernels support
    it, else the largest of `GROUPS` that divides it, else `group` if it is a multiple of 8, else 0 (no layout)."""
    if group in _SUPPORTED:
        return group
    return next((size for size in GROUPS if group % size == 0), 0 if group % 8 else group)


def has_act_order(reader: TensorReader, key: str, width: int, group: int, count: int, unset: int | None = None) -> bool:
    """Return whether the tensor `key`, the group of each input, differs from consecutive groups of `group` inputs.

    Return False if `key` is "", or if all elements are `unset`. Raise WeftError if the tensor does not list a group
    below `count` for each of `width` inputs.
    """
    if not key:
        return False
    if reader.shape(key) != (width,) or not reader.dtype(key).is_int:
        raise WeftError(f"{key!r} must hold the group of each of {width} inputs, not {list(reader.shape(key))} values")
    index = read_all(reader, key)
    if width and unset is not None and (index == unset).all():
        return False
    if width and not 0 <= index.min() <= index.max() < count:
        raise WeftError(f"{key!r} holds groups {index.min()} to {index.max()}, but must hold groups 0 to {count - 1}")
    return not np.array_equal(index, np.arange(width) // group)


def to_bytes(words: Array) -> Array:
    """Return the bytes u8 [..., n · itemsize] of the integers `words` [..., n], lowest byte first."""
    return np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def is_scale_dtype(dtype: DType) -> bool:
    """Return whether weft reads scales of this `dtype`: f16, bf16 or f32."""
    return dtype in (dtypes.f16, dtypes.bf16, dtypes.f32)
