"""Model folders, which are self-contained: a graph with its weights and tokenizer.

::

    model.weft           the graph; parameters with weights read the tensors of their own names
    model.safetensors    those tensors (or shards and their index)
    tokenizer.json …     copies of the source's files
    provenance.json      weft's version, the pipeline, the source and the hashes of its files
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.safetensors import STORED, Progress, Tensor, count_written, parse_stored, write_shards
from weft.ir.graph import Graph, Param
from weft.ir.graph.verifier import verify
from weft.ir.recipes import RANDOM, Concat, Full, Permute, Reshape, Slice, Source, Take
from weft.ir.recipes.blocks import (
    BlockRecipe,
    Dequantize,
    Float4,
    Float8,
    Stored,
    compute_part_widths,
    find_block_layout,
)
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.recipe import Recipe
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage import PROVENANCE, check_format, take_stamps
from weft.ir.storage.contents import SEALED
from weft.ir.storage.documents import Record, read_json, read_text
from weft.ir.text.parser import MOST_BYTES, parse
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...model import Model
from ...models.left_out import LeftOut
from ..hf.safetensors import SafetensorsReader
from ..hf.tokens.files import copy_tokenizer, list_tokenizer_files
from .manifest import replace_with_provenance
from .metadata import check_metadata

GRAPH = "model.weft"
RUN, BEST = "run.json", "best"  # of a run folder: its record, and its model as a source
_MOVING = (Source, Concat, Full, Permute, Reshape, Slice, Take)


def write_model(
    model: Model, out: str | Path, *, dtype: str | None = None, progress: Progress = lambda stage, done, total: None
) -> None:
    """Write `model` as the model folder `out`; an older folder there is replaced only when the new one is complete.

    Every parameter that reads checkpoint tensors or random values is evaluated a few rows at a time and stored in
    `dtype` (f32, f16, bf16); the default is `find_exact_dtype`. Formulas such as RoPE frequencies stay formulas. A
    quantized parameter is stored as its codes, scales and zero points. `progress(stage, done, total)` counts bytes.

    Raises:
        WeftError: if `out` cannot be written, or a value exceeds the range of `dtype`.
    """
    graph, stored = model.graph.clone(), None if dtype is None else parse_stored(dtype)
    blocks = {name: packed for name, param in graph.params.items() if (packed := store_blocks(param))}
    tensors = collect_weights(graph, stored, leave=blocks)
    for name in tensors:
        graph.params[name].recipe = Source(name)
    for name, (recipe, parts) in blocks.items():
        tensors |= parts
        graph.params[name].recipe = recipe
    graph.meta.pop("source", None)  # the folder is its own source, wherever it is moved
    with replace_with_provenance(model, out) as folder:
        write_shards(folder, tensors, step=count_written(progress, tensors))
        (folder / GRAPH).write_text(str(graph), encoding="utf-8")


def find_model(folder: Path) -> Path:
    """Return `folder`, or if it is a run's the folder of its best model."""
    return folder / BEST if (folder / RUN).is_file() else folder


