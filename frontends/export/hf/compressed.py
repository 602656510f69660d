"""Codes in the formats of compressed-tensors: its tensors, and its quantization_config in config.json.

Integers are written as ``pack-quantized``, 8-bit floats in tiles of 128 · 128 as ``float-quantized``, 4-bit floats as
``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from weft.backends.safetensors import Tensor
from weft.ir.recipes.blocks.floats import TALL
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import stream_rows
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, pack_codes
from weft.ir.types.dtypes import DType

from ..stored_codes import StoredCodes

PACK, FLOAT, SMALL = "pack-quantized", "float-quantized", "{}-pack-quantized"
MULTIPLIED = ("linear", "experts")  # matrices of layers of the class Linear


def find_refusal(reader: TensorReader, key: str, codes: StoredCodes) -> str:
    """Return the reason why compressed-tensors cannot store the `codes` of tensor `key`, or ""."""
    layout, width = codes.layout, codes.shape[-1]
    if not key.endswith(".weight") or len(codes.shape) != 2:
        return "compressed-tensors packs matrices of linear layers only"
    if layout.small_floats:
        if width % layout.group:
            return f"{layout} has groups of {layout.group}, which does not divide its rows of {width} values"
        has_many_scales = layout.tensor_scale and len(_read_tensor_scales(codes, reader)) > 1
        return f"{layout} stores one scale per tensor, but its rows differ in it" if has_many_scales else ""
    if layout.floats:
        return "" if _is_tiled(codes, reader) else f"{layout} cannot store different scales in a tile of {TALL} rows"
    if layout.has_minimum:
        return f"{layout} has minima, which compressed-tensors does not store"
    if width % layout.group or width * layout.bits % 32:
        return (
            f"rows of {width} codes of {layout.bits} bits do not fill whole groups of {layout.group} and 32-bit words"
        )
    return ""


def _is_tiled(codes: StoredCodes, reader: TensorReader) -> bool:
    scales = codes.part("steps").read(reader, 0, codes.shape[0])
    return bool((scales == scales[np.arange(len(scales)) // TALL * TALL]).all())


def pack_weight(key: str, codes: StoredCodes, dtype: DType, reader: TensorReader) -> dict[str, Tensor]:
    """Return the tensors that replace the weight `key` in a folder with weights of `dtype`, keyed by name."""
    # Loaders multiply in the dtype of the scales: with f32 scales, the values are exact.
    scale = dtype if dtype == dtypes.f32 else codes.layout.scale
    name, layout = key.removesuffix("weight"), codes.layout
    (rows, width), groups = codes.shape, codes.groups
    if layout.small_floats:
        return {f"{name}{part}": tensor for part, tensor in _pack_small_floats(codes, reader).items()}
    if layout.floats:
        return {
            key: Tensor((rows, width), dtypes.f8e4m3, partial(_read_float8, codes, reader)),
            f"{key}_scale": Tensor(
                (-(-rows // TALL), groups), layout.scale, lambda: [codes.part("steps").read(reader, 0, rows)[::TALL]]
            ),
        }
    tensors = {
        "packed": Tensor((rows, width * layout.bits // 32), dtypes.i32, partial(_read_words, codes, reader)),
        "scale": Tensor((rows, groups), scale, partial(stream_rows, codes.part("steps"), reader)),
        "shape": Tensor((2,), dtypes.i64, lambda: [np.array([rows, width], np.int64)]),
    }
    if layout.has_zeros:
        words = -(-rows * layout.bits // 32)
        tensors["zero_point"] = Tensor((words, groups), dtypes.i32, partial(_pack_zero_points, codes, reader))
    return {f"{name}weight_{part}": tensor for part, tensor in tensors.items()}


def _pack_small_floats(codes: StoredCodes, reader: TensorReader) -> dict[str, Tensor]:
    """Return suffix of the name → tensor: codes (two per byte), scales, and 1 / the tensor scale, if there is one."""
    (rows, width), layout = codes.shape, codes.layout
    scale = dtypes.f8e4m3 if layout.tensor_scale else dtypes.u8
    tensors = {
        "weight_packed": Tensor((rows, width // 2), dtypes.u8, partial(stream_rows, codes.part("packed"), reader)),
        "weight_scale": Tensor(
            (rows, codes.groups),
            scale,
            lambda: (levels.view(scale.numpy) for levels in stream_rows(codes.part("levels"), reader)),
        ),
    }
    if layout.tensor_scale:
        tensors["weight_global_scale"] = Tensor((1,), dtypes.f32, lambda: [1 / _read_tensor_scales(codes, reader)])
    return tensors


def _read_tensor_scales(codes: StoredCodes, reader: TensorReader) -> Array:
    return np.unique(codes.part("tensor_scale").read(reader, 0, codes.shape[0]))


def _read_words(codes: StoredCodes, reader: TensorReader) -> Iterator[Array]:
    # The bytes of codes, lowest bits first, are the words of a little-endian file.
    for rows in stream_rows(codes.part("packed"), reader):
        yield np.ascontiguousarray(rows).view("<i4").astype(np.int32, copy=False)


def _read_float8(codes: StoredCodes, reader: TensorReader) -> Iterator[Array]:
    width = codes.shape[1]
    for rows in stream_rows(codes.part("packed"), reader):
        values = rows.reshape(-1, codes.groups * codes.layout.group)[:, :width]
        yield np.ascontiguousarray(values).view(dtypes.f8e4m3.numpy)


def _pack_zero_points(codes: StoredCodes, reader: TensorReader) -> list[Array]:
    """Return the zero points, packed along the outputs, as a list of one array."""
    bits = codes.layout.bits
    zeros = np.concatenate([blocks.zeros for blocks in codes.blocks(reader) if blocks.zeros is not None])
    packed = pack_codes(np.ascontiguousarray(zeros.T), bits)
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return [np.ascontiguousarray(packed).view("<i4").astype(np.int32, copy=False).T]


def build_config(kept: Mapping[str, StoredCodes], modules: Collection[str]) -> dict[str, Any]:
    """Return the quantization_config for the codes `kept`; `modules` are all modules with a matrix, except tables."""
    counts = Counter(codes.layout for codes in kept.values())
    names = {
        layout: [key.removesuffix(".weight") for key, codes in kept.items() if codes.layout == layout]
        for layout in counts
    }
    quantized = {name for group in names.values() for name in group}
    # transformers calls every head so, including tied heads and those with another name in the checkpoint.
    ignored = dict.fromkeys([*(name for name in modules if name not in quantized), "lm_head"])
    formats = set(map(_choose_format, counts))
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                # A single group applies to all layers of a class; each of several groups lists its layers.
                "targets": ["Linear"] if len(counts) == 1 else names[layout],
                "weights": _describe_scheme(layout),
                "input_activations": None,
                "output_activations": None,
                "format": _choose_format(layout),
            }
            for i, (layout, _) in enumerate(counts.most_common())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _choose_format(layout: BlockLayout) -> str:
    if layout.small_floats:
        return SMALL.format(layout)
    return FLOAT if layout.floats else PACK


def _describe_scheme(layout: BlockLayout) -> dict[str, Any]:
    strategy = "tensor_group" if layout.tensor_scale else "group"
    size: dict[str, Any] = {"group_size": layout.group}
    if layout.floats and not layout.small_floats:
        strategy, size = "block", {"block_structure": [TALL, layout.group]}
    scale = "torch.float8_e4m3fn" if layout.tensor_scale else "torch.uint8"
    return {
        "num_bits": layout.bits,
        "type": "float" if layout.floats else "int",
        "symmetric": not layout.has_zeros,
        "strategy": strategy,
        **size,
        "dynamic": False,
        "actorder": None,
        **({"scale_dtype": scale, "zp_dtype": scale} if layout.small_floats else {}),
    }
