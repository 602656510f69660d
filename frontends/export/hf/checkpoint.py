"""A model back into a Hugging Face folder: config.json, safetensors in shards, tokenizer files."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.backends.safetensors import SHARD_BYTES, STORED, Tensor, parse_stored, write_shards
from weft.backends.torch.transformers.embedding import write_embedding, write_json
from weft.ir.errors import WeftError
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array
from weft.ir.storage import PROVENANCE, seal, whole_folder
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...formats.hf.folder import Folder
from ...formats.hf.hub import check_inside
from ...formats.weft.manifest import hashing, provenance
from ...model import Model
from ..inversion import groups, restore

CONFIG_NAMES = {dtypes.f32: "float32", dtypes.f16: "float16", dtypes.bf16: "bfloat16"}


def write_folder(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    params: Mapping[str, Array] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model`, loaded from a Hugging Face folder, as such a folder: transformers loads it as before.

    The tensors are computed from the parameters, whose values the recipes or `params` (by name) say. Of those that the
    model does not read, the ones that transformers asks for are copied; masks and heads of other tasks are left out.
    `dtype` is f32, f16, bf16, or as the source stores each tensor (f32 for quantized ones). Memory is needed for the
    tensors that hang together, not for the model. The folder appears whole.

    Raises:
        WeftError: if the model comes from elsewhere, is not understood in full, or does not determine its tensors; or
            if a number exceeds the range of `dtype`.
    """
    origin = model.graph.meta.get("source")
    if not isinstance(origin, Mapping) or origin.get("format") != "safetensors":
        raise WeftError(f"{model.description} comes from no Hugging Face folder, so it cannot be written as one")
    if origin.get("adapters"):
        raise WeftError(f"{model.description} has merged weights, which its base has not: `weft export` writes them")
    if model.unread:
        raise WeftError(f"{model.spec}: nothing reads tensor {model.unread[0]!r}, so its values cannot be restored")
    stored = None if dtype is None else parse_stored(dtype)
    source = Folder.open(Path(origin["path"]))
    config = dict(source.config)
    config.pop("quantization_config", None)  # what is written are the numbers
    if stored is not None:
        config.pop("torch_dtype", None)  # its older name
        config["dtype"] = CONFIG_NAMES[stored]
    with whole_folder(Path(out), model.files) as folder, hashing(model) as hashes:
        write_json(folder / "config.json", config)
        write_embedding(folder, model.graph, stored)
        copy_generation(source.path, folder)
        if model.tokenizer is not None:
            model.tokenizer(folder)
        write_shards(folder, _tensors(model, stored, params), shard_bytes)
        seal(folder, PROVENANCE, provenance(model, hashes()))


def copy_generation(source: Path, folder: Path) -> bool:
    """Copy generation_config.json of the folder `source`, if it has one; return whether it has."""
    file = source / "generation_config.json"
    if there := file.is_file():
        check_inside(source, file)
        shutil.copyfile(file, folder / file.name)
    return there


def _tensors(model: Model, dtype: DType | None, params: Mapping[str, Array] | None) -> dict[str, Tensor]:
    """The checkpoint's tensors by key, to be written in this order: groups are restored as they come."""
    graph, reader = model.graph, model.graph.reader
    restored = itertools.chain(
        restore(graph, params=params), ((key, Source(key).evaluate(reader)) for key in model.idle)
    )

    def blocks() -> Iterator[Array]:
        yield next(restored)[1]

    def kind(stored: DType) -> DType:
        return dtype or (stored if stored in STORED else dtypes.f32)

    keys = [*(key for group in groups(graph) for key in group.keys), *model.idle]
    return {key: Tensor(reader.shape(key), kind(reader.dtype(key)), blocks) for key in keys}
