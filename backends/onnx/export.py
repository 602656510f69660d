"""Export of graphs to ONNX files: select lowerings, emit nodes, stream the weights to disk.

Nodes that lack a bf16 kernel in ONNX Runtime's CUDA provider compute in f32. Other nodes without a CUDA kernel run on
the CPU. ONNX Runtime reports them when it opens a model: it lists the placement of the nodes, and refuses to capture a
CUDA graph (`weft.backends.runtime.ort.session`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as onnx
from onnx_ir import serde
from onnx_ir.passes.common.shape_inference import infer_shapes

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe
from weft.ir.recipes.readers import Array, TensorReader, find_switched_tensors
from weft.ir.recipes.streams import cast_finite, find_stored_part, stream_parts, stream_rows
from weft.ir.types.block_layouts import pack_pairs
from weft.ir.types.dtypes import DType
from weft.passes.analysis.states import NamedState

from ..runtime.ort.session import import_onnxruntime
from ..target import Backend
from ..weights import StoredTensor
from .lowering import select_lowerings
from .lowerings import padding
from .onnx_emitter import ONNX_DTYPES, OnnxEmitter, StreamedInitializer

MODEL, ENCODER, DATA = "model.onnx", "encoder.onnx", "model.onnx.data"
ADAPTER = ".onnx_adapter"
INLINE_BYTES = 1024  # smaller weights are stored in the model's own file
PAGE = 4096  # alignment that lets a runtime map large weights directly

Progress = Callable[[int], None]  # called with the number of bytes written since the last call


@dataclass
class BuiltModel:
    """An ONNX model whose `weights` are still recipes, to be evaluated with `reader`; `trace` has a line for each
    lowering that refused a node and each node that computes in f32."""

    model: onnx.Model
    weights: Sequence[StreamedInitializer]
    reader: TensorReader
    trace: list[str] = field(default_factory=list)


def build_model(
    graph: Graph,
    target: Backend,
    max_length: int,
    states: Sequence[NamedState] | None = None,
    omitted: Collection[str] = (),
) -> BuiltModel:
    """Return `graph`, already legalized for `target`, lowered to ONNX; see `OnnxEmitter` for the other arguments.
    Raises WeftError if no lowering accepts a node (its op is named), or the target's opset lacks an operator."""
    selection = select_lowerings(graph, target)
    emitter = OnnxEmitter(graph, target, max_length, states, omitted)
    padding.lower_with_padding(emitter, {node: lowering.emit for node, lowering in selection.chosen.items()})
    model = emitter.build_model()
    widened = widen_bf16(model) if target.device == "cuda" else []
    return BuiltModel(model, list(emitter.weights.values()), graph.reader, [*selection.trace, *widened])


def serialize_model(built: BuiltModel) -> bytes:
    """Load the weights into `built`; return it as one serialized protobuf, limited to 2 GiB: for small models only."""
    for w in built.weights:
        w.value.const_value = _make_tensor(w, _read_weight(w, built.reader))
    data: bytes = serde.serialize_model(built.model).SerializeToString()
    return data


def count_weight_bytes(models: Iterable[BuiltModel]) -> int:
    """Return the number of bytes of all weights; weights with equal bytes count once."""
    return sum(weight.nbytes for weight in list_stored_tensors(models).values())


def list_stored_tensors(models: Iterable[BuiltModel]) -> Mapping[str, StoredTensor]:
    """Return a dict from the name of an initializer to its weight; of weights with equal bytes only the first."""
    return {str(weight.value.name): weight for weight, *_ in _group_equal_weights(models)}


def write_models(
    models: Mapping[str, BuiltModel],
    folder: Path,
    progress: Progress = lambda _: None,
    data: str = DATA,
    most: int | None = None,
) -> list[str]:
    """Write `models` (dict from file name to model; all read one checkpoint) into `folder`, and stream their weights
    block by block; call `progress` with the number of bytes of each write. Weights below 1 KiB are stored in the model
    files, all others in the file `data`, and from `most` bytes on in further files `data`_1, `data`_2 …; return the
    names of these files. Equal weights are stored once. Raises WeftError if a weight has more than `most` bytes, or
    cannot be read or stored in its dtype, and OSError as the file system reports it: a full disk before the first byte
    is written."""
    reader = next(iter(models.values())).reader
    offset, ends = 0, [0]
    external: list[_Region] = []
    for equal_weights in _group_equal_weights(models.values()):
        size = equal_weights[0].nbytes
        if size < INLINE_BYTES:
            array = _read_weight(equal_weights[0], reader)
            for w in equal_weights:
                w.value.const_value = _make_tensor(w, array)
            progress(size)
            continue
        # Padding of large weights to a page costs at most 1/16 of their size; smaller weights begin on a cache line.
        align = PAGE if size >= 16 * PAGE else 64
        offset = -(-offset // align) * align
        if most is not None and offset + size > most:
            if size > most:
                raise WeftError(f"{equal_weights[0].value.name} takes {size:,} bytes, of {most:,} that a file may have")
            offset = 0
            ends.append(0)
        file = folder / _name_data(data, len(ends) - 1)
        external.append(_Region(equal_weights[0], offset, len(ends) - 1))
        for w in equal_weights:
            dtype, shape = ONNX_DTYPES[w.dtype.name], onnx.Shape(w.shape)
            w.value.const_value = onnx.ExternalTensor(
                file.name, offset, size, dtype, shape=shape, name=str(w.value.name), base_dir=file.parent
            )
        offset += size
        ends[-1] = offset
    names = [_name_data(data, index) for index in range(len(ends))]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in names]
        _reserve_space(folder, dict(zip(files, ends, strict=True)))
        for regions in _group_regions(external):
            for blocks in _stream_blocks(regions, reader):
                for region, block in zip(regions, blocks, strict=True):
                    progress(region.write(files[region.file], block))
            for region in regions:
                if region.unpaired.size:
                    progress(region.finish(files[region.file]))
    for name, built in models.items():
        (folder / name).write_bytes(serde.serialize_model(built.model).SerializeToString())
    return names


