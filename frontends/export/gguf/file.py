"""A graph as a GGUF file, which llama.cpp and its relatives load.

Layout: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.safetensors import STORED, Progress, Tensor, count_written, encode_blocks
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import check_finite, stream_rows
from weft.ir.storage import replace_file
from weft.ir.storage.documents import quote_value
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...model import Model
from ...models.families import build_from_table, index_tables
from ..fitting import Candidate, FamilyFit, fit_dtype, fit_family
from ..infer_settings import propose_settings
from ..inversion import ShapedRecipe
from ..stored_codes import choose_codes, describe_layouts, list_first
from .gguf_blocks import BLOCK, FILE_TYPES, Rounding, choose_block_dtype, encode_gguf_blocks, find_refusal
from .keys import INTERNAL, divide_frequencies, list_architectures, list_divisors, list_tensor_names, propose_metadata
from .tokens import build_tokenizer_metadata

if TYPE_CHECKING:
    from gguf import GGUFWriter

KINDS = (*STORED, dtypes.q8_0)
_FILE_TYPES = {dtypes.f32: 0, dtypes.f16: 1, dtypes.bf16: 32, **FILE_TYPES}  # general.file_type
_MAX_F32 = float(np.finfo(np.float32).max)


def write_gguf(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    weights: str = "auto",
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Write `model` as the GGUF file `out`, atomically, and return the name of its architecture.

    Matrices are stored in `dtype` (f32, f16, bf16, or q8_0: 8 bits and a scale for every 32 values, rounded to the
    nearest), by default the exact dtype of `fit_dtype`; vectors in f32. They are evaluated a block at a time. `weights`
    selects whether quantized weights are stored as codes (see `choose_codes`). `note` reports weights that keep their
    codes or are written as floats, rounding errors of scales and minima, and end tokens left out.

    Raises:
        WeftError: if no architecture expresses the graph (it names the nearest), the graph has a task head, `weights`
            has no effect, the tokenizer does not fit, `out` cannot be written, or a value exceeds the range of `dtype`.
    """
    requested = None if dtype is None else dtypes.parse(dtype, map(str, KINDS))
    if requested is not None and requested not in KINDS:
        raise WeftError(f"dtype {requested} is not supported in GGUF files; choose {', '.join(map(str, KINDS))}")
    if "task" in model.graph.meta:
        task = model.graph.meta["task"]
        raise WeftError(f"{model.spec} has a head for {task}, which GGUF cannot store: export it to an hf folder")
    result = fit_family(model, partial(_list_candidates, model), "architecture of llama.cpp")
    reader = model.graph.reader
    codes_to_store = choose_codes(result.tensors, reader, weights, find_refusal, note)
    floats = [tensor for name, tensor in result.tensors.items() if len(tensor.shape) > 1 and name not in codes_to_store]
    kind = requested or fit_dtype(model.graph, floats)
    tensors = {name: _build_tensor(name, tensor, kind, reader) for name, tensor in result.tensors.items()}
    rounding = Rounding()
    for name, codes in codes_to_store.items():
        encode = partial(encode_gguf_blocks, name, codes, reader, rounding)
        tensors[name] = Tensor(codes.shape, choose_block_dtype(codes.layout) or kind, encode)
    facts = _list_metadata(model, [t.dtype for name, t in tensors.items() if name in codes_to_store] or [kind])
    embedding = result.tensors.get("token_embd.weight")
    tokens = {} if embedding is None else build_tokenizer_metadata(model, embedding.shape[0], note)
    with replace_file(Path(out), model.files) as path:
        _write_file(path, result, {**tokens, **facts}, tensors, progress)
        model.check_unchanged()
    if codes_to_store:
        note(f"weights that keep their codes: {describe_layouts(codes_to_store)}")
    if rounding.tensors:
        note(
            f"scales and minima of {list_first(rounding.tensors)} are rounded to f16, which changes weights by at most "
            f"{rounding.error:.2g}, or {rounding.steps:.2g} of the step between two codes"
        )
    return result.family


