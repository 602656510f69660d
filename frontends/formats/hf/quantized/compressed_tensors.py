"""compressed-tensors, as llm-compressor and vLLM write it: integers in words or bytes, and 8-bit and 4-bit floats.

Codes are signed; a word stores a code plus 2^{bits−1}, which is unsigned. ``pack-quantized`` stores `weight_packed` i32
[out, ⌈in · bits / 32⌉], a bit stream from the lowest bit on (older versions start a new word after ⌊32 / bits⌋ codes),
`weight_scale` [out, groups], `weight_shape` and, if not symmetric, `weight_zero_point` i32 [⌈out · bits / 32⌉, groups],
packed along the outputs. ``int-quantized``, ``float-quantized`` and ``naive-quantized`` store `weight` as bytes;
``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized`` store `weight_packed` u8 [out, in / 2], 4-bit floats, and 8-bit
`weight_scale`. The tensors themselves show which weights are quantized; the config only bounds the bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import INTEGER_BITS, unpack_codes

from .codes import Integers, is_act_order, is_scale_dtype, to_bytes
from .floats import Tiles, read_float4
from .tensor import QuantizedTensor, misfit_error, read_all, require_key

FORMATS = tuple(f"{kind}-quantized" for kind in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack"))
_MIXED = "mixed-precision"  # every group has its own format
_OF_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale"),
)
_BYTES = (dtypes.i8, dtypes.f8e4m3)


@dataclass(frozen=True)
class PackedIntegers(Integers):
    """A weight whose codes are packed into 32-bit words; with `stream`, codes may cross word boundaries.

    packed, scale_key, zero_key ("" without zero points), more_parts: keys of its tensors.
    """

    packed: str
    scale_key: str
    zero_key: str
    more_parts: tuple[str, ...]
    stream: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.packed, self.scale_key, *((self.zero_key,) if self.zero_key else ()), *self.more_parts)

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _unpack_words(reader.read(self.packed, start, stop), self.bits, self.width, self.stream)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return reader.read(self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        words = read_all(reader, self.zero_key)
        return np.ascontiguousarray(_unpack_words(words.T, self.bits, self.rows, self.stream)[:, start:stop].T)


def _unpack_words(words: Array, bits: int, count: int, stream: bool) -> Array:
    """Return the first `count` codes (u8) of each row of `words` i32 [rows, n]; with `stream` they may cross words."""
    if stream and bits in INTEGER_BITS:
        return unpack_codes(to_bytes(words), bits, count)
    if stream:
        code_bits = np.unpackbits(to_bytes(words), axis=-1, count=count * bits, bitorder="little")
        return np.packbits(code_bits.reshape(len(words), count, bits), axis=-1, bitorder="little")[..., 0]
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


@dataclass(frozen=True)
class Bytes(Integers):
    """A weight i8 [out, in] of codes in two's complement of `bits`, one per byte.

    weight, scale_key, zero_key ("" without zero points): keys of its tensors. several: there is at least one scale per
    output, not a single scale for the tensor.
    """

    weight: str
    scale_key: str
    zero_key: str
    several: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.weight, self.scale_key, *((self.zero_key,) if self.zero_key else ()))

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._to_unsigned(reader.read(self.weight, start, stop))

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._read_rows(reader, self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._to_unsigned(self._read_rows(reader, self.zero_key, start, stop).astype(np.int8))

    def _to_unsigned(self, codes: Array) -> Array:
        unsigned: Array = codes.view(np.uint8) + np.uint8(1 << (self.bits - 1))
        if unsigned.max(initial=0) >> self.bits:
            raise WeftError(f"{self.weight!r} has codes of more than {self.bits} bits; the checkpoint is damaged")
        return unsigned

    def _read_rows(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        if self.several:
            return reader.read(key, start, stop).reshape(stop - start, -1)
        return np.broadcast_to(read_all(reader, key).reshape(1, 1), (stop - start, 1))


def read_compressed(
    reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]
) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of a compressed-tensors folder, by name.

    Raises:
        WeftError: if the config `scheme` states an unsupported format, or tensors are missing or do not fit.
    """
    widths, tiles = _read_schemes(scheme)
    tensors: dict[str, QuantizedTensor] = {}
    for key in keys:
        name, _, part = key.rpartition(".")
        if part == "weight_packed" and reader.dtype(key) == dtypes.u8:
            tensors[f"{name}.weight"] = read_float4(reader, key, name, keys)
        elif part == "weight_packed":
            tensors[f"{name}.weight"] = _read_packed(reader, key, name, keys, widths)
        elif part == "weight" and reader.dtype(key) in _BYTES:
            tensors[key] = _read_bytes(reader, key, name, keys, tiles)
        elif part == "weight_scale" and f"{name}.weight_packed" not in keys:
            weight = f"{name}.weight"
            if weight not in keys:
                raise WeftError(f"{key!r} has no weight; the checkpoint is incomplete or of another layout")
            if (dtype := reader.dtype(weight)) not in _BYTES:
                raise WeftError(f"{weight!r} next to {key!r} is of dtype {dtype}, not codes: save the model compressed")
    return tensors


