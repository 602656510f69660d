"""A graph as a Hugging Face folder: config.json, safetensors and tokenizer that `AutoModelForCausalLM` loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.safetensors import Progress, Tensor, count_written, parse_stored, write_shards
from weft.backends.torch.transformers.embedding import write_embedding
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import BlockRecipe
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage.documents import write_json
from weft.ir.types import dtypes

from ...formats.hf import Folder, extract_submodel
from ...formats.weft.manifest import replace_with_provenance
from ...model import Model
from ...models.families import FAMILIES, Family, build_from_table
from ...models.task_heads import GENERATES, add_head, find_base_classes, find_class_suffix, write_head_config
from ..fitting import Candidate, FamilyFit, fit_dtype, fit_family
from ..infer_settings import propose_settings
from ..inversion import Shape, ShapedRecipe
from ..stored_codes import choose_codes, describe_layouts, list_first
from . import compressed
from .checkpoint import CONFIG_NAMES, copy_generation
from .configs import list_families, propose_config

UNLOADABLE = ("falcon", "gpt_bigcode", "mamba2")  # their code reads `weight`, which quantized layers lack


def write_huggingface(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    weights: str = "auto",
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> FamilyFit:
    """Write `model` as the Hugging Face folder `out`, atomically, and return the family that fits.

    The weights are stored in `dtype` (f32, f16, bf16), by default the exact dtype of `fit_dtype`, and evaluated a block
    at a time. `weights` selects whether quantized weights of linear layers are stored as codes of compressed-tensors
    (see `choose_codes`). `note` reports weights written as floats, codes kept, and scales kept in another dtype.

    Raises:
        WeftError: if no family expresses the graph (the nearest and the first difference are named), `weights` has no
            effect, `out` cannot be written, or a value exceeds the range of `dtype`.
    """
    requested = None if dtype is None else parse_stored(dtype)
    try:
        result = fit_family(model, partial(_list_candidates, model), "Hugging Face family")
    except WeftError as none:
        raise WeftError(f"{none}; `weft compile --target transformers` writes a folder with the model's code") from None
    reader = model.graph.reader
    aside = [key for key, kind in result.kinds.items() if kind not in compressed.MULTIPLIED]
    if result.family in UNLOADABLE and weights == "auto":
        weights = "float"
        if any(tensor.recipe.has(BlockRecipe) for tensor in result.tensors.values()):
            note(f"all weights are written as floats: transformers cannot load codes of {result.family} models")
    codes = choose_codes(result.tensors, reader, weights, partial(compressed.find_refusal, reader), note, aside)
    # `CompressedTensorsDequantize` of transformers 5 passes only group scales to the step that dequantizes experts.
    if weights == "auto" and any(c.layout.tensor_scale and result.kinds[key] == "experts" for key, c in codes.items()):
        weights, codes = "float", {}
        note(
            "all weights are written as floats: transformers leaves out the scales of experts in nvfp4; use --weights "
            "codes to store codes for other loaders"
        )
    kind = requested or fit_dtype(model.graph, (tensor for key, tensor in result.tensors.items() if key not in codes))
    tensors: dict[str, Tensor] = {}
    for key, tensor in result.tensors.items():
        if key in codes:
            tensors |= compressed.pack_weight(key, codes[key], kind, reader)
        else:
            tensors[key] = Tensor(tensor.shape, kind, partial(stream_rows, tensor.recipe, reader))
    config = {**result.config, "dtype": CONFIG_NAMES[kind]}
    if codes:
        config["quantization_config"] = compressed.build_config(codes, _list_matrix_modules(result))
        note(f"weights that keep their codes: {describe_layouts(codes)}")
        scales = {c.layout.scale for c in codes.values() if not c.layout.small_floats}
        if scales and kind not in (dtypes.f32, *scales):
            listed = ", ".join(sorted(map(str, scales)))
            note(f"scales stay {listed}: a loader that rounds them to {kind} changes weights")
    quantized = {key for key, tensor in result.tensors.items() if tensor.recipe.has(BlockRecipe)}
    dequantized = [key for key in aside if key in quantized]
    if weights != "float" and dequantized and (codes or len(dequantized) == len(quantized)):
        note(f"{list_first(dequantized)}: written dequantized, as transformers needs floats there, in {kind}")
    with replace_with_provenance(model, out, card=True) as folder:
        write_shards(folder, tensors, step=count_written(progress, tensors))
        write_json(folder / "config.json", config)
        write_embedding(folder, model.graph, requested)
        _write_generation(model, folder)
    return result


def _list_matrix_modules(result: FamilyFit) -> list[str]:
    matrices = [key for key, tensor in result.tensors.items() if key.endswith(".weight") and len(tensor.shape) == 2]
    return [key.removesuffix(".weight") for key in matrices if result.kinds.get(key) != "table"]


def _list_candidates(model: Model, graph: Graph) -> Iterator[Candidate]:
    """Yield the config of the source, if that is a Hugging Face folder (of a multimodal model, its language model's);
    then a config per family that can express the settings of `graph`: first the source's family, next families that
    have experts if and only if `graph` does. Raise WeftError if no settings can be inferred."""
    dropped = "quantization_config", "torch_dtype"  # the written tensors are dequantized and have another dtype
    if (origin := model.origin("safetensors")) is not None:
        source = Folder.open(origin)
        config = {key: value for key, value in source.config.items() if key not in dropped}
        weights = source.open_weights()
        shapes = {key: weights.shape(key) for key in list(weights.keys())}
        if config.get("model_type") in FAMILIES:
            idle = {key: ShapedRecipe(Source(key), shapes[key]) for key in model.idle}
            yield replace(_make_candidate(config["model_type"], config, shapes, source), extra_tensors=idle)
        elif (side := extract_submodel(source, model.family)) is not None:
            with contextlib.suppress(WeftError):
                text = {key: value for key, value in side[1].items() if key not in dropped}
                yield _make_text_candidate(side[0], {**text, **_list_token_keys(model)}, shapes)
    sparse, family = any(node.op.name == "moe" for node in graph.nodes), graph.meta.get("model_type")
    names = sorted(list_families(), key=lambda name: (name != family, ("moe" in FAMILIES[name].settings) != sparse))
    for name, settings in propose_settings(model, graph, family, names):
        config = propose_config(name, settings) | write_head_config(FAMILIES[name], graph.meta)
        with contextlib.suppress(WeftError):  # a family that cannot express these settings
            yield _make_candidate(name, {**config, **_list_token_keys(model)}, {})


def _make_text_candidate(table: Family, text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Candidate:
    """Return a candidate for the language model of a multimodal model, with tensors named as in text-only models."""
    name, head = table.model_types[0], "lm_head."
    begin = FAMILIES[name].prefix
    text_shapes = {begin + k.removeprefix(table.prefix): s for k, s in shapes.items() if k.startswith(table.prefix)}
    text_shapes |= {head + k.rpartition(head)[2]: s for k, s in shapes.items() if head in k}
    return _make_candidate(name, {**text, "model_type": name}, text_shapes)


def _make_candidate(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, Shape], source: Folder | None = None
) -> Candidate:
    keys, title = frozenset(shapes), f"the config of a {name} model"
    table, _ = add_head(FAMILIES[name], config, keys, title)
    if source is not None and source.sentence is not None:
        table = source.sentence.table(FAMILIES[name], config)
    loaded = build_from_table(table, config, keys, title)
    if (suffix := find_class_suffix(config)) and suffix not in GENERATES and "task" not in loaded.graph.meta:
        config = {**config, "architectures": find_base_classes(config)}  # the class had a head that is left out
    return Candidate(name, config, loaded, shapes)


def _list_token_keys(model: Model) -> dict[str, Any]:
    """Return the config keys of special tokens; null values override the defaults of a class."""
    meta = model.graph.meta
    eos = meta.get("eos_token_ids") or [None]
    return {
        "bos_token_id": meta.get("bos_token_id"),
        "eos_token_id": eos if len(eos) > 1 else eos[0],
        "pad_token_id": meta.get("pad_token_id"),
    }


def _write_generation(model: Model, folder: Path) -> None:
    origin = model.origin("safetensors")
    if origin is None or not copy_generation(origin, folder):
        token_keys = {key: value for key, value in _list_token_keys(model).items() if value is not None}
        write_json(folder / "generation_config.json", token_keys)
