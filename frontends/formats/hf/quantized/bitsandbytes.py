"""bitsandbytes: 4-bit codes into a table (NF4 of https://arxiv.org/abs/2305.14314, FP4), and LLM.int8().

A 4-bit weight is `weight` u8 [n / 2, 1], two codes per byte with the first in the high half; `weight.quant_map`, the
value of each code; and `weight.absmax`, the scale of every block of values. The scales may be quantized again: then
they are bytes, whose values are in `weight.nested_quant_map`, scaled by blocks of `weight.nested_absmax`, plus an
offset. JSON in the bytes of `weight.quant_state.bitsandbytes__nf4` has the shape, the block sizes and the offset. An
8-bit weight (https://arxiv.org/abs/2208.07339) is i8 [out, in], and `SCB` [out] the largest magnitude of each row.
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
from .tensor import QuantizedTensor, check_finite, misfit_error, read_all, require_key

KINDS = ("nf4", "fp4")
_STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True)
class LookupTensor(QuantizedTensor):
    """A tensor of shape `size` whose 4-bit codes index a table of 16 values; each block of `block` values has a scale.

    kind: nf4 or fp4. If the file has nested_absmax, the scales are bytes: indices into the table nested_quant_map; each
    block of `nested_block` of them has a scale in nested_absmax, and `offset` is added.
    """

    kind: str
    size: tuple[int, ...]
    block: int
    nested_block: int
    offset: float

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.size

    def dtype(self, reader: TensorReader) -> DType:
        return DType(self.kind, "block", 4, self.block, self.block // 2 + (1 if self.keys["nested_absmax"] else 4))

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        row = math.prod(self.size[1:])
        first, last = start * row, stop * row
        packed = reader.read(self.keys["codes"], first // 2, -(-last // 2)).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)[first % 2 :][: last - first]
        values = read_all(reader, self.keys["quant_map"])[codes]
        blocks = np.arange(first // self.block, -(-last // self.block))
        values *= self._scales(reader, blocks).repeat(self.block)[first % self.block :][: last - first]
        return values.reshape(stop - start, *self.size[1:])

    def _scales(self, reader: TensorReader, blocks: Array) -> Array:
        """Return the scales f32 of the blocks whose consecutive indices are `blocks`."""
        start, stop = (int(blocks[0]), int(blocks[-1]) + 1) if len(blocks) else (0, 0)
        scales = reader.read(self.keys["absmax"], start, stop)
        if self.keys["nested_absmax"]:
            absmax, table = (read_all(reader, self.keys[f"nested_{role}"]) for role in ("absmax", "quant_map"))
            scales = table[scales] * absmax[blocks // self.nested_block] + np.float32(self.offset)
        return check_finite(scales, self.keys["absmax"], reader)


@dataclass(frozen=True)
class Int8Rows(Integers):
    """A weight i8 [out, in] of LLM.int8(): row n is SCB[n] / 127 times its codes."""

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return reader.read(self.keys["codes"], start, stop).view(np.uint8) ^ np.uint8(128)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return (super().scales(reader, start, stop) / np.float32(127))[:, None]


def read_bnb(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among `keys`, the tensors of a bitsandbytes folder, keyed by name; ignore `scheme`.

    Raises:
        WeftError: if tensors are missing or do not fit.
    """
    tensors: dict[str, QuantizedTensor] = {}
    for key in keys:
        if key.endswith(".SCB"):
            name = f"{key.removesuffix('.SCB')}.weight"
            tensors[name] = _read_rows(reader, require_key(key, name, keys), key, keys)
        elif _STATE in key:
            name, _, kind = key.partition(f".{_STATE}")
            if kind not in KINDS:
                raise WeftError(f"{key!r} is of the kind {kind}; weft reads only {' and '.join(KINDS)}")
            tensors[name] = _read_table(reader, require_key(key, name, keys), kind, key, keys)
        elif key.endswith(".quant_map") and not any(
            f"{key.removesuffix('quant_map')}{_STATE}{k}" in keys for k in KINDS
        ):
            raise WeftError(f"{key!r} has no quant_state tensor next to it; the checkpoint is incomplete")
    return tensors