def find_activation_keys(keys: Iterable[str]) -> frozenset[str]:
    """Return those of `keys` that describe how activations and KV caches are rounded."""
    return frozenset(key for key in keys if key.rpartition(".")[2] in _OF_ACTIVATIONS)


def _read_schemes(scheme: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """Return the bits of codes and the (height, width) of tiles in the groups of `scheme`; check what weft supports."""
    groups = scheme.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()) or not groups:
        raise WeftError("config_groups is not a mapping of groups that state how weights are quantized")
    kinds = {str(g.get("format") or scheme.get("format")) for g in groups.values()}
    if kind := next((kind for kind in sorted(kinds) if kind not in FORMATS), None):
        raise WeftError(f"format={kind!r} is not supported, only {', '.join(FORMATS)}")
    sparsity = scheme.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and (kind := sparsity.get("format", "dense")) != "dense":
        raise WeftError(f"sparsity_config.format={kind!r} stores weights without their zeros: weft reads only 'dense'")
    transforms = scheme.get("transform_config") or {}
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise WeftError("transform_config rotates activations while the model runs, which weft does not import")
    widths, tiles = set[int](), set[tuple[int, int]]()
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is not int or not 2 <= bits <= 8:
            raise WeftError(f"num_bits={bits!r} of {name} must be an integer from 2 to 8")
        widths.add(bits)
        tile = weights.get("block_structure")
        if isinstance(tile, list) and len(tile) == 2 and all(type(n) is int and n > 0 for n in tile):
            tiles.add((tile[0], tile[1]))
    return frozenset(widths), frozenset(tiles)


def _read_packed(
    reader: TensorReader, key: str, name: str, keys: Collection[str], widths: frozenset[int]
) -> PackedIntegers:
    scales, sizes = (require_key(key, f"{name}.{part}", keys) for part in ("weight_scale", "weight_shape"))
    optional = [f"{name}.{part}" for part in ("weight_zero_point", "weight_g_idx")]
    zeros, index = (k if k in keys else "" for k in optional)
    shape, stored, scale_shape = read_all(reader, sizes), reader.shape(key), reader.shape(scales)
    if shape.shape != (2,) or not reader.dtype(sizes).is_int or min(shape) < 1 or max(shape) >= 1 << 31:
        raise WeftError(f"{sizes!r} must have the shape of a matrix: two positive integers")
    rows, width = map(int, shape)
    groups = scale_shape[1] if len(scale_shape) == 2 else 0
    packings = [(bits, stream) for bits in sorted(widths) for stream in (True, False)]
    bits, stream = next(((b, s) for b, s in packings if stored == (rows, _count_words(width, b, s))), (0, True))
    present = (key, scales, *((zeros,) if zeros else ()))
    fits = bits > 0 and groups > 0 and scale_shape == (rows, groups) and width % groups == 0
    if zeros and bits:
        fits &= reader.dtype(zeros) == dtypes.i32 and reader.shape(zeros) == (_count_words(rows, bits, stream), groups)
    if not fits or reader.dtype(key) != dtypes.i32 or not is_scale_dtype(reader.dtype(scales)):
        widest = " or ".join(map(str, sorted(widths)))
        raise misfit_error(
            reader,
            *present,
            expected=f"for a [{rows}, {width}] matrix of {widest} bits, whose rows are cut into whole groups",
        )
    group = width // groups
    if index:
        if reader.shape(index) != (width,) or not reader.dtype(index).is_int:
            raise WeftError(f"{index!r} {list(reader.shape(index))} must list the group of each of {width} inputs")
        input_groups = read_all(reader, index)
        if input_groups.min() == -1 == input_groups.max():  # written if groups are consecutive
            input_groups = np.arange(width) // group
        if not 0 <= input_groups.min() <= input_groups.max() < groups:
            raise WeftError(
                f"{index!r} puts an input into group {int(input_groups.max())} or {int(input_groups.min())} of {groups}"
            )
    ordered = index if index and is_act_order(input_groups, group) else ""
    more_parts = (sizes, *((index,) if index else ()))
    kind = reader.dtype(scales)
    return PackedIntegers(rows, width, bits, group, kind, bool(zeros), ordered, key, scales, zeros, more_parts, stream)


