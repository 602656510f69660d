"""bitsandbytes: 4-bit codes into a table (NF4 of https://arxiv.org/abs/2305.14314, FP4), and LLM.int8().

A weight of 4 bits is `weight` u8 [n / 2, 1], two codes a byte, the first in the high half; `weight.quant_map`, the
number of each code; and `weight.absmax`, what every block of numbers is multiplied by. Where those are quantized once
more, they are bytes: `weight.nested_quant_map` has their numbers, which blocks of `weight.nested_absmax` scale, plus
an offset. JSON in the bytes of `weight.quant_state.bitsandbytes__nf4` has the shape, the blocks' sizes and the
offset. A weight of 8 bits (https://arxiv.org/abs/2208.07339) is i8 [out, in], and `SCB` [out] the largest size in
each row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.storage.documents import parse_json
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from .codes import Integers
from .tensor import Quantized, beside, finite, misfit, whole

KINDS = ("nf4", "fp4")
_STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Table(Quantized):
    """Numbers of `size`, codes of 4 bits into a table of 16, in blocks of `block` numbers of the flat tensor.

    Tensors are called `codes`, `absmax` and `table`; `nested` are the keys of the scales and the table of `absmax`,
    whose blocks have `nested_block` numbers, to which `offset` is added.
    """

    kind: str
    size: tuple[int, ...]
    block: int
    codes: str
    absmax: str
    table: str
    state: str
    nested: tuple[str, str] | None
    nested_block: int
    offset: float

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, self.absmax, self.table, self.state, *(self.nested or ()))

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.size

    def dtype(self, reader: TensorReader) -> DType:
        return DType(self.kind, "block", 4, self.block, self.block // 2 + (1 if self.nested else 4))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        row = math.prod(self.size[1:])
        first, last = start * row, stop * row
        packed = reader.read(self.codes, first // 2, -(-last // 2)).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)[first % 2 :][: last - first]
        values = whole(reader, self.table)[codes]
        blocks = np.arange(first // self.block, -(-last // self.block))
        scales = self._scales(reader, blocks).repeat(self.block)[first % self.block :]
        values *= scales[: last - first]
        return values.reshape(stop - start, *self.size[1:])

    def _scales(self, reader: TensorReader, blocks: Array) -> Array:
        """The scales f32 of consecutive `blocks`."""
        start, stop = (int(blocks[0]), int(blocks[-1]) + 1) if len(blocks) else (0, 0)
        scales = reader.read(self.absmax, start, stop)
        if self.nested is not None:
            absmax, table = (whole(reader, key) for key in self.nested)
            scales = table[scales] * absmax[blocks // self.nested_block] + np.float32(self.offset)
        return finite(scales, self.absmax, reader)


@dataclass(frozen=True)
class Rows(Integers):
    """A weight i8 [out, in], a row of which is `SCB` / 127 times its codes."""

    weight: str
    largest: str
    others: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.weight, self.largest, *self.others)

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return reader.read(self.weight, start, stop).view(np.uint8) ^ np.uint8(128)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return (reader.read(self.largest, start, stop) / np.float32(127))[:, None]


def bitsandbytes(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> dict[str, Quantized]:
    """The weights of a folder of bitsandbytes, by name.

    Raises:
        WeftError: if tensors are missing or do not fit.
    """
    tensors: dict[str, Quantized] = {}
    for key in keys:
        if key.endswith(".SCB"):
            name = f"{key.removesuffix('.SCB')}.weight"
            tensors[name] = _rows(reader, beside(key, name, keys), key, keys)
        elif _STATE in key:
            name, _, kind = key.partition(f".{_STATE}")
            if kind not in KINDS:
                raise WeftError(f"{key!r} is of a kind that weft does not read, only {' and '.join(KINDS)}")
            tensors[name] = _table(reader, beside(key, name, keys), kind, key, keys)
        elif key.endswith(".quant_map") and not any(
            f"{key.removesuffix('quant_map')}{_STATE}{k}" in keys for k in KINDS
        ):
            raise WeftError(f"there is no quant_state beside {key!r}; the checkpoint is incomplete")
    return tensors


def _rows(reader: TensorReader, weight: str, largest: str, keys: Collection[str]) -> Rows:
    shape, stored = reader.shape(weight), (reader.dtype(weight), reader.dtype(largest))
    if len(shape) != 2 or reader.shape(largest) != shape[:1] or stored != (dtypes.i8, dtypes.f32):
        raise misfit(reader, weight, largest, expected="i8 [out, in] and f32 [out]")
    order = f"{weight}_format"
    others = (order,) if order in keys else ()
    if others and np.any(whole(reader, order)):
        raise WeftError(
            f"{order!r} says that {weight!r} is not stored row by row: save the model with bitsandbytes 0.45"
        )
    return Rows(*shape, 8, shape[1], dtypes.f32, False, "", weight, largest, others)


def _table(reader: TensorReader, name: str, kind: str, state: str, keys: Collection[str]) -> Table:
    absmax, table = (beside(name, f"{name}.{part}", keys) for part in ("absmax", "quant_map"))
    facts = _facts(reader, state)
    size, block = facts["shape"], facts["blocksize"]
    count = math.prod(size)
    nested: tuple[str, str] | None = None
    nested_block: Any = 1
    offset: Any = 0.0
    if f"{name}.nested_absmax" in keys:
        nested = (f"{name}.nested_absmax", beside(name, f"{name}.nested_quant_map", keys))
        nested_block, offset = facts.get("nested_blocksize"), facts.get("nested_offset")
        sound = type(nested_block) is int and nested_block > 0 and type(offset) in (int, float)
        if not sound or not math.isfinite(offset):
            raise WeftError(f"{state!r} does not say how the scales in {absmax!r} are quantized")
    blocks = -(-count // block)
    want = [(absmax, (blocks,), dtypes.u8 if nested else dtypes.f32), (table, (16,), dtypes.f32)]
    if nested:
        want += [(nested[0], (-(-blocks // nested_block),), dtypes.f32), (nested[1], (256,), dtypes.f32)]
    codes = math.prod(reader.shape(name)) == -(-count // 2) and reader.dtype(name) == dtypes.u8
    axes = reader.shape(name)
    if not codes or axes[0] != math.prod(axes) or any((reader.shape(k), reader.dtype(k)) != (s, d) for k, s, d in want):
        keys_shown = (name, *(k for k, _, _ in want))
        raise misfit(reader, *keys_shown, expected=f"u8 [{-(-count // 2)}, 1] for {count} numbers in blocks of {block}")
    return Table(kind, tuple(size), block, name, absmax, table, state, nested, nested_block, float(offset))


def _facts(reader: TensorReader, state: str) -> dict[str, Any]:
    """The JSON in the tensor `state`: a shape and the size of blocks at least."""
    if reader.dtype(state) != dtypes.u8:
        raise WeftError(f"{state!r} holds {reader.dtype(state)}, not the bytes of a JSON text")
    facts: dict[str, Any] = parse_json(whole(reader, state).tobytes(), f"the text in {state!r}")
    size, block = facts.get("shape"), facts.get("blocksize")
    sound = isinstance(size, list) and size and all(type(n) is int and 0 < n < 1 << 31 for n in size)
    if not sound or type(block) is not int or block < 1:
        raise WeftError(f"{state!r} says no shape and size of blocks: shape={size!r}, blocksize={block!r}")
    return facts
