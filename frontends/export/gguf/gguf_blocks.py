"""Codes as the blocks of a GGUF file: 32 values each, with a scale and perhaps a minimum.

| codes | blocks | exact |
|---|---|---|
| 8 bits | Q8_0 | yes |
| 2 to 4 bits | Q4_0 | yes |
| 2 to 4 bits with zero points | Q4_1 | except the minimum, −zero · scale, which is rounded to f16 |
| 4-bit floats, mxfp4 | MXFP4 | yes |

Scales of other dtypes, which checkpoints may have, are also rounded to f16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LAYOUTS, BlockLayout, Blocks
from weft.ir.types.dtypes import DType

from ..stored_codes import StoredCodes

BLOCK = 32  # values of a row in a block
FILE_TYPES = {dtypes.q4_0: 2, dtypes.q4_1: 3, dtypes.q8_0: 7, dtypes.mxfp4: 38}  # general.file_type


def choose_block_dtype(layout: BlockLayout) -> DType | None:
    """Return the dtype of the GGUF blocks that can store codes of `layout`; None if there is none."""
    if layout.dtype in FILE_TYPES:
        return layout.dtype
    if layout.floats or layout.has_minimum or layout.group % BLOCK:
        return None
    if layout.bits == 8:
        return None if layout.has_zeros else dtypes.q8_0
    if layout.bits > 4:
        return None
    return dtypes.q4_1 if layout.has_zeros else dtypes.q4_0


def find_refusal(key: str, codes: StoredCodes) -> str:
    """Return the reason why no GGUF blocks can store the `codes` of tensor `key`, or ""."""
    if choose_block_dtype(codes.layout) is None:
        return f"GGUF has no blocks for codes of {codes.layout}"
    if codes.shape[-1] % BLOCK:
        return f"GGUF blocks have {BLOCK} values, which does not divide rows of {codes.shape[-1]}"
    return ""


@dataclass
class Rounding:
    """The largest changes of a weight by rounding scales and minima: `error`, absolute; `steps`, as a multiple of the
    distance of two codes. `tensors` are the names of the tensors with such changes."""

    error: float = 0.0
    steps: float = 0.0
    tensors: list[str] = field(default_factory=list)

    def add(self, key: str, exact: Array, rounded: Array, scales: Array) -> None:
        """Record the difference of the values `exact` and `rounded` [..., groups, group] of tensor `key`.

        `scales` [..., groups] are the distances of two codes.

        Raises:
            WeftError: if a value exceeds the range of f16.
        """
        errors = np.abs(exact.astype(np.float64) - rounded).max(-1)
        if not np.isfinite(errors).all():
            raise WeftError(f"{key!r} has a scale or minimum beyond the range of f16: export with --weights float")
        if errors.any():
            self.error = max(self.error, float(errors.max()))
            steps = errors[scales != 0] / np.abs(scales[scales != 0])
            self.steps = max(self.steps, float(steps.max(initial=0)))
            if key not in self.tensors:
                self.tensors.append(key)


def encode_gguf_blocks(key: str, codes: StoredCodes, reader: TensorReader, rounding: Rounding) -> Iterator[Array]:
    """Yield the bytes of the tensor `key` in GGUF blocks; rounding errors are recorded in `rounding`."""
    layout, width = codes.layout, codes.shape[-1]
    dtype = choose_block_dtype(layout)
    assert dtype is not None
    target = LAYOUTS[dtype.name]
    for rows in codes.blocks(reader):
        if layout.dtype == dtype:
            yield target.pack(rows).reshape(-1)
            continue
        blocks = _split_groups(rows, layout.group // BLOCK, width // BLOCK)
        if blocks.zeros is None:  # 0 has the same code in all groups
            shifted = Blocks(blocks.codes + np.uint8(target.middle - layout.middle), blocks.scales)
        else:
            shifted = Blocks(blocks.codes, blocks.scales, (target.middle - blocks.zeros) * blocks.scales)
        with np.errstate(over="ignore", invalid="ignore"):
            raw = target.pack(shifted)
            if layout.has_zeros or layout.scale != dtypes.f16:
                shape = blocks.codes.shape
                exact, rounded = layout.dequantize(blocks), target.dequantize(target.unpack(raw))
                rounding.add(key, exact.reshape(shape), rounded.reshape(shape), blocks.scales)
        yield raw.reshape(-1)


def _split_groups(rows: Blocks, repeats: int, count: int) -> Blocks:
    """Return `rows` with every group split into `repeats` blocks of 32 values; each row keeps its first `count`."""
    lead = rows.scales.shape[:-1]
    zeros = None if rows.zeros is None else rows.zeros.astype(np.float32).repeat(repeats, -1)[..., :count]
    codes = rows.codes.reshape(*lead, -1, BLOCK)[..., :count, :]
    return Blocks(codes, rows.scales.repeat(repeats, -1)[..., :count], None, zeros)