def _count_words(count: int, bits: int, stream: bool) -> int:
    """Return the number of 32-bit words for `count` codes of `bits`; with `stream`, codes may cross word boundaries."""
    return -(-count * bits // 32) if stream else -(-count // (32 // bits))


def _read_bytes(
    reader: TensorReader, key: str, name: str, keys: Collection[str], tiles: Collection[tuple[int, int]]
) -> QuantizedTensor:
    scales, zero = require_key(key, f"{name}.weight_scale", keys), f"{name}.weight_zero_point"
    shape, scale_shape, kind = reader.shape(key), reader.shape(scales), reader.dtype(scales)
    zeros, is_single = zero if zero in keys else "", math.prod(scale_shape) == 1
    if len(shape) != 2 or not all(shape) or not (len(scale_shape) == 2 or is_single) or not is_scale_dtype(kind):
        raise misfit_error(reader, key, scales, expected="floats for whole rows, groups or tiles of a matrix")
    rows, width = shape
    if zeros and reader.shape(zeros) != scale_shape:
        raise misfit_error(reader, key, scales, zeros, expected="a zero point for each scale")
    if reader.dtype(key) == dtypes.f8e4m3:
        tile = _find_tile(shape, (1, 1) if is_single else scale_shape, tiles)
        if tile is None:
            raise misfit_error(reader, key, scales, expected="floats for whole rows, groups or tiles of a matrix")
        if zeros and np.any(read_all(reader, zeros)):
            raise WeftError(f"{zeros!r} is not 0, and floats have no zero points")
        return _TilesWithZeros(key, scales, tile, zeros)
    groups = 1 if is_single else scale_shape[1]
    if not is_single and (scale_shape[0] != rows or width % groups):
        raise misfit_error(reader, key, scales, expected="floats for whole rows or groups of integers")
    shifted = bool(zeros) and bool(np.any(read_all(reader, zeros)))
    return Bytes(rows, width, 8, width // groups, kind, shifted, "", key, scales, zeros, not is_single)


@dataclass(frozen=True)
class _TilesWithZeros(Tiles):
    """8-bit floats in tiles with a tensor `zeros` ("" without one) of zero points, which are all 0."""

    zeros: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (*super().parts, *((self.zeros,) if self.zeros else ()))


def _find_tile(
    shape: tuple[int, ...], counts: tuple[int, ...], tiles: Collection[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return (height, width) of tiles, `counts` per axis of `shape`: the first of `tiles` that fits, else quotients."""
    quotients = tuple(n // count if count and n % count == 0 else 0 for n, count in zip(shape, counts, strict=True))
    for height, width in (*tiles, quotients):
        if height and width and (-(-shape[0] // height), -(-shape[1] // width)) == counts:
            return height, width
    return None
