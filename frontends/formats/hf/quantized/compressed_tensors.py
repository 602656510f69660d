"""compressed-tensors, as llm-compressor and vLLM write it: integers in words or bytes, floats of 8 and of 4 bits.

Codes are signed; a word holds a code plus 2^{bits−1}, so that it is unsigned. ``pack-quantized`` stores
`weight_packed` i32 [out, ⌈in · bits / 32⌉], a stream of bits from the lowest on (older versions begin a word with
each ⌊32 / bits⌋ codes), `weight_scale` [out, groups], `weight_shape` and, if not symmetric, `weight_zero_point` i32
[⌈out · bits / 32⌉, groups], packed along the outputs. ``int-quantized``, ``float-quantized`` and ``naive-quantized``
store `weight` as bytes; ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized`` store `weight_packed` u8 [out, in / 2],
floats of 4 bits, and `weight_scale` of 8. Which tensors are quantized, the tensors say; of which bits they may be, the
config does.
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

from .codes import Integers, bits_of, float_kinds, is_act_order
from .floats import Tiles, float4
from .tensor import Quantized, beside, misfit, whole

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_MIXED = "mixed-precision"  # every group says its own
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
)
_BYTES = (dtypes.i8, dtypes.f8e4m3)


@dataclass(frozen=True)
class Packed(Integers):
    """A weight in words; `packed`, `scale_key` and `zero_key` are the keys of its tensors, `others` more of them.

    `stream` if words may end within a code.
    """

    packed: str
    scale_key: str
    zero_key: str
    others: tuple[str, ...]
    stream: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.packed, self.scale_key, *((self.zero_key,) if self.zero_key else ()), *self.others)

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _unpacked(reader.read(self.packed, start, stop), self.bits, self.width, self.stream)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return reader.read(self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        words = whole(reader, self.zero_key)
        return np.ascontiguousarray(_unpacked(words.T, self.bits, self.rows, self.stream)[:, start:stop].T)


def _unpacked(words: Array, bits: int, count: int, stream: bool) -> Array:
    """The `count` codes u8 in each row of words, i32 [rows, words], which may end within a code if `stream`."""
    if stream and bits in INTEGER_BITS:
        return unpack_codes(bits_of(words), bits, count)
    if stream:
        each = np.unpackbits(bits_of(words), axis=-1, count=count * bits, bitorder="little")
        return np.packbits(each.reshape(len(words), count, bits), axis=-1, bitorder="little")[..., 0]
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


@dataclass(frozen=True)
class Bytes(Integers):
    """A weight i8 [out, in], of `bits` in two's complement; `weight`, `scale_key` and `zero_key` are the keys of its
    tensors.

    `several` if there is a scale for each row, or for more; else one is that of all.
    """

    weight: str
    scale_key: str
    zero_key: str
    several: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.weight, self.scale_key, *((self.zero_key,) if self.zero_key else ()))

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unsigned(reader.read(self.weight, start, stop))

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._rows(reader, self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unsigned(self._rows(reader, self.zero_key, start, stop).astype(np.int8))

    def _unsigned(self, codes: Array) -> Array:
        found: Array = codes.view(np.uint8) + np.uint8(1 << (self.bits - 1))
        if found.max(initial=0) >> self.bits:
            raise WeftError(f"{self.weight!r} has codes of more than {self.bits} bits; the checkpoint is broken")
        return found

    def _rows(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        if self.several:
            return reader.read(key, start, stop).reshape(stop - start, -1)
        return np.broadcast_to(whole(reader, key).reshape(1, 1), (stop - start, 1))


def compressed_tensors(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> dict[str, Quantized]:
    """The weights of a folder of compressed-tensors, by name.

    Raises:
        WeftError: if the format is another, or tensors are missing or do not fit.
    """
    widths, tiles = _schemes(how)
    tensors: dict[str, Quantized] = {}
    for key in keys:
        name, _, part = key.rpartition(".")
        if part == "weight_packed" and reader.dtype(key) == dtypes.u8:
            tensors[f"{name}.weight"] = float4(reader, key, name, keys)
        elif part == "weight_packed":
            tensors[f"{name}.weight"] = _packed(reader, key, name, keys, widths)
        elif part == "weight" and reader.dtype(key) in _BYTES:
            tensors[key] = _bytes(reader, key, name, keys, tiles)
        elif part == "weight_scale" and f"{name}.weight_packed" not in keys:
            weight = f"{name}.weight"
            if weight not in keys:
                raise WeftError(f"there is no weight beside {key!r}; the checkpoint is incomplete or of another layout")
            if (found := reader.dtype(weight)) not in _BYTES:
                raise WeftError(f"{weight!r} holds {found} beside {key!r}, not codes: save the model compressed")
    return tensors


def hidden(keys: Iterable[str]) -> frozenset[str]:
    """The tensors that say how activations and caches are rounded."""
    return frozenset(key for key in keys if key.rpartition(".")[2] in _OF_ACTIVATIONS)


def _schemes(how: Mapping[str, Any]) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """The bits that codes may have, and the edges of tiles, as the config says after a check of it."""
    groups = how.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()) or not groups:
        raise WeftError("config_groups does not say how weights are quantized")
    kinds = {str(g.get("format") or how.get("format")) for g in groups.values()}
    if kind := next((kind for kind in sorted(kinds) if kind not in FORMATS), None):
        raise WeftError(f"format={kind!r} is not supported, only {', '.join(FORMATS)}")
    sparsity = how.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and (kind := sparsity.get("format", "dense")) != "dense":
        raise WeftError(f"the weights are stored as {kind!r}, without their zeros: weft reads dense ones")
    transforms = how.get("transform_config") or {}
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise WeftError("transform_config rotates activations while the model runs, which weft does not import")
    widths, tiles = set[int](), set[tuple[int, int]]()
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is not int or not 2 <= bits <= 8:
            raise WeftError(f"num_bits={bits!r} of {name} is no number of bits from 2 to 8")
        widths.add(bits)
        tile = weights.get("block_structure")
        if isinstance(tile, list) and len(tile) == 2 and all(type(n) is int and n > 0 for n in tile):
            tiles.add((tile[0], tile[1]))
    return frozenset(widths), frozenset(tiles)


def _packed(reader: TensorReader, key: str, name: str, keys: Collection[str], widths: frozenset[int]) -> Packed:
    scales, sizes = (beside(key, f"{name}.{part}", keys) for part in ("weight_scale", "weight_shape"))
    optional = [f"{name}.{part}" for part in ("weight_zero_point", "weight_g_idx")]
    zeros, index = (k if k in keys else "" for k in optional)
    shape, stored, scaled = whole(reader, sizes), reader.shape(key), reader.shape(scales)
    if shape.shape != (2,) or not reader.dtype(sizes).is_int or min(shape) < 1 or max(shape) >= 1 << 31:
        raise WeftError(f"{sizes!r} is not the shape of a matrix")
    rows, width = map(int, shape)
    groups = scaled[1] if len(scaled) == 2 else 0
    ways = [(bits, stream) for bits in sorted(widths) for stream in (True, False)]
    bits, stream = next(((b, s) for b, s in ways if stored == (rows, _words(width, b, s))), (0, True))
    present = (key, scales, *((zeros,) if zeros else ()))
    fits = bits > 0 and groups > 0 and scaled == (rows, groups) and width % groups == 0
    if zeros and bits:
        fits &= reader.dtype(zeros) == dtypes.i32 and reader.shape(zeros) == (_words(rows, bits, stream), groups)
    if not fits or reader.dtype(key) != dtypes.i32 or not float_kinds(reader.dtype(scales)):
        widest = " or ".join(map(str, sorted(widths)))
        raise misfit(reader, *present, expected=f"for a weight [{rows}, {width}] of {widest} bits in whole groups")
    group = width // groups
    if index:
        if reader.shape(index) != (width,) or not reader.dtype(index).is_int:
            raise WeftError(f"{index!r} {list(reader.shape(index))} does not list the groups of {width} inputs")
        of = whole(reader, index)
        if of.min() == -1 == of.max():  # written where there is none
            of = np.arange(width) // group
        if not 0 <= of.min() <= of.max() < groups:
            raise WeftError(f"{index!r} puts an input into group {int(of.max())} or {int(of.min())} of {groups}")
    ordered = index if index and is_act_order(of, group) else ""
    others = (sizes, *((index,) if index else ()))
    kind = reader.dtype(scales)
    return Packed(rows, width, bits, group, kind, bool(zeros), ordered, key, scales, zeros, others, stream)


def _words(count: int, bits: int, stream: bool) -> int:
    """The words that `count` codes take."""
    return -(-count * bits // 32) if stream else -(-count // (32 // bits))


def _bytes(
    reader: TensorReader, key: str, name: str, keys: Collection[str], tiles: Collection[tuple[int, int]]
) -> Quantized:
    scales, zero = beside(key, f"{name}.weight_scale", keys), f"{name}.weight_zero_point"
    shape, scaled, kind = reader.shape(key), reader.shape(scales), reader.dtype(scales)
    zeros, one = zero if zero in keys else "", math.prod(scaled) == 1
    if len(shape) != 2 or not all(shape) or not (len(scaled) == 2 or one) or not float_kinds(kind):
        raise misfit(reader, key, scales, expected="floats for whole rows, groups or tiles of a matrix")
    rows, width = shape
    if zeros and reader.shape(zeros) != scaled:
        raise misfit(reader, key, scales, zeros, expected="a zero point for each scale")
    if reader.dtype(key) == dtypes.f8e4m3:
        tile = _tile(shape, (1, 1) if one else scaled, tiles)
        if tile is None:
            raise misfit(reader, key, scales, expected="floats for whole rows, groups or tiles of a matrix")
        if zeros and np.any(whole(reader, zeros)):
            raise WeftError(f"{zeros!r} is not 0, and floats have no zero points")
        return _Scaled(key, scales, tile, zeros)
    groups = 1 if one else scaled[1]
    if not one and (scaled[0] != rows or width % groups):
        raise misfit(reader, key, scales, expected="floats for whole rows or groups of integers")
    shifted = bool(zeros) and bool(np.any(whole(reader, zeros)))
    return Bytes(rows, width, 8, width // groups, kind, shifted, "", key, scales, zeros, not one)


@dataclass(frozen=True)
class _Scaled(Tiles):
    """Floats with zero points that are 0, in the tensor `zeros` if there is one."""

    zeros: str

    @property
    def parts(self) -> tuple[str, ...]:
        return (*super().parts, *((self.zeros,) if self.zeros else ()))


def _tile(
    shape: tuple[int, ...], counts: tuple[int, ...], tiles: Collection[tuple[int, int]]
) -> tuple[int, int] | None:
    """The edges of the tiles of which a matrix of `shape` has `counts`: one of `tiles`, or those that divide it."""
    whole_ones = tuple(
        size // count if count and size % count == 0 else 0 for size, count in zip(shape, counts, strict=True)
    )
    for tall, wide in (*tiles, whole_ones):
        if tall and wide and (-(-shape[0] // tall), -(-shape[1] // wide)) == counts:
            return tall, wide
    return None