def write_adapters(built: BuiltModel, folder: Path) -> None:
    """Write a file {adapter}.onnx_adapter into `folder` for each adapter that can be selected at run time: the values
    of the model's adapter inputs with it. Do nothing if the model has no such adapters. Raises WeftError if ONNX
    Runtime is missing, or a pass quantized adapter weights to less than 16 bits."""
    if (tensors := find_switched_tensors(built.reader)) is None:
        return
    ort = import_onnxruntime()  # it has the writer of this format
    slots = [w for w in built.weights if tensors.reads_slots(w.recipe.sources())]
    if low_precision := next((w for w in slots if not w.dtype.is_float or w.dtype.bits < 16), None):
        remedy = "merge the adapter with --adapter, or do not quantize it"
        raise WeftError(f"adapter weight {low_precision.value.name} must have 16 bits or more: {remedy}")
    for name in tensors.choices:
        with tensors.select(name):
            arrays = {str(w.value.name): _read_weight(w, built.reader) for w in slots}
        file = ort.AdapterFormat()
        file.set_adapter_version(1)
        file.set_model_version(1)
        file.set_parameters({key: ort.OrtValue.ortvalue_from_numpy(array) for key, array in arrays.items()})
        file.export_adapter(str(folder / f"{name}{ADAPTER}"))


def _group_equal_weights(models: Iterable[BuiltModel]) -> Iterable[list[StreamedInitializer]]:
    groups: dict[tuple[Recipe, DType], list[StreamedInitializer]] = {}
    for built in models:
        for w in built.weights:
            # Equal recipes of one checkpoint give equal bytes: for example, an embedding shared by encoder and decoder.
            groups.setdefault((w.recipe, w.dtype), []).append(w)
    return groups.values()


