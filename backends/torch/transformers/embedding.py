"""Write the files with which sentence-transformers pools the hidden states of an encoder into one vector."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage.documents import write_json
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ...safetensors import STORED, Tensor, write_shards

_FLAGS = {
    **{"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"},
    **{"last": "lasttoken", "weighted": "weightedmean_tokens"},
}
_MODULES = "sentence_transformers.models."  # valid in all versions
KINDS = ("Pooling", "Dense", "LayerNorm", "Normalize", "WeightedLayerPooling", "WordWeights")
_VECTOR = "sentence_embedding"


def write_embedding(folder: Path, graph: Graph, kind: DType | None, length: int | None = None) -> None:
    """Write the files of sentence-transformers into `folder`: pooling modules, prompts, the longest input.

    kind: dtype of the modules' weights (None: as stored). length: longest input in tokens of a folder with custom code;
    None for a checkpoint without. Custom code returns the vector itself where no module can pool: without a module
    Pooling, or if WeightedLayerPooling would read hidden states. Only encoders with pooling get files.

    Raises:
        WeftError: if a pass has replaced weights of a module, or custom code would have to exclude prompts from
        pooling.
    """
    sentence, modules = graph.meta.get("sentence") or {}, _list_modules(graph)
    types = {module["type"] for module in modules.values()}
    averages = "WeightedLayerPooling" in types
    pools_itself = _VECTOR in graph.outputs and ("Pooling" not in types or (averages and length is not None))
    if pools_itself and sentence.get("include_prompt") is False:
        raise WeftError(
            f"{graph.name} has include_prompt=false, but after WeightedLayerPooling target transformers pools prompts "
            "too: choose another target, or `weft export`"
        )
    if graph.meta.get("kind") != "encoder" or (length is None if pools_itself else not modules):
        return
    modules = {} if pools_itself else modules
    paths = {"": "Transformer", **{path: module["type"] for path, module in modules.items()}}.items()
    listed = [{"idx": i, "name": str(i), "path": path, "type": _MODULES + name} for i, (path, name) in enumerate(paths)]
    write_json(folder / "modules.json", listed)
    for path, module in modules.items():
        (folder / path).mkdir()
        write_json(folder / path / "config.json", module["config"])
        if "at" in module:
            write_shards(folder / path, _make_tensors(graph, module["at"], kind))
    options: dict[str, Any] = {"module_output_name": _VECTOR} if pools_itself else {}
    if pools_itself:
        options["modality_config"] = {"text": {"method": "forward", "method_output_name": _VECTOR}}
        if "padding" in graph.meta:
            options["processing_kwargs"] = {"text": {"padding": graph.meta["padding"]}}
    elif averages:
        options["config_args"] = {"output_hidden_states": True}
    if sentence or pools_itself:
        lengths = [n for n in (sentence.get("max_seq_length"), length) if n is not None]
        limits = {"max_seq_length": min(lengths, default=None), "do_lower_case": sentence.get("do_lower_case", False)}
        write_json(folder / "sentence_bert_config.json", limits | options)
        keys = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
        fields = {key: sentence[key] for key in keys if key in sentence}
        write_json(folder / "config_sentence_transformers.json", fields)


def _make_tensors(graph: Graph, at: str, kind: DType | None) -> dict[str, Tensor]:
    """Return {name in the module: tensor} of the parameters whose names begin with `at`, in dtype `kind`; for None, in
    the dtype of the source of each (f32 for several sources). Raise WeftError if none of them is a weight."""
    params = {name.removeprefix(f"{at}."): param for name, param in graph.params.items() if name.startswith(f"{at}.")}
    if not any(key.endswith(("weight", "layer_weights")) for key in params):
        raise WeftError(f"module {at} has lost its weight to a pass: leave out the passes that replace it")
    tensors: dict[str, Tensor] = {}
    for key, param in params.items():
        read = {graph.reader.dtype(source) for source in param.recipe.sources()} & set(STORED)
        stored = kind or (read.pop() if len(read) == 1 else dtypes.f32)
        name = f"norm.{key}" if key in ("weight", "bias") else key
        read_blocks = partial(stream_rows, param.recipe, graph.reader)
        tensors[name] = Tensor(tuple(param.type.concrete({})), stored, read_blocks)
    return tensors


def _list_modules(graph: Graph) -> Mapping[str, Any]:
    """Return the modules after the transformer (type and config) by folder name, in order; {} without pooling."""
    modules = (graph.meta.get("sentence") or {}).get("modules")
    if modules is None and (mode := _FLAGS.get(graph.meta.get("pooling") or "")) is not None:
        flags = {f"pooling_mode_{name}": name == mode for name in _FLAGS.values()}
        config = {"word_embedding_dimension": graph.outputs["last_hidden_state"].shape[-1], **flags}
        modules = [{"type": "Pooling", "config": config}]
        modules += [{"type": "Normalize", "config": {}}] * bool(graph.meta.get("normalize"))
    return {f"{i + 1}_{module['type']}": module for i, module in enumerate(modules or [])}
