"""A model back into a Hugging Face folder: config.json, safetensors in shards, tokenizer files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from weft.backends.folder import whole_folder
from weft.ir import dtypes
from weft.ir.archive import Array
from weft.ir.dtypes import DType
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.inverse import groups, restore

from ..sources import Model
from .folder import Folder
from .safetensors import DTYPES, INDEX

SHARD_BYTES = 5_000_000_000  # at most in one file, unless one tensor is larger
STORED = (dtypes.f32, dtypes.f16, dtypes.bf16)
_CONFIG_NAMES = {dtypes.f32: "float32", dtypes.f16: "float16", dtypes.bf16: "bfloat16"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_folder(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    params: Mapping[str, Array] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model`, loaded from a Hugging Face folder, as such a folder: transformers loads it as before.

    The tensors are computed from the parameters, whose values the recipes or `params` (by name) say; those that the
    model does not read (masks, heads of other tasks) are left out. `dtype` is f32, f16, bf16, or as the source stores
    each tensor (f32 for quantized ones). Memory is needed for the tensors that hang together, not for the model. The
    folder appears whole.

    Raises:
        WeftError: if the model comes from elsewhere, is not understood in full, or does not determine its tensors; or
            if a number exceeds the range of `dtype`.
    """
    origin = model.graph.meta.get("source")
    if not isinstance(origin, Mapping) or origin.get("format") != "safetensors":
        raise WeftError(f"{model.description} comes from no Hugging Face folder, so it cannot be written as one")
    if model.unread:
        raise WeftError(f"{model.spec}: nothing reads tensor {model.unread[0]!r}, so its values cannot be restored")
    wanted = None if dtype is None else dtypes.parse(dtype, map(str, STORED))
    if wanted is not None and wanted not in STORED:
        raise WeftError(f"a checkpoint cannot be written in {wanted}; choose {', '.join(map(str, STORED))}")
    source = Folder.open(Path(origin["path"]))
    config = dict(source.config)
    config.pop("quantization_config", None)  # what is written are the numbers
    if wanted is not None:
        config.pop("torch_dtype", None)  # its older name
        config["dtype"] = _CONFIG_NAMES[wanted]
    with whole_folder(Path(out)) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if (generation := source.path / "generation_config.json").is_file():
            shutil.copyfile(generation, folder / generation.name)
        if model.tokenizer is not None:
            model.tokenizer(folder)
        _write_tensors(model.graph, wanted, params, shard_bytes, folder)


def _write_tensors(
    graph: Graph, dtype: DType | None, params: Mapping[str, Array] | None, shard_bytes: int, folder: Path
) -> None:
    archive = graph.archive
    kinds = {key: dtype or _kind(archive.dtype(key)) for group in groups(graph) for key in group.keys}
    sizes = {key: kind.bytes_for(math.prod(archive.shape(key))) for key, kind in kinds.items()}
    shards: list[dict[str, DType]] = [{}]
    for key, kind in kinds.items():
        if shards[-1] and sizes[key] + sum(sizes[k] for k in shards[-1]) > shard_bytes:
            shards.append({})
        shards[-1][key] = kind
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(count)]
    tensors = restore(graph, params=params)
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, graph, tensors)
    if count > 1:
        home = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": home}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _kind(stored: DType) -> DType:
    """The dtype to write what the source stores in `stored`."""
    return stored if stored in STORED else dtypes.f32


def _write_shard(path: Path, shard: Mapping[str, DType], graph: Graph, tensors: Iterator[tuple[str, Array]]) -> None:
    """The next tensors of `tensors`, those of `shard`, as one file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, dtype in shard.items():
        shape = graph.archive.shape(key)
        start, end = end, end + dtype.bytes_for(math.prod(shape))
        header[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype in shard.values():
            key, values = next(tensors)
            with np.errstate(over="ignore"):
                stored = values.astype(dtype.numpy)
            if not np.array_equal(np.isfinite(stored), np.isfinite(values)):
                raise WeftError(f"tensor {key!r} holds numbers beyond the range of {dtype}; write it in f32")
            file.write(stored.tobytes())