def _name_data(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def _reserve_space(folder: Path, sizes: Mapping[BinaryIO, int]) -> None:
    """Allocate bytes for open files in `folder`, as many as `sizes` has for each: writing becomes several times faster.
    Raises OSError if the disk lacks the space, before anything is written."""
    if shutil.disk_usage(folder).free < (total := sum(sizes.values())):
        raise OSError(errno.ENOSPC, f"{total / 2**30:.2f} GiB needed")
    for file, size in sizes.items():
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _make_tensor(w: StreamedInitializer, array: Array) -> onnx.Tensor[Any]:
    return onnx.Tensor(array.reshape(w.shape), dtype=ONNX_DTYPES[w.dtype.name], name=w.value.name)


@dataclass
class _Region:
    """The region of a weight in the data file with index `file`; its next elements are written at byte `offset`. Two
    4-bit elements share a byte, even if the first ends a row."""

    weight: StreamedInitializer
    offset: int
    file: int = 0
    unpaired: Array = field(default_factory=lambda: np.empty(0, np.uint8))  # a 4-bit element that has no pair yet

    def write(self, file: BinaryIO, elements: Array) -> int:
        """Write `elements`, the next ones of the weight, to `file`; return the number of bytes written."""
        elements = _cast_block(self.weight, elements)
        if self.weight.dtype.bits == 4:
            elements = np.concatenate([self.unpaired, elements.reshape(-1).view(np.uint8) & 15])
            elements, self.unpaired = np.split(elements, [elements.size // 2 * 2])
            elements = pack_pairs(elements)
        return self._put(file, elements)

    def finish(self, file: BinaryIO) -> int:
        """Write the last 4-bit element, which has no pair; return the number of bytes written."""
        return self._put(file, pack_pairs(self.unpaired))

    def _put(self, file: BinaryIO, array: Array) -> int:
        file.seek(self.offset)
        file.write(array.reshape(-1).view(np.uint8).data)
        self.offset += array.nbytes
        return array.nbytes


def _group_regions(regions: Iterable[_Region]) -> Iterable[list[_Region]]:
    """Return `regions` in groups that one pass can write: with one recipe, or parts of one quantized weight."""
    bundles: dict[object, list[_Region]] = {}
    for region in regions:
        part = find_stored_part(region.weight.recipe)
        bundles.setdefault(region.weight.recipe if part is None else ("blocks", part.item), []).append(region)
    return bundles.values()


def _stream_blocks(regions: Sequence[_Region], reader: TensorReader) -> Iterator[tuple[Array, ...]]:
    """Yield the elements of `regions`, a group of `_group_regions`, block by block: a tuple of one array per region."""
    recipes = [region.weight.recipe for region in regions]
    if parts := list(filter(None, map(find_stored_part, recipes))):
        return stream_parts(parts, reader)
    # One recipe, stored in several dtypes.
    return ((block,) * len(recipes) for block in stream_rows(recipes[0], reader))


def _read_weight(w: StreamedInitializer, reader: TensorReader) -> Array:
    return np.concatenate([_cast_block(w, block) for block in stream_rows(w.recipe, reader)])


def _cast_block(w: StreamedInitializer, block: Array) -> Array:
    block = np.atleast_1d(block)
    if w.recipe.is_constant and np.isinf(block).any():  # −∞ of a mask is intended
        return np.ascontiguousarray(block.astype(w.dtype.numpy))
    return cast_finite(block, w.dtype, next(iter(w.recipe.sources()), str(w.value.name)))


# Operators with CUDA kernels for f32 and none for bf16 (`get_all_opkernel_def` of onnxruntime-gpu 1.31.1).
NO_BF16 = {
    *("Ceil", "Clip", "CumSum", "DequantizeLinear", "Einsum", "Elu", "Equal", "Floor", "Greater", "GreaterOrEqual"),
    *("LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "OneHot", "Pad", "Range", "Reciprocal", "ReduceL2"),
    *("ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "Round", "Selu"),
}
_BF16, _F32 = onnx.DataType.BFLOAT16, onnx.DataType.FLOAT
_SUBGRAPHS = (onnx.AttributeType.GRAPH, onnx.AttributeType.GRAPHS)


def widen_bf16(model: onnx.Model) -> list[str]:
    """Insert casts into `model` in place, so that bf16 nodes without a CUDA kernel for bf16 compute in f32; return a
    message for each of them. ONNX Runtime cannot open a model with such a node."""
    # On a copy, because inference adds shapes, which would be written into the file.
    inferred = infer_shapes(model.clone(), check_type=False, strict_mode=False, data_prop=False)
    bf16 = {v.name for n in inferred.graph for v in (*n.inputs, *n.outputs) if v is not None and v.dtype == _BF16}
    lines = []
    # A list, because the loop inserts casts into the graph.
    for node in [node for node in model.graph if node.domain == "" and node.op_type in NO_BF16]:
        inputs, outputs = (
            [i for i, value in enumerate(values) if value is not None and value.name in bf16]
            for values in (node.inputs, node.outputs)
        )
        if inputs:
            _compute_in_f32(model.graph, node, inputs, outputs)
            lines.append(f"{node.name}: {node.op_type} has no bf16 kernel: in f32")
    return lines


def list_uncapturable(model: onnx.Model) -> list[str]:
    """Return a message for each node of `model` with control flow: one such node prevents CUDA graph capture."""
    control = (node for node in model.graph if any(a.type in _SUBGRAPHS for a in node.attributes.values()))
    return [f"{node.op_type} {node.name}: control flow runs on the CPU" for node in control]


def _compute_in_f32(graph: onnx.Graph, node: onnx.Node, inputs: list[int], outputs: list[int]) -> None:
    """Insert casts around `node`, so that its inputs and outputs with these indices, which are bf16, become f32."""
    for i in inputs:
        cast = _new_cast(f"{node.name}.in{i}", node.inputs[i], _F32)
        node.replace_input_with(i, cast.outputs[0])
        graph.insert_before(node, cast)
    for i in outputs:
        value = node.outputs[i]
        cast = _new_cast(f"{node.name}.out{i}", value, _BF16)
        result = cast.outputs[0]
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        # The call above also replaced the cast's input by its own result.
        cast.replace_input_with(0, value)
        # The name identifies a graph output, so it moves to the result of the cast.
        result.name, value.name = value.name, result.name
        value.type = onnx.TensorType(_F32)
        graph.insert_after(node, cast)


def _new_cast(name: str, value: onnx.Value | None, dtype: onnx.DataType) -> onnx.Node:
    assert value is not None
    out = onnx.Value(name=f"{name}.cast", shape=value.shape, type=onnx.TensorType(dtype))
    return onnx.Node("", "Cast", [value], {"to": onnx.AttrInt64("to", int(dtype))}, outputs=[out], name=name)