def _read_rows(reader: TensorReader, weight: str, largest: str, keys: Collection[str]) -> Int8Rows:
    shape, stored = reader.shape(weight), (reader.dtype(weight), reader.dtype(largest))
    if len(shape) != 2 or reader.shape(largest) != shape[:1] or stored != (dtypes.i8, dtypes.f32):
        raise misfit_error(reader, weight, largest, expected="codes must be i8 [out, in], and scales f32 [out]")
    order = f"{weight}_format" if f"{weight}_format" in keys else ""
    if order and np.any(read_all(reader, order)):
        raise WeftError(
            f"{weight!r} is not stored row by row, as {order!r} states: save the model with bitsandbytes 0.45"
        )
    parts = {"codes": weight, "scales": largest, "order": order}
    return Int8Rows(parts, *shape, 8, shape[1], dtypes.f32, False, "")


def _read_table(reader: TensorReader, name: str, kind: str, state: str, keys: Collection[str]) -> LookupTensor:
    absmax, table = (require_key(name, f"{name}.{part}", keys) for part in ("absmax", "quant_map"))
    parts = {"codes": name, "absmax": absmax, "quant_map": table, "state": state}
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if f"{name}.nested_absmax" in keys else ["", ""]
    settings = _read_state(reader, state)
    size, block = settings["shape"], settings["blocksize"]
    count = math.prod(size)
    blocks = -(-count // block)
    nested_block: Any = 1
    offset: Any = 0.0
    expected = [(absmax, (blocks,), dtypes.u8 if nested[0] else dtypes.f32), (table, (16,), dtypes.f32)]
    if nested[0]:
        require_key(name, nested[1], keys)
        nested_block, offset = settings.get("nested_blocksize"), settings.get("nested_offset")
        valid = type(nested_block) is int and nested_block > 0 and type(offset) in (int, float)
        if not valid or not math.isfinite(offset):
            raise WeftError(f"{state!r} has no valid nested_blocksize and nested_offset for the scales {absmax!r}")
        expected += [(nested[0], (-(-blocks // nested_block),), dtypes.f32), (nested[1], (256,), dtypes.f32)]
    n_bytes, axes = -(-count // 2), reader.shape(name)
    fits = math.prod(axes) == n_bytes == axes[0] and reader.dtype(name) == dtypes.u8
    if not fits or any((reader.shape(k), reader.dtype(k)) != (s, d) for k, s, d in expected):
        keys_shown = (name, *(k for k, _, _ in expected))
        others = "".join(f", {k.rpartition('.')[2]} {d} {list(s)}" for k, s, d in expected)
        raise misfit_error(reader, *keys_shown, expected=f"codes must be u8 [{n_bytes}, 1]{others}")
    parts |= {"nested_absmax": nested[0], "nested_quant_map": nested[1]}
    return LookupTensor(parts, kind, tuple(size), block, nested_block, float(offset))


def _read_state(reader: TensorReader, state: str) -> dict[str, Any]:
    """Return the JSON object in the tensor `state`; raise WeftError unless its shape and blocksize are valid."""
    if reader.dtype(state) != dtypes.u8:
        raise WeftError(f"tensor {state!r} has dtype {reader.dtype(state)}, but must hold JSON as u8")
    settings: dict[str, Any] = parse_json(read_all(reader, state).tobytes(), f"the JSON in {state!r}")
    size, block = settings.get("shape"), settings.get("blocksize")
    valid = isinstance(size, list) and size and all(type(n) is int and 0 < n < 1 << 31 for n in size)
    if not valid or type(block) is not int or block < 1:
        raise WeftError(f"{state!r} has no valid shape and block size: shape={size!r}, blocksize={block!r}")
    return settings
