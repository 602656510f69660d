"""A model written back into a Hugging Face folder: config.json, sharded safetensors, tokenizer files."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.backends.safetensors import SHARD_BYTES, STORED, Tensor, parse_stored, write_shards
from weft.backends.torch.transformers.embedding import write_embedding
from weft.ir.errors import WeftError
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array
from weft.ir.storage.documents import write_json
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...formats.hf.folder import Folder
from ...formats.hf.hub import check_inside
from ...formats.weft.manifest import replace_with_provenance
from ...model import Model
from ..inversion import group_params, restore_tensors

CONFIG_NAMES = {dtypes.f32: "float32", dtypes.f16: "float16", dtypes.bf16: "bfloat16"}


def write_folder(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    params: Mapping[str, Array] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model`, which was loaded from a Hugging Face folder, as such a folder with the original tensor names.

    The tensors are computed from the parameters: from their values in `params`, keyed by name, else from their recipes.
    Tensors that the model does not read are copied if transformers asks for them; masks and heads of other tasks are
    left out. `dtype` is f32, f16, bf16, or None for the source's dtype of each tensor (f32 for quantized ones). Only
    one group of tensors that depend on each other is in memory at a time. The folder is written atomically.

    Raises:
        WeftError: if `model` is from another source, has merged adapters, or leaves elements of its tensors unread or
            undetermined; or if a value exceeds the range of `dtype`.
    """
    origin = model.graph.meta.get("source")
    if not isinstance(origin, Mapping) or origin.get("format") != "safetensors":
        raise WeftError(f"{model.description} is not from a Hugging Face folder: use `weft export` to write one")
    if origin.get("adapters"):
        raise WeftError(f"{model.description} has merged adapters, whose weights only `weft export` writes")
    if model.unread:
        raise WeftError(f"{model.spec}: tensor {model.unread[0]!r} cannot be written: the model does not read it")
    stored = None if dtype is None else parse_stored(dtype)
    source = Folder.open(Path(origin["path"]))
    config = dict(source.config)
    config.pop("quantization_config", None)  # the written tensors are dequantized
    if stored is not None:
        config.pop("torch_dtype", None)  # the older name of dtype
        config["dtype"] = CONFIG_NAMES[stored]
    with replace_with_provenance(model, out) as folder:
        write_json(folder / "config.json", config)
        write_embedding(folder, model.graph, stored)
        copy_generation(source.path, folder)
        write_shards(folder, _list_tensors(model, stored, params), shard_bytes)


def copy_generation(source: Path, folder: Path) -> bool:
    """Copy generation_config.json from `source` to `folder`, if it exists; return whether it does."""
    file = source / "generation_config.json"
    if exists := file.is_file():
        check_inside(source, file)
        shutil.copyfile(file, folder / file.name)
    return exists


def _list_tensors(model: Model, dtype: DType | None, params: Mapping[str, Array] | None) -> dict[str, Tensor]:
    """Return the checkpoint's tensors, keyed by name. Write each once, in this order: all take their values from one
    iterator, which computes them on demand."""
    graph, reader = model.graph, model.graph.reader
    copied = ((key, Source(key).evaluate(reader)) for key in model.idle)
    restored = itertools.chain(restore_tensors(graph, params=params), copied)

    def blocks() -> Iterator[Array]:
        yield next(restored)[1]

    def kind(stored: DType) -> DType:
        return dtype or (stored if stored in STORED else dtypes.f32)

    keys = [*(key for group in group_params(graph) for key in group.keys), *model.idle]
    return {key: Tensor(reader.shape(key), kind(reader.dtype(key)), blocks) for key in keys}
