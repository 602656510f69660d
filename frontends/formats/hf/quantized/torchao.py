"""torchao, as transformers saves its tensors: integers in bytes and floats of 8 bits.

The tensor ``a.b.weight`` is stored in parts, ``a.b._weight_qdata``, ``…_scale`` and ``…_zero_point``; the metadata of
the safetensors file says, in JSON, of which class it is and which of its numbers share a scale (``block_size``). Read
are ``Int8Tensor``, ``IntxUnpackedToInt8Tensor`` (codes of 2 to 8 bits, each in a byte) and ``Float8Tensor``. Other
classes hold codes in the order that a kernel of one GPU reads them in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader
from weft.ir.storage.documents import parse_json
from weft.ir.types import dtypes

from ..safetensors import SafetensorsReader
from .codes import float_kinds
from .compressed_tensors import Bytes
from .floats import Tiles
from .tensor import Quantized, beside, misfit, whole

_SUFFIX = "_qdata"


def torchao(reader: TensorReader, keys: Collection[str], how: Mapping[str, Any]) -> dict[str, Quantized]:
    """The weights of a folder of torchao, by name.

    Raises:
        WeftError: if one is of another class, or tensors are missing or do not fit.
    """
    metadata = reader.metadata if isinstance(reader, SafetensorsReader) else {}
    tensors: dict[str, Quantized] = {}
    for key in keys:
        stem = key.removesuffix(_SUFFIX)
        module, _, own = stem.rpartition(".")
        if stem == key or not own.startswith("_"):
            continue
        name = f"{module}.{own[1:]}" if module else own[1:]
        told = parse_json(metadata.get(name, "{}").encode(), f"the metadata of {name}")
        kind = str(told.get("_type")) if isinstance(told, dict) else "None"
        about = told.get("_data") if isinstance(told, dict) else None
        if kind not in _CLASSES or not isinstance(about, dict):
            found = f"{name} is stored as {kind}" if told else f"the file does not say of which class {name} is"
            raise WeftError(
                f"{found}; weft reads {', '.join(list(_CLASSES)[:-1])} and {list(_CLASSES)[-1]}: quantize with "
                "IntxWeightOnlyConfig or Int8WeightOnlyConfig instead, and save as safetensors"
            )
        scale = beside(key, f"{stem}_scale", keys)
        zero = f"{stem}_zero_point"
        tensors[name] = _CLASSES[kind](reader, key, scale, zero if zero in keys else "", about)
    return tensors


def _integers(reader: TensorReader, key: str, scale: str, zero: str, about: Mapping[str, Any]) -> Quantized:
    bits, (rows, width), (tall, group) = _bits(about), _matrix(reader, key), _block(about)
    present = (key, scale, *((zero,) if zero else ()))
    one = (tall, group) == (rows, width)
    wanted = (1, 1) if one else (rows, width // max(1, group))
    fits = bits and group and width % group == 0 and (one or tall == 1) and reader.dtype(key) == dtypes.i8
    fits = fits and all(reader.shape(k) == wanted for k in present[1:]) and float_kinds(reader.dtype(scale))
    if not fits or (zero and reader.dtype(zero) != dtypes.i8):
        raise misfit(reader, *present, expected=f"each for {tall} · {group} codes of a matrix")
    # Symmetric ones have zero points, too.
    shifted = bool(zero) and bool(np.any(whole(reader, zero)))
    return Bytes(rows, width, bits, group, reader.dtype(scale), shifted, "", key, scale, zero, not one)


def _bits(about: Mapping[str, Any]) -> int:
    """The bits of a code; 0 if they are not told."""
    target = about.get("target_dtype", {"_data": "int8"})
    name = str(target.get("_data")) if isinstance(target, dict) else ""
    count = name.removeprefix("int")
    return int(count) if name != count and count in map(str, range(2, 9)) else 0


def _floats(reader: TensorReader, key: str, scale: str, zero: str, about: Mapping[str, Any]) -> Quantized:
    (rows, width), (tall, wide) = _matrix(reader, key), _block(about)
    fits = tall and reader.dtype(key) == dtypes.f8e4m3 and reader.dtype(scale) == dtypes.f32 and not zero
    if not fits or reader.shape(scale) != (-(-rows // tall), -(-width // wide)):
        raise misfit(reader, key, scale, expected=f"a float for each {tall} · {wide} of a matrix")
    return Tiles(key, scale, (tall, wide))


_Made = Callable[[TensorReader, str, str, str, Mapping[str, Any]], Quantized]
_CLASSES: Mapping[str, _Made] = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Float8Tensor": _floats,
}


def _matrix(reader: TensorReader, key: str) -> tuple[int, int]:
    shape = reader.shape(key)
    if len(shape) != 2 or not all(shape):
        raise WeftError(f"{key!r} {list(shape)} is no matrix")
    return shape[0], shape[1]


def _block(about: Mapping[str, Any]) -> tuple[int, int]:
    """The edges of the blocks that share a scale; 0 if they are not told."""
    block = about.get("block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return 0, 0