def _list_candidates(model: Model, graph: Graph) -> Iterator[Candidate]:
    tables, (source_name, names) = index_tables(), list_architectures(graph.meta.get("model_type"))
    for name, settings in propose_settings(model, graph, source_name, names):
        with contextlib.suppress(WeftError):  # an architecture that cannot express these settings
            config, tensors = propose_metadata(tables[name], settings), list_tensor_names(tables[name], settings)
            loaded = build_from_table(tables[name], config, tensors, f"the metadata of a {name} model")
            reference, divisors = divide_frequencies(graph, loaded.graph)
            extra = {**divisors, **list_divisors(settings)}
            yield Candidate(name, config, replace(loaded, graph=reference), extra_tensors=extra)


def _build_tensor(name: str, tensor: ShapedRecipe, kind: DType, reader: TensorReader) -> Tensor:
    """Return the tensor to write, whose blocks are bytes of the file. A vector is f32, as kernels require; any other
    tensor is of dtype `kind`, or f16 instead of q8_0 if its rows are not entire blocks."""
    if len(tensor.shape) == 1:
        kind = dtypes.f32
    elif kind == dtypes.q8_0 and tensor.shape[-1] % BLOCK:
        kind = dtypes.f16
    values = Tensor(tensor.shape, kind, partial(stream_rows, tensor.recipe, reader))
    return values._replace(blocks=partial(_encode_blocks, name, values))


def _list_metadata(model: Model, kinds: list[DType]) -> dict[str, Any]:
    kind = Counter(kinds).most_common(1)[0][0]
    quantized = {"general.quantization_version": 2} if any(kind.is_block for kind in kinds) else {}
    return {"general.name": model.graph.name, "general.file_type": _FILE_TYPES[kind], **quantized}


def _write_file(
    path: Path, result: FamilyFit, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], progress: Progress
) -> None:
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    writer = GGUFWriter(path, result.family)
    try:
        for key, value in metadata.items():
            _add_metadata(writer, key, value)
        for key, value in result.config.items():
            if key not in INTERNAL:
                _add_metadata(writer, f"{result.family}.{key}", value)
        for name, tensor in tensors.items():
            raw = GGMLQuantizationType[tensor.dtype.name.upper()]
            # The writer would take uint8 for a shape in bytes; the stored type is `raw`.
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,), step = writer.fout, count_written(progress, tensors)
        writer.write_padding(file, file.tell())
        for tensor in tensors.values():
            for block in tensor.blocks():
                file.write(block.data)
                step(block.nbytes)
            writer.write_padding(file, tensor.nbytes)
    finally:
        writer.close()


def _encode_blocks(name: str, tensor: Tensor) -> Iterator[Array]:
    if tensor.dtype != dtypes.q8_0:
        yield from encode_blocks(name, tensor)
        return
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    for values in tensor.blocks():
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, tensor.shape[-1])
        with np.errstate(over="ignore", invalid="ignore"):  # check_finite raises below
            blocks = quantize(rows, GGMLQuantizationType.Q8_0)
            largest = np.abs(rows).reshape(-1, BLOCK).max(-1)
        scales = np.ascontiguousarray(blocks.reshape(len(largest), -1)[:, :2]).view(np.float16)[:, 0]
        check_finite(largest, scales, tensor.dtype, name)
        yield blocks.reshape(-1)


def _add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key to `writer` with the type of its value; raise WeftError if a number does not fit in 32 bits."""
    is_list = isinstance(value, (list, tuple))
    low, high = (-(1 << 31), 1 << 31) if is_list else (0, 1 << 32)  # list elements are signed
    for number in value if is_list else (value,):
        too_large = isinstance(number, int) and not low <= number < high
        if too_large or (isinstance(number, float) and math.isfinite(number) and abs(number) > _MAX_F32):
            raise WeftError(f"{key} is {quote_value(number)}, which does not fit the 32-bit values of a GGUF file")
    # bool before int, of which it is a subclass
    kinds: dict[type, Callable[[str, Any], None]] = {str: writer.add_string, bool: writer.add_bool}
    kinds |= {int: writer.add_uint32, float: writer.add_float32}
    next((add for kind, add in kinds.items() if isinstance(value, kind)), writer.add_array)(key, value)
