"""Matrices of integers: codes of a few bits, a scale for each group of them, perhaps zero points."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import INTEGER_BITS, BlockLayout, Blocks, integer_layout
from weft.ir.types.dtypes import DType

from .tensor import Quantized, finite, whole

GROUPS = (128, 64, 32, 16)  # that kernels take: a larger group becomes several of one of these, with equal scales
_TAKEN = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Integers(Quantized):
    """A matrix [rows, width]: weight[n, k] = scales[n, g] · (codes[n, k] − zeros[n, g]).

    Codes are `bits` wide and unsigned, zero points too; without them (`has_zeros`), zeros are 2^{bits−1}. Inputs k
    belong to group g = k // group, or that which the tensor called `index` lists (act-order). `scale` is the dtype of
    scales.
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
        """The codes u8 of rows ``start:stop``, [rows, width]."""

    @abstractmethod
    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        """The scales f32 of the same rows, [rows, groups]."""

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        """The zero points u8 of the same rows, [rows, groups], if there are any."""
        raise TypeError(f"{type(self).__name__} defines no zero points")

    @property
    def layout(self) -> BlockLayout | None:
        """The layout of the blocks; None if there is none of such codes."""
        group = kernel_group(self.group)
        if self.index or self.bits not in INTEGER_BITS or not group or self.width % self.group:
            return None
        return integer_layout(self.bits, group, self.has_zeros, self.scale)

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (self.rows, self.width)

    def dtype(self, reader: TensorReader) -> DType:
        if (layout := self.layout) is not None:
            return layout.dtype
        order = "_act_order" if self.index else ""
        name = f"{'u' * self.has_zeros}int{self.bits}_g{self.group}{order}"  # of no layout
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
        of = whole(reader, self.index) if self.index else np.arange(self.width) // self.group
        values -= np.float32(1 << (self.bits - 1)) if zeros is None else zeros[:, of]
        values *= scales[:, of]
        return values

    def read_blocks(self, reader: TensorReader, start: int, stop: int) -> Array:
        layout = self.layout
        if layout is None:
            return super().read_blocks(reader, start, stop)
        codes, several = self.codes(reader, start, stop), self.group // layout.group
        scales, zeros = self._scales(reader, start, stop), self._zeros(reader, start, stop)
        return layout.pack(
            Blocks(
                np.ascontiguousarray(codes).reshape(len(codes), self.width // layout.group, layout.group),
                scales.repeat(several, 1),
                None,
                None if zeros is None else zeros.repeat(several, 1),
            )
        )

    def _scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return finite(self.scales(reader, start, stop), self.parts[1], reader)

    def _zeros(self, reader: TensorReader, start: int, stop: int) -> Array | None:
        return self.zeros(reader, start, stop) if self.has_zeros else None


def kernel_group(group: int) -> int:
    """Return the groups of a layout for those of `group` numbers: smaller ones with equal scales where kernels take
    those only; 0 if they fill no bytes."""
    if group in _TAKEN:
        return group
    return next((size for size in GROUPS if group % size == 0), 0 if group % 8 else group)


def is_act_order(index: Array, group: int) -> bool:
    """Return whether `index`, the group of each input, is another than that of groups of `group` inputs in order."""
    return not np.array_equal(index, np.arange(len(index)) // group)


def bits_of(words: Array) -> Array:
    """The bytes of integers [..., n] along the last axis, the lowest first."""
    return np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def float_kinds(dtype: DType) -> bool:
    """Return whether scales may be stored as `dtype`."""
    return dtype in (dtypes.f16, dtypes.bf16, dtypes.f32)
