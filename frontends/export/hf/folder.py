"""A graph as a Hugging Face folder: config.json, safetensors and tokenizer that `AutoModelForCausalLM` loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.safetensors import Progress, Tensor, counted, parse_stored, write_shards
from weft.backends.torch.transformers.embedding import write_embedding, write_json
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import BlockRecipe
from weft.ir.recipes.streams import stream
from weft.ir.storage import seal, whole_folder
from weft.ir.types import dtypes

from ...formats.hf import Folder, one_side
from ...formats.weft.manifest import PROVENANCE, hashing, provenance
from ...model import Model
from ...models.families import FAMILIES, Family, describe
from ...models.heads import GENERATES, base_class, head_config, suffix_of, with_head
from ..codes import choose, counted_layouts, shortened
from ..fitting import Candidate, Fit, exact_dtype, fit
from ..infer_settings import proposals
from ..inversion import Made, Shape
from . import compressed
from .checkpoint import CONFIG_NAMES, copy_generation
from .configs import exported, propose

UNLOADABLE = ("falcon", "gpt_bigcode", "mamba2")  # whose code reads `weight` of its layers, which those of codes lack


def write_huggingface(
    model: Model,
    out: str | Path,
    *,
    dtype: str | None = None,
    weights: str = "auto",
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Write `model` as the Hugging Face folder `out`, which appears whole, and say as what.

    The weights are stored in `dtype` (f32, f16, bf16), or in the one that holds all of them exactly, f32 if there is
    none smaller; they are evaluated a block at a time. Quantized weights of linear layers keep their codes, in the
    format of compressed-tensors, as `weights` says (`weft.frontends.export.codes.choose`); `note` is told of others.

    Raises:
        WeftError: if no family expresses the graph, naming the nearest and where it differs; if `out` cannot be
            written; or if a number exceeds the range of `dtype`.
    """
    wanted = None if dtype is None else parse_stored(dtype)
    try:
        found = fit(model, partial(_candidates, model), "Hugging Face family")
    except WeftError as none:
        raise WeftError(f"{none}; `weft compile --target transformers` writes it with code of its own") from None
    reader = model.graph.reader
    aside = [key for key, of in found.kinds.items() if of not in compressed.MULTIPLIED]
    if found.family in UNLOADABLE and weights == "auto":
        weights = "float"
        if any(made.recipe.has(BlockRecipe) for made in found.tensors.values()):
            note(f"all weights are written as floats: transformers loads no codes of {found.family} models")
    kept = choose(found.tensors, reader, weights, partial(compressed.refusal, reader), note, aside)
    # transformers 5 (`CompressedTensorsDequantize`) gives the scales of groups alone to what widens experts.
    if weights == "auto" and any(c.layout.tensor_scale and found.kinds[key] == "experts" for key, c in kept.items()):
        weights, kept = "float", {}
        note(
            "all weights are written as floats: transformers leaves out the scales of experts' matrices in nvfp4; "
            "--weights codes keeps the codes, for loaders that do not"
        )
    kind = wanted or exact_dtype(model.graph, (made for key, made in found.tensors.items() if key not in kept))
    tensors: dict[str, Tensor] = {}
    for key, made in found.tensors.items():
        if key in kept:
            tensors |= compressed.packed(key, kept[key], kind, reader)
        else:
            tensors[key] = Tensor(made.shape, kind, partial(stream, made.recipe, reader))
    config = {**found.config, "dtype": CONFIG_NAMES[kind]}
    if kept:
        config["quantization_config"] = compressed.config(kept, _modules(found))
        note(f"weights that keep their codes: {counted_layouts(kept)}")
        scales = {codes.layout.scale for codes in kept.values() if not codes.layout.small_floats}
        if scales and kind not in (dtypes.f32, *scales):
            listed = ", ".join(sorted(map(str, scales)))
            note(f"scales stay {listed}: a loader that rounds them to {kind} changes weights")
    quantized = {key for key, made in found.tensors.items() if made.recipe.has(BlockRecipe)}
    numbers = [key for key in aside if key in quantized]
    if weights != "float" and numbers and (kept or len(numbers) == len(quantized)):
        note(f"{shortened(numbers)}: the numbers that codes stand for are written, in {kind}")
    with whole_folder(Path(out), model.files) as folder, hashing(model) as hashes:
        write_shards(folder, tensors, step=counted(progress, tensors))
        write_json(folder / "config.json", config)
        write_embedding(folder, model.graph, wanted)
        _write_generation(model, folder)
        if model.tokenizer is not None:
            model.tokenizer(folder)
        seal(folder, PROVENANCE, provenance(model, hashes()))
    return found


