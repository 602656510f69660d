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

from .codes import Integers, has_act_order, is_scale_dtype, to_bytes
from .floats import Tiles, read_float4
from .tensor import QuantizedTensor, misfit_error, read_all, require_key

FORMATS = tuple(f"{kind}-quantized" for kind in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack"))
_OF_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale"),
)
_BYTES = (dtypes.i8, dtypes.f8e4m3)


@dataclass(frozen=True)
class PackedIntegers(Integers):
    """A weight whose codes are packed into 32-bit words; with `stream`, codes may cross word boundaries."""

    stream: bool

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _unpack_words(reader.read(self.keys["codes"], start, stop), self.bits, self.width, self.stream)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        words = read_all(reader, self.keys["zeros"])
        return np.ascontiguousarray(_unpack_words(words.T, self.bits, self.rows, self.stream)[:, start:stop].T)


def _unpack_words(words: Array, bits: int, count: int, stream: bool) -> Array:
    """Return the first `count` codes (u8) of each row of `words` i32 [rows, n]; with `stream`, codes may cross
    words."""
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
    """A weight i8 [out, in] of codes in two's complement of `bits`, one per byte. several: there is at least one scale
    per output, not a single scale for the tensor."""

    several: bool

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._to_unsigned(reader.read(self.keys["codes"], start, stop))

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._read_rows(reader, self.keys["scales"], start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._to_unsigned(self._read_rows(reader, self.keys["zeros"], start, stop).astype(np.int8))

    def _to_unsigned(self, codes: Array) -> Array:
        unsigned: Array = codes.view(np.uint8) + np.uint8(1 << (self.bits - 1))
        if unsigned.max(initial=0) >> self.bits:
            raise WeftError(
                f"{self.keys['codes']!r} has codes of more than {self.bits} bits; the checkpoint is damaged"
            )
        return unsigned

    def _read_rows(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        if self.several:
            return reader.read(key, start, stop).reshape(stop - start, -1)
        return np.broadcast_to(read_all(reader, key).reshape(1, 1), (stop - start, 1))


def read_compressed(
    reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]
) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of a compressed-tensors folder, keyed by name.

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
                raise WeftError(f"{weight!r} is missing, whose scale is {key!r}: the checkpoint is incomplete")
            if (dtype := reader.dtype(weight)) not in _BYTES:
                raise WeftError(f"{weight!r} is {dtype}, but its scale needs i8 or f8e4m3: save the model compressed")
    return tensors


def find_activation_keys(keys: Iterable[str]) -> frozenset[str]:
    """Return those of `keys` that describe how activations and KV caches are rounded."""
    return frozenset(key for key in keys if key.rpartition(".")[2] in _OF_ACTIVATIONS)


def _read_schemes(scheme: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """Return the bits of codes and the (height, width) of tiles in the groups of `scheme`; check what weft supports."""
    groups = scheme.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()) or not groups:
        raise WeftError("config_groups must map at least one group to a mapping that states its quantization")
    kinds = {str(g.get("format") or scheme.get("format")) for g in groups.values()}
    if kind := next((kind for kind in sorted(kinds) if kind not in FORMATS), None):
        raise WeftError(f"format={kind!r} is not supported, only {', '.join(FORMATS)}")
    sparsity = scheme.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and (kind := sparsity.get("format", "dense")) != "dense":
        raise WeftError(f"sparsity_config.format={kind!r} is not supported, only 'dense'")
    transforms = scheme.get("transform_config") or {}
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise WeftError("transform_config is not supported: it rotates activations while the model runs")
    widths, tiles = set[int](), set[tuple[int, int]]()
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is not int or not 2 <= bits <= 8:
            raise WeftError(f"num_bits={bits!r} of config group {name!r} must be an integer from 2 to 8")
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
    parts = {"codes": key, "scales": scales, "zeros": zeros, "shape": sizes, "groups": index}
    shape, stored, scale_shape = read_all(reader, sizes), reader.shape(key), reader.shape(scales)
    if shape.shape != (2,) or not reader.dtype(sizes).is_int or min(shape) < 1 or max(shape) >= 1 << 31:
        raise WeftError(f"tensor {sizes!r} must hold two positive integers, the shape of a matrix")
    rows, width = map(int, shape)
    groups = scale_shape[1] if len(scale_shape) == 2 else 0
    packings = [(bits, stream) for bits in sorted(widths) for stream in (True, False)]
    bits, stream = next(((b, s) for b, s in packings if stored == (rows, _count_words(width, b, s))), (0, True))
    fits = bits > 0 and groups > 0 and scale_shape == (rows, groups) and width % groups == 0
    if zeros and bits:
        fits &= reader.dtype(zeros) == dtypes.i32 and reader.shape(zeros) == (_count_words(rows, bits, stream), groups)
    if not fits or reader.dtype(key) != dtypes.i32 or not is_scale_dtype(reader.dtype(scales)):
        kinds = f"i32, packed from {' or '.join(map(str, sorted(widths)))} bits for a [{rows}, {width}] matrix"
        expected = f"codes must be {kinds}, and scales f16, bf16 or f32 [{rows}, groups], where groups divides {width}"
        raise misfit_error(reader, key, scales, *filter(None, [zeros]), expected=expected)
    group = width // groups
    # All groups are -1 if they are consecutive.
    ordered = index if has_act_order(reader, index, width, group, groups, unset=-1) else ""
    return PackedIntegers(parts, rows, width, bits, group, reader.dtype(scales), bool(zeros), ordered, stream)


def _count_words(count: int, bits: int, stream: bool) -> int:
    """Return the number of 32-bit words for `count` codes of `bits`; with `stream`, codes may cross word boundaries."""
    return -(-count * bits // 32) if stream else -(-count // (32 // bits))


def _read_bytes(
    reader: TensorReader, key: str, name: str, keys: Collection[str], tiles: Collection[tuple[int, int]]
) -> QuantizedTensor:
    scales, zero = require_key(key, f"{name}.weight_scale", keys), f"{name}.weight_zero_point"
    shape, scale_shape, kind = reader.shape(key), reader.shape(scales), reader.dtype(scales)
    zeros, is_single = zero if zero in keys else "", math.prod(scale_shape) == 1
    parts = {"codes": key, "scales": scales, "zeros": zeros}
    if len(shape) != 2 or not all(shape) or not (len(scale_shape) == 2 or is_single) or not is_scale_dtype(kind):
        raise misfit_error(reader, key, scales, expected="scales must be an f16, bf16 or f32 number or matrix")
    rows, width = shape
    if zeros and reader.shape(zeros) != scale_shape:
        raise misfit_error(reader, key, scales, zeros, expected="zero points must have the shape of the scales")
    if reader.dtype(key) == dtypes.f8e4m3:
        tile = _find_tile(shape, (1, 1) if is_single else scale_shape, tiles)
        if tile is None:
            raise misfit_error(reader, key, scales, expected="scales must be one per row, group or tile of equal size")
        if zeros and np.any(read_all(reader, zeros)):
            raise WeftError(f"tensor {zeros!r} must hold zeros only, as the codes of {key!r} are floats")
        return Tiles(parts, tile)
    groups = 1 if is_single else scale_shape[1]
    if not is_single and (scale_shape[0] != rows or width % groups):
        expected = f"scales must have shape [{rows}, groups], where groups divides {width}"
        raise misfit_error(reader, key, scales, expected=expected)
    shifted = bool(zeros) and bool(np.any(read_all(reader, zeros)))
    return Bytes(parts, rows, width, 8, width // groups, kind, shifted, "", not is_single)


def _find_tile(
    shape: tuple[int, ...], counts: tuple[int, ...], tiles: Collection[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return the (height, width) of the tiles of a matrix of `shape` that has `counts` tiles along each axis: the first
    of `tiles` that fits, else the exact quotients; None if neither fits."""
    quotients = tuple(n // count if count and n % count == 0 else 0 for n, count in zip(shape, counts, strict=True))
    for height, width in (*tiles, quotients):
        if height and width and (-(-shape[0] // height), -(-shape[1] // width)) == counts:
            return height, width
    return None
