"""A reader of the tensors of a GGUF file that reads a few rows at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.ir.types.dtypes import DType

from .header import TensorInfo
from .parts import read_parts

DECODE_BLOCKS = 4096  # blocks dequantized at once: temporaries stay in cache


class GGUFTensors:
    """A reader of the tensors and metadata of the GGUF file at `path`, and of the model's other parts, if any.

    Names, values and row order are the file's own: in llama models the rows of q and k are permuted for interleaved
    RoPE. Files are read, not mapped, so that only the requested rows take memory.

    Raises:
        WeftError: in the constructor, if the file is missing, not GGUF, truncated, inconsistent, or has a tensor type
            that weft cannot decode.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        parts = read_parts(self.path)
        first, *_ = parts.values()
        self.version = first.version
        self.metadata: Mapping[str, Any] = first.metadata
        self._tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
        self._files = {name: file for file, part in parts.items() for name in part.tensors}

    def __repr__(self) -> str:
        return f"GGUFTensors({str(self.path)!r}, {len(self._tensors)} tensors)"

    def keys(self) -> Iterable[str]:
        """Return the tensor names, in file order."""
        return self._tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of tensor `key` in numpy order (axis 0 outermost); a matrix is [out, in]."""
        return self._info(key).shape

    def dtype(self, key: str) -> DType:
        """Return the dtype of tensor `key` as stored: a dense dtype, or that of a block layout."""
        return self._info(key).dtype

    def read(self, key: str, start: int, stop: int) -> Array:
        """Return rows `start:stop` of tensor `key`: floats and blocks as float32, integers as stored.

        Raises:
            WeftError: if there is no such tensor or row, or the file has shrunk since it was opened.
        """
        info = self._info(key)
        if not 0 <= start <= stop <= info.shape[0]:
            raise WeftError(f"{self.path}: rows {start}:{stop} exceed the {info.shape[0]} rows of tensor {key}")
        width, block = math.prod(info.shape[1:]), info.dtype.block
        first, last = start * width // block, -(-stop * width // block)  # only a 1-D tensor can be cut inside a block
        values = self._decode(info, first, last)
        return values[start * width - first * block :][: (stop - start) * width].reshape(stop - start, *info.shape[1:])

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        """Return rows `start:stop` of `key` as stored blocks, u8 [rows, …, blocks per row, bytes per block].

        Raises:
            WeftError: if there is no such tensor, or the file has shrunk since it was opened.
        """
        info = self._info(key)
        inner = (*info.shape[1:-1], info.shape[-1] // info.dtype.block, info.dtype.block_bytes)
        row = math.prod(inner)
        return self._load(info, start * row, (stop - start) * row).reshape(stop - start, *inner)

    def _info(self, key: str) -> TensorInfo:
        if key not in self._tensors:
            raise WeftError(f"{self.path} has no tensor {key}")
        return self._tensors[key]

    def _decode(self, info: TensorInfo, first: int, last: int) -> Array:
        """Return the values of blocks `first:last` (elements if the tensor is dense) of a tensor as a flat array."""
        size = info.dtype.bytes_for(info.dtype.block)
        raw = self._load(info, first * size, (last - first) * size)
        if not info.dtype.is_block:
            values = raw.view(info.dtype.numpy)
            return values.astype(np.float32, copy=False) if info.dtype.is_float else values
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(info.ggml_type)
        out = np.empty((last - first) * info.dtype.block, np.float32)
        for at in range(0, last - first, DECODE_BLOCKS):
            part = raw[at * size : (at + DECODE_BLOCKS) * size]
            out[at * info.dtype.block :][: len(part) // size * info.dtype.block] = dequantize(part, kind)
        return out

    def _load(self, info: TensorInfo, start: int, count: int) -> Array:
        try:
            raw = np.fromfile(self._files[info.name], np.uint8, count, offset=info.offset + start)
        except OSError as error:
            raise WeftError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if len(raw) < count:
            raise WeftError(f"{self._files[info.name]} was shortened after opening: tensor {info.name} is incomplete")
        return raw