def _modules(found: Fit) -> list[str]:
    """The modules with a matrix that is not looked up."""
    matrices = [key for key, made in found.tensors.items() if key.endswith(".weight") and len(made.shape) == 2]
    return [key.removesuffix(".weight") for key in matrices if found.kinds.get(key) != "table"]


def _candidates(model: Model, graph: Graph) -> Iterator[Candidate]:
    """Yield the source's own config, then configs inferred from the graph for every family that can express it.

    Raises:
        WeftError: if nothing can be read off the graph.
    """
    gone = "quantization_config", "torch_dtype"  # what is written are numbers, in another dtype
    if (origin := model.origin("safetensors")) is not None:
        source = Folder.open(origin)
        config, weights = {key: value for key, value in source.config.items() if key not in gone}, source.weights()
        shapes = {key: weights.shape(key) for key in list(weights.keys())}
        if config.get("model_type") in FAMILIES:
            idle = {key: Made(Source(key), shapes[key]) for key in model.idle}
            yield replace(_candidate(config["model_type"], config, shapes, source), besides=idle)
        elif (side := one_side(source, model.family)) is not None:
            with contextlib.suppress(WeftError):
                text = {key: value for key, value in side[1].items() if key not in gone}
                yield _text_alone(side[0], {**text, **_tokens(model)}, shapes)
    sparse, family = any(node.op.name == "moe" for node in graph.nodes), graph.meta.get("model_type")

    def unlikely(name: str) -> tuple[bool, bool]:
        return name != family, ("moe" in FAMILIES[name].settings) != sparse

    for name, settings in proposals(model, graph, family, sorted(exported(), key=unlikely)):
        config = propose(name, settings) | head_config(FAMILIES[name], graph.meta)
        with contextlib.suppress(WeftError):  # a family that cannot say this, whatever else it can
            yield _candidate(name, {**config, **_tokens(model)}, {})


def _text_alone(table: Family, text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Candidate:
    """The language model of a model of texts and more, its tensors called as where it is alone."""
    name, head = table.model_types[0], "lm_head."
    begin = FAMILIES[name].prefix
    own = {begin + key.removeprefix(table.prefix): s for key, s in shapes.items() if key.startswith(table.prefix)}
    own |= {head + key.rpartition(head)[2]: s for key, s in shapes.items() if head in key}
    return _candidate(name, {**text, "model_type": name}, own)


def _candidate(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, Shape], source: Folder | None = None
) -> Candidate:
    keys, title = frozenset(shapes), f"the config of a {name} model"
    table, _ = with_head(FAMILIES[name], config, keys, title)
    if source is not None and source.sentence is not None:
        table = source.sentence.table(FAMILIES[name], config)
    loaded = describe(table, config, keys, title)
    if (suffix := suffix_of(config)) and suffix not in GENERATES and "task" not in loaded.graph.meta:
        config = {**config, "architectures": base_class(config)}  # of a class whose head is left out
    return Candidate(name, config, loaded, shapes)


def _tokens(model: Model) -> dict[str, Any]:
    """Special tokens in a config; null, where there is none, keeps a class from its own."""
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
        said = {key: value for key, value in _tokens(model).items() if value is not None}
        write_json(folder / "generation_config.json", said)