def read_model(spec: str, path: Path) -> Model:
    """Return the model of the model folder at `path`; `spec` is the name by which the user requested it.

    Raises:
        WeftError: if its model.weft is not a graph, or its weights are missing or invalid.
    """
    # Taken before anything is read, so that a change meanwhile is noticed.
    stamps_before = take_stamps(path.iterdir())
    graph = parse(read_text(path / GRAPH, MOST_BYTES), str(path / GRAPH))
    check_metadata(graph, str(path / GRAPH))
    graph.meta["source"] = {"format": "weft", "path": str(path)}
    graph.reader = SafetensorsReader(path)
    verify(graph, recipes=True)
    read = {key for p in graph.params.values() for key in p.recipe.sources()}
    tokenizer = list_tokenizer_files(path)
    record = read_provenance(path)
    left_out = [LeftOut.read(entry) for entry in Record(path / PROVENANCE, record).records("left_out", [])]
    files = (path / GRAPH, *tokenizer, *sorted(path.glob("*.safetensors")))
    return Model(
        graph,
        spec,
        f"model folder {path.name}",
        tokenizer=partial(copy_tokenizer, path, types="token_type_ids" in graph.inputs) if tokenizer else None,
        unread=sorted(set(graph.reader.keys()) - read),
        files=files,
        stamps={file: stamps_before[file] for file in files if file in stamps_before},
        provenance=record,
        left_out=left_out,
        without=tuple(part.name for part in left_out if part.changes),  # accepted when the folder was written
    )


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return the contents of provenance.json in `folder`, without the entries in `SEALED`, which describe files; {} if
    it has none."""
    if not (path := folder / PROVENANCE).is_file():
        return {}
    record = read_json(path)
    check_format(path, record)
    return {key: value for key, value in record.items() if key not in SEALED}


def store_blocks(param: Param) -> tuple[BlockRecipe, dict[str, Tensor]] | None:
    """Return the recipe that dequantizes `param` from stored parts (codes, scales, …), and these parts by tensor name.
    Return None if the parameter is not quantized in a block layout."""
    reader, recipe = param.graph.reader, param.recipe
    layout = find_block_layout(recipe, reader) if recipe.has(BlockRecipe) else ""
    if isinstance(layout, str):
        return None
    *lead, width = param.type.concrete({})
    sizes, sources, tensors = compute_part_widths(layout, width), dict[str, Source](), dict[str, Tensor]()
    scales = ("every_step" if layout.sums else "steps", layout.scale_dtype)
    if layout.small_floats:
        scales = ("levels", dtypes.u8)
    parts = {"codes": ("packed", dtypes.u8), "scales": scales}
    if layout.has_zeros:
        parts["zeros"] = ("points", dtypes.u8)
    if layout.tensor_scale:
        parts["tensor_scales"] = ("tensor_scale", dtypes.f32)
    for part, (stored, dtype) in parts.items():
        key = f"{param.name}.{part}"
        sources[part] = Source(key)
        tensors[key] = Tensor((*lead, sizes[stored]), dtype, partial(stream_rows, Stored(recipe, stored), reader))
    if layout.small_floats:
        return Float4(sources["codes"], sources["scales"], sources.get("tensor_scales"), width, str(layout)), tensors
    if layout.floats:
        return Float8(sources["codes"], sources["scales"], width), tensors
    stored_recipe = Dequantize(
        sources["codes"],
        sources["scales"],
        sources.get("zeros"),
        width=width,
        bits=layout.bits,
        group=layout.group,
        scale=layout.scale_dtype.name,
        sums=layout.sums,
    )
    return stored_recipe, tensors


def collect_weights(graph: Graph, dtype: DType | None = None, leave: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the parameters of `graph`, except `leave`, that read tensors or random values, keyed by name. Floats are
    in `dtype`, or, if it is None, in that of `find_exact_dtype`."""
    tensors = {}
    for name, param in graph.params.items():
        if name not in leave and param.recipe.has(Source, *RANDOM):
            exact_dtype = find_exact_dtype(param.recipe, param.type.dtype, graph.reader)
            kind = dtype if dtype is not None and exact_dtype.is_float else exact_dtype
            tensors[name] = Tensor(param.type.concrete({}), kind, partial(stream_rows, param.recipe, graph.reader))
    return tensors


def find_exact_dtype(recipe: Recipe, dtype: DType, reader: TensorReader) -> DType:
    """Return a dtype that represents the result of `recipe`, a tensor of `dtype`, exactly. If `dtype` is f32 and
    `recipe` only moves elements of tensors of one dtype in STORED, it is that dtype; else it is `dtype`."""
    if dtype != dtypes.f32 or not _only_moves(recipe):
        return dtype
    stored = {reader.dtype(key) for key in recipe.sources()}
    return next(iter(stored)) if len(stored) == 1 and stored <= set(STORED) else dtypes.f32


def _only_moves(recipe: Recipe) -> bool:
    if isinstance(recipe, Full):
        return recipe.value in (0, 1)  # exact in every dtype
    return isinstance(recipe, _MOVING) and all(map(_only_moves, recipe.parts))
