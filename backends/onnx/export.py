"""From graphs to ONNX files: select lowerings, emit, stream the weights to disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as onnx
from onnx_ir import serde

from weft.ir.graph import Graph
from weft.ir.recipes import Recipe
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import stream
from weft.ir.types.block_layouts import pack_pairs
from weft.ir.types.dtypes import DType

from ..targets import Backend
from ..weights import StoredTensor
from . import cuda
from .emitter import ONNX_DTYPES, Emitter, Weight
from .lowering import select

MODEL, ENCODER, DATA = "model.onnx", "encoder.onnx", "model.onnx.data"
INLINE_BYTES = 1024  # smaller weights go into the model's own file
PAGE = 4096  # alignment that lets a runtime map large weights directly

Progress = Callable[[int], None]  # called with the number of bytes written since the last call


@dataclass
class Built:
    """An ONNX model whose weights are still recipes."""

    model: onnx.Model
    weights: Sequence[Weight]
    reader: TensorReader
    trace: list[str] = field(default_factory=list)


def build(graph: Graph, target: Backend, max_length: int) -> Built:
    """Lower `graph`, already legal for `target`, to ONNX; position tables cover `max_length` positions.

    Raises:
        WeftError: naming an op that no lowering takes.
    """
    selection = select(graph, target)
    emitter = Emitter(graph, target, max_length)
    emitter.lower({node: lowering.emit for node, lowering in selection.chosen.items()})
    model = emitter.model()
    widened = cuda.widen(model) if target.device == "cuda" else []
    return Built(model, list(emitter.weights.values()), graph.reader, [*selection.trace, *widened])


def in_memory(built: Built) -> bytes:
    """The whole model as one protobuf of at most 2 GiB (tests, small models)."""
    for w in built.weights:
        w.value.const_value = _tensor(w, np.concatenate(list(_cast_blocks(w, built.reader))))
    data: bytes = serde.serialize_model(built.model).SerializeToString()
    return data


def weight_bytes(models: Iterable[Built]) -> int:
    """Bytes of all weights, those that models share counted once."""
    return sum(_bytes(same[0]) for same in _distinct(models))


def stored_tensors(models: Iterable[Built]) -> dict[str, StoredTensor]:
    """All weights by the name of their initializer, those that models share once."""
    firsts = (same[0] for same in _distinct(models))
    return {str(w.value.name): StoredTensor(w.recipe, w.dtype, w.shape) for w in firsts}


def write(models: Mapping[str, Built], folder: Path, progress: Progress = lambda _: None) -> None:
    """Write `models` of one checkpoint into `folder`, by file name, one block of rows of their weights at a time.

    All weights go into model.onnx.data, one that several models read once.

    Raises:
        OSError: as the file system reports it; a full disk is noticed before the first byte.
        WeftError: if a weight cannot be read.
    """
    reader = next(iter(models.values())).reader
    offset = 0
    external: list[tuple[Weight, int]] = []
    for same in _distinct(models.values()):
        size = _bytes(same[0])
        if size < INLINE_BYTES:
            array = np.concatenate(list(_cast_blocks(same[0], reader)))
            for w in same:
                w.value.const_value = _tensor(w, array)
            progress(size)
            continue
        # Padding to a page then costs at most a sixteenth of the weight; smaller weights begin on a cache line.
        align = PAGE if size >= 16 * PAGE else 64
        offset = -(-offset // align) * align
        external.append((same[0], offset))
        for w in same:
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
            for block in _stored_blocks(w, reader):
                file.write(memoryview(block.reshape(-1).view(np.uint8)))
                progress(block.nbytes)
    for name, built in models.items():
        (folder / name).write_bytes(serde.serialize_model(built.model).SerializeToString())


def _distinct(models: Iterable[Built]) -> Iterable[list[Weight]]:
    """The weights of `models`, those of equal bytes together."""
    groups: dict[tuple[Recipe, DType], list[Weight]] = {}
    for built in models:
        for w in built.weights:
            # Equal recipes of one checkpoint give equal bytes, as those of an embedding that encoder and decoder share.
            groups.setdefault((w.recipe, w.dtype), []).append(w)
    return groups.values()


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


def _stored_blocks(w: Weight, reader: TensorReader) -> Iterator[Any]:
    """The bytes of a weight in order, as ONNX stores them: numbers of 4 bits in pairs, whatever rows they are of."""
    blocks: Iterator[Array] = _cast_blocks(w, reader)
    if w.dtype.bits != 4:
        yield from blocks
        return
    left: Array = np.empty(0, np.uint8)
    for block in blocks:
        numbers = np.concatenate([left, block.reshape(-1).view(np.uint8) & 15])
        whole = numbers.size // 2 * 2
        yield pack_pairs(numbers[:whole])
        left = numbers[whole:]
    if left.size:
        yield pack_pairs(left)


def _cast_blocks(w: Weight, reader: TensorReader) -> Any:
    """The rows of a weight in its final dtype, contiguous."""
    for block in stream(w.recipe, reader):
        # Contiguous, because `write` writes the memory of a block as it lies.
        yield np.ascontiguousarray(np.atleast_1d(block).astype(w.dtype.numpy, copy=False))
