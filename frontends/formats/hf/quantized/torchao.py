"""torchao, as transformers saves its tensors: integers in bytes and 8-bit floats.

The tensor ``a.b.weight`` is stored in parts, ``a.b._weight_qdata``, ``…_scale`` and ``…_zero_point``. The metadata of
the safetensors file has, as JSON, its class and the shape of the blocks that share a scale (``block_size``). Supported
are ``Int8Tensor``, ``IntxUnpackedToInt8Tensor`` (codes of 2 to 8 bits, each in a byte) and ``Float8Tensor``. Other
classes order their codes for a kernel of one GPU.
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
from .codes import is_scale_dtype
from .compressed_tensors import Bytes
from .floats import Tiles
from .tensor import QuantizedTensor, misfit_error, read_all, require_key

_SUFFIX = "_qdata"


def read_torchao(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of a torchao folder, keyed by name; `scheme` is unused.

    Raises:
        WeftError: if one is of an unsupported class, or tensors are missing or do not fit.
    """
    metadata = reader.metadata if isinstance(reader, SafetensorsReader) else {}
    tensors: dict[str, QuantizedTensor] = {}
    for key in keys:
        stem = key.removesuffix(_SUFFIX)
        module, _, attribute = stem.rpartition(".")
        if stem == key or not attribute.startswith("_"):
            continue
        name = f"{module}.{attribute[1:]}" if module else attribute[1:]
        entry = parse_json(metadata.get(name, "{}").encode(), f"the metadata of {name}")
        kind = str(entry.get("_type")) if isinstance(entry, dict) else "None"
        data = entry.get("_data") if isinstance(entry, dict) else None
        if kind not in _CLASSES or not isinstance(data, dict):
            fault = f"{name} is stored as {kind}" if entry else f"{name} is stored without the name of its class"
            raise WeftError(
                f"{fault}; weft reads {', '.join(list(_CLASSES)[:-1])} and {list(_CLASSES)[-1]}: quantize with "
                "IntxWeightOnlyConfig or Int8WeightOnlyConfig instead, and save as safetensors"
            )
        scale = require_key(key, f"{stem}_scale", keys)
        zero = f"{stem}_zero_point"
        tensors[name] = _CLASSES[kind](reader, key, scale, zero if zero in keys else "", data)
    return tensors


def _read_integers(reader: TensorReader, key: str, scale: str, zero: str, data: Mapping[str, Any]) -> QuantizedTensor:
    bits, (rows, width), (height, group) = _read_bits(data), _read_shape(reader, key), _read_block(data)
    present = (key, scale, *((zero,) if zero else ()))
    is_single = (height, group) == (rows, width)
    scale_shape = (1, 1) if is_single else (rows, width // max(1, group))
    fits = bits and group and width % group == 0 and (is_single or height == 1) and reader.dtype(key) == dtypes.i8
    fits = fits and all(reader.shape(k) == scale_shape for k in present[1:]) and is_scale_dtype(reader.dtype(scale))
    if not fits or (zero and reader.dtype(zero) != dtypes.i8):
        blocks = f"blocks of block_size={data.get('block_size')}"
        raise misfit_error(
            reader, *present, expected=f"qdata must be i8, with a scale per block, in rows of whole {blocks}"
        )
    # Symmetric tensors also have zero points.
    shifted = bool(zero) and bool(np.any(read_all(reader, zero)))
    parts = {"codes": key, "scales": scale, "zeros": zero}
    return Bytes(parts, rows, width, bits, group, reader.dtype(scale), shifted, "", not is_single)


def _read_bits(data: Mapping[str, Any]) -> int:
    """Return the number of bits in target_dtype of the metadata `data`: 8 without it, 0 if it is not int2 to int8."""
    target = data.get("target_dtype", {"_data": "int8"})
    name = str(target.get("_data")) if isinstance(target, dict) else ""
    count = name.removeprefix("int")
    return int(count) if name != count and count in map(str, range(2, 9)) else 0


def _read_floats(reader: TensorReader, key: str, scale: str, zero: str, data: Mapping[str, Any]) -> QuantizedTensor:
    (rows, n_columns), (height, width) = _read_shape(reader, key), _read_block(data)
    fits = height and reader.dtype(key) == dtypes.f8e4m3 and reader.dtype(scale) == dtypes.f32 and not zero
    if not fits or reader.shape(scale) != (-(-rows // height), -(-n_columns // width)):
        blocks = f"blocks of block_size={data.get('block_size')}"
        raise misfit_error(reader, key, scale, expected=f"qdata must be f8e4m3, and scale f32, one for all {blocks}")
    return Tiles({"codes": key, "scales": scale}, (height, width))


_Builder = Callable[[TensorReader, str, str, str, Mapping[str, Any]], QuantizedTensor]
_CLASSES: Mapping[str, _Builder] = {
    "Int8Tensor": _read_integers,
    "IntxUnpackedToInt8Tensor": _read_integers,
    "Float8Tensor": _read_floats,
}


def _read_shape(reader: TensorReader, key: str) -> tuple[int, int]:
    shape = reader.shape(key)
    if len(shape) != 2 or not all(shape):
        raise WeftError(f"tensor {key!r} must be a matrix, but has shape {list(shape)}")
    return shape[0], shape[1]


def _read_block(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of the blocks that share a scale, or (0, 0) if the metadata `data` does not state it."""
    block = data.get("block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return 0, 0
