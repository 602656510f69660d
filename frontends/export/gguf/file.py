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

from weft.backends.safetensors import STORED, Progress, Tensor, counted, stored_blocks
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import check_finite, stream
from weft.ir.storage import whole_file
from weft.ir.storage.documents import shown
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...model import Model
from ...models.families import architectures, describe
from ..codes import choose, counted_layouts, shortened
from ..fitting import Candidate, Fit, exact_dtype, fit
from ..infer_settings import proposals
from ..inversion import Made
from .codes import BLOCK, FILE_TYPES, Rounding, blocks_of, kind_of, refusal
from .keys import INTERNAL, divide_frequencies, exported, factors, propose, tensors_there
from .tokens import tokenizer_metadata

if TYPE_CHECKING:
    from gguf import GGUFWriter

KINDS = (*STORED, dtypes.q8_0)
_FILE_TYPES = {dtypes.f32: 0, dtypes.f16: 1, dtypes.bf16: 32, **FILE_TYPES}  # general.file_type
_MOST = float(np.finfo(np.float32).max)


def write_gguf(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    weights: str = "auto",
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Write `model` as the GGUF file `out`, which appears whole; returns its architecture.

    Matrices are stored in `dtype` (f32, f16, bf16, or q8_0: 8 bits and a scale for every 32 numbers, rounded to the
    nearest), or in the one that holds all of them exactly; vectors in f32. They are evaluated a block at a time.
    Quantized weights keep their codes as `weights` says (`weft.frontends.export.codes.choose`); `note` is told of those
    that do not, and of how far minima are rounded.

    Raises:
        WeftError: if no architecture expresses the graph, naming the nearest and where it differs; if `out` cannot be
            written; or if a number exceeds the range of `dtype`.
    """
    wanted = None if dtype is None else dtypes.parse(dtype, map(str, KINDS))
    if wanted is not None and wanted not in KINDS:
        raise WeftError(f"a GGUF file cannot be written in {wanted}; choose {', '.join(map(str, KINDS))}")
    if "task" in model.graph.meta:
        raise WeftError(f"{model.spec} has a head for {model.graph.meta['task']}, which weft writes to hf folders only")
    found = fit(model, partial(_candidates, model), "architecture of llama.cpp")
    reader = model.graph.reader
    kept = choose(found.tensors, reader, weights, refusal, note)
    others = [made for name, made in found.tensors.items() if len(made.shape) > 1 and name not in kept]
    kind = wanted or exact_dtype(model.graph, others)
    tensors = {name: _tensor(made, kind, reader) for name, made in found.tensors.items()}
    rounding, blocks = Rounding(), dict[str, Callable[[], Iterator[Array]]]()
    for name, codes in kept.items():
        blocks[name] = partial(blocks_of, name, codes, reader, rounding)
        tensors[name] = Tensor(codes.shape, kind_of(codes.layout) or kind, blocks[name])
    facts = _facts(model, [t.dtype for name, t in tensors.items() if name in kept] or [kind])
    embedding = found.tensors.get("token_embd.weight")
    tokens = {} if embedding is None else tokenizer_metadata(model, embedding.shape[0], note)
    with whole_file(Path(out), model.files) as path:
        _write(path, found, {**tokens, **facts}, tensors, blocks, progress)
        model.check_unchanged()
    if kept:
        note(f"weights that keep their codes: {counted_layouts(kept)}")
    if rounding.tensors:
        note(
            f"{shortened(rounding.tensors)}: scales and minima (-zero point · scale) are rounded to f16, which changes "
            f"weights by {rounding.error:.2g} at most, {rounding.steps:.2g} of the step between two codes"
        )
    return found.family


def _candidates(model: Model, graph: Graph) -> Iterator[Candidate]:
    known, (own, names) = architectures(), exported(graph.meta.get("model_type"))
    for name, settings in proposals(model, graph, own, names):
        with contextlib.suppress(WeftError):  # an architecture that cannot say this
            config, tensors = propose(known[name], settings), tensors_there(known[name], settings)
            loaded = describe(known[name], config, tensors, f"the metadata of a {name} model")
            theirs, divisors = divide_frequencies(graph, loaded.graph)
            besides = {**divisors, **factors(settings)}
            yield Candidate(name, config, replace(loaded, graph=theirs), besides=besides)


def _tensor(made: Made, kind: DType, reader: TensorReader) -> Tensor:
    """Choose the storage of a tensor: f32 if kernels do not take `kind`, f16 if its rows are not whole blocks."""
    if len(made.shape) == 1:
        kind = dtypes.f32
    elif kind == dtypes.q8_0 and made.shape[-1] % BLOCK:
        kind = dtypes.f16
    return Tensor(made.shape, kind, partial(stream, made.recipe, reader))


def _facts(model: Model, kinds: list[DType]) -> dict[str, Any]:
    """Metadata on the file, whose matrices are of `kinds`; one that most of them have is that of the file."""
    kind = Counter(kinds).most_common(1)[0][0]
    quantized = {"general.quantization_version": 2} if any(kind.is_block for kind in kinds) else {}
    return {"general.name": model.graph.name, "general.file_type": _FILE_TYPES[kind], **quantized}


def _write(
    path: Path,
    found: Fit,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    blocks: Mapping[str, Callable[[], Iterator[Array]]],
    progress: Progress,
) -> None:
    """Write the file; the bytes of some tensors come from `blocks`."""
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    writer = GGUFWriter(path, found.family)
    try:
        for key, value in metadata.items():
            _add(writer, key, value)
        for key, value in found.config.items():
            if key not in INTERNAL:
                _add(writer, f"{found.family}.{key}", value)
        for name, tensor in tensors.items():
            raw = GGMLQuantizationType[tensor.dtype.name.upper()]
            # The writer would take uint8 for a shape in bytes; the stored type is `raw`.
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,), step = writer.fout, counted(progress, tensors)
        writer.write_padding(file, file.tell())
        for name, tensor in tensors.items():
            for block in blocks[name]() if name in blocks else _blocks(name, tensor):
                file.write(block.data)
                step(block.nbytes)
            writer.write_padding(file, tensor.nbytes)
    finally:
        writer.close()


def _blocks(name: str, tensor: Tensor) -> Iterator[Array]:
    """The bytes of a tensor."""
    if tensor.dtype != dtypes.q8_0:
        yield from stored_blocks(name, tensor)
        return
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    for values in tensor.blocks():
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, tensor.shape[-1])
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            blocks = quantize(rows, GGMLQuantizationType.Q8_0)
            largest = np.abs(rows).reshape(-1, BLOCK).max(-1)
        scales = np.ascontiguousarray(blocks.reshape(len(largest), -1)[:, :2]).view(np.float16)[:, 0]
        check_finite(largest, scales, tensor.dtype, name)
        yield blocks.reshape(-1)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """A key of the type that its value says: whole numbers are unsigned, of 32 bits.

    Raises:
        WeftError: if a number does not fit that.
    """
    several = isinstance(value, (list, tuple))
    least, most = (-(1 << 31), 1 << 31) if several else (0, 1 << 32)  # lists have a sign
    for number in value if several else (value,):
        wide = isinstance(number, int) and not least <= number < most
        if wide or (isinstance(number, float) and math.isfinite(number) and abs(number) > _MOST):
            raise WeftError(f"{key} is {shown(number)}, which the numbers of 32 bits in a GGUF file cannot hold")
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        # Before the integers: bool is a subclass of int.
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
