"""From a graph to model.onnx: select lowerings, emit, stream the weights to disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as onnx
from onnx_ir import serde

from weft.ir.archive import Archive, Array
from weft.ir.dtypes import DType
from weft.ir.graph import Graph

from ..targets import Target
from . import attention, blocks, cuda, layers, standard  # noqa: F401 - importing them registers their lowerings
from .emitter import ONNX_DTYPES, Emitter, Weight
from .lowering import select

MODEL, DATA = "model.onnx", "model.onnx.data"
INLINE_BYTES = 1024  # smaller weights go into model.onnx itself
PAGE = 4096  # alignment that lets a runtime map large weights directly

Progress = Callable[[int], None]  # called with the number of bytes written since the last call


@dataclass
class Built:
    """An ONNX model whose weights are still recipes."""

    model: onnx.Model
    weights: Sequence[Weight]
    archive: Archive
    trace: list[str] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(_bytes(w) for w in self.weights)


def build(graph: Graph, target: Target, max_length: int) -> Built:
    """Lower `graph`, already legal for `target`, to ONNX; position tables cover `max_length` positions.

    Raises:
        WeftError: naming an op that no lowering takes.
    """
    selection = select(graph, target)
    emitter = Emitter(graph, target, max_length)
    emitter.lower(selection)
    model = emitter.model()
    widened = cuda.widen(model) if target.device == "cuda" else []
    return Built(model, list(emitter.weights.values()), graph.archive, [*selection.trace, *widened])


def in_memory(built: Built) -> bytes:
    """The whole model as one protobuf of at most 2 GiB (tests, small models)."""
    for w in built.weights:
        w.value.const_value = _tensor(w, np.concatenate(list(_cast_blocks(w, built.archive))))
    data: bytes = serde.serialize_model(built.model).SerializeToString()
    return data


def write(built: Built, folder: Path, progress: Progress = lambda _: None) -> None:
    """Write model.onnx and model.onnx.data into `folder`, one block of rows at a time.

    Raises:
        OSError: as the file system reports it; a full disk is noticed before the first byte.
        WeftError: if a weight cannot be read.
    """
    offset = 0
    external: list[tuple[Weight, int]] = []
    for w in built.weights:
        size = _bytes(w)
        if size < INLINE_BYTES:
            w.value.const_value = _tensor(w, np.concatenate(list(_cast_blocks(w, built.archive))))
            progress(size)
            continue
        align = PAGE if size >= 16 * PAGE else 64
        offset = -(-offset // align) * align
        external.append((w, offset))
        w.value.const_value = onnx.ExternalTensor(
            DATA,
            offset,
            size,
            ONNX_DTYPES[w.dtype.name],
            shape=onnx.Shape(w.shape),
            name=str(w.value.name),
            base_dir=folder,
        )
        offset += size
    with (folder / DATA).open("wb") as file:
        _reserve(file.fileno(), folder, offset)
        for w, start in external:
            file.seek(start)
            for block in _cast_blocks(w, built.archive):
                file.write(memoryview(block.reshape(-1).view(np.uint8)))
                progress(block.nbytes)
    (folder / MODEL).write_bytes(serde.serialize_model(built.model).SerializeToString())


def _reserve(file: int, folder: Path, size: int) -> None:
    """Allocate the file at once: a full disk is noticed now, and writing is several times faster."""
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, f"{size / 2**30:.2f} GiB needed")
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)


def _bytes(w: Weight) -> int:
    return w.dtype.bytes_for(int(np.prod(w.shape, dtype=np.int64)))


def _tensor(w: Weight, array: Array) -> onnx.Tensor[Any]:
    return onnx.Tensor(array.reshape(w.shape), dtype=ONNX_DTYPES[w.dtype.name], name=w.value.name)


def _cast_blocks(w: Weight, archive: Archive) -> Any:
    """The rows of a weight in its final dtype, contiguous."""
    for block in w.recipe.blocks(archive):
        yield _as(np.atleast_1d(block), w.dtype)


def _as(block: Array, dtype: DType) -> Array:
    return np.ascontiguousarray(block.astype(dtype.numpy, copy=False))
