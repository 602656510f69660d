"""A graph as a Hugging Face folder: config.json, safetensors and tokenizer that `AutoModelForCausalLM` loads."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.folder import whole_folder
from weft.ir import dtypes
from weft.ir.dtypes import DType
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Full, Scale
from weft.ir.streams import stream
from weft.passes.edit import reweigh
from weft.passes.projections import projections

from ..families import FAMILIES, describe
from ..hf import Folder
from ..hf.checkpoint import CONFIG_NAMES
from ..hf.writing import Tensor, parse_stored, write_shards
from ..manifest import PROVENANCE, provenance
from ..model_folder import exact
from ..sources import Model
from .configs import CLASSES, propose
from .facts import read_settings
from .inversion import Layout, Made, Shape, inverted
from .matching import Difference, Match, canonical, match, require

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True)
class Fit:
    """A family's model that computes what a graph does: its config, and its checkpoint's tensors by name."""

    family: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Made]


def write_huggingface(
    model: Model, out: str | Path, *, dtype: str | None = None, progress: Progress = lambda stage, done, total: None
) -> Fit:
    """Write `model` as the Hugging Face folder `out`, which appears whole, and say as what.

    The weights are stored in `dtype` (f32, f16, bf16), or in the one that holds all of them exactly, f32 if there is
    none smaller; they are evaluated a block at a time.

    Raises:
        WeftError: if no family expresses the graph, naming the nearest and where it differs; if `out` cannot be
            written; or if a number exceeds the range of `dtype`.
    """
    wanted = None if dtype is None else parse_stored(dtype)
    found = fit(model)
    archive = model.graph.archive
    kinds = {exact(made.recipe, dtypes.f32, archive) for made in found.tensors.values()}
    kind: DType = wanted or (kinds.pop() if len(kinds) == 1 else dtypes.f32)
    tensors = {
        name: Tensor(made.shape, kind, partial(stream, made.recipe, archive)) for name, made in found.tensors.items()
    }
    done, total = 0, sum(t.nbytes for t in tensors.values())

    def step(written: int) -> None:
        nonlocal done
        done += written
        progress("weights", done, total)

    config = {**found.config, "dtype": CONFIG_NAMES[kind]}
    with whole_folder(Path(out)) as folder:
        write_shards(folder, tensors, step=step)
        _write_json(folder / "config.json", config)
        _write_generation(model, folder)
        if model.tokenizer is not None:
            model.tokenizer(folder)
        _write_json(folder / PROVENANCE, provenance(model, model.hashes()))
    return found


def fit(model: Model) -> Fit:
    """The family that expresses the graph of `model`: its own, or the first whose model of a proposed config matches.

    Raises:
        WeftError: naming the nearest family and the first difference.
    """
    require(model.graph)
    plain = canonical(model.graph)
    misses: list[tuple[int, int, str, Difference]] = []
    for graph in (plain, *_rescaled(plain)):
        for name, config, shapes in _candidates(model, graph):
            try:
                theirs = describe(FAMILIES[name], config, frozenset(shapes), f"the config of a {name} model")
            except WeftError:
                continue  # it cannot say this, whatever else it could
            other = canonical(theirs.graph)
            found = match(graph, other)
            if not found.differences:
                tensors = tensors_of(other, found, _layout(theirs.settings.head_size, shapes))
                return Fit(name, {**config, **_tokens(model)}, tensors)
            misses.append((len(other) - found.nodes, len(found.differences), name, found.differences[0]))
    if not misses:
        raise WeftError(f"{model.spec}: no Hugging Face family has a config for this graph")
    *_, name, parted = min(misses, key=lambda miss: miss[:2])
    raise WeftError(
        f"{model.spec}: no Hugging Face family expresses this graph; the nearest, {name}, has {parted.theirs} at "
        f"{parted.at} where the graph has {parted.ours}"
    )


def _candidates(model: Model, graph: Graph) -> Iterator[tuple[str, dict[str, Any], dict[str, Shape]]]:
    """Families and configs to try, and the shapes of their tensors if they are known: what the source itself says, then
    what can be read off the graph."""
    origin = model.graph.meta.get("source")
    own = origin["path"] if isinstance(origin, Mapping) and origin.get("format") == "safetensors" else None
    if own is not None and Path(own).is_dir():
        source = Folder.open(Path(own))
        gone = ("quantization_config", "torch_dtype")  # what is written are numbers, in another dtype
        config = {key: value for key, value in source.config.items() if key not in gone}
        weights = source.weights()
        yield config["model_type"], config, {key: weights.shape(key) for key in list(weights.keys())}
    settings = read_settings(graph)
    first = graph.meta.get("model_type")
    for name in sorted(CLASSES, key=lambda name: name != first):
        yield name, propose(name, FAMILIES[name], settings), {}


def _rescaled(graph: Graph) -> Iterator[Graph]:
    """`graph` with the scales of attention in the queries' weights, where they can go and are not 1/√d already."""
    copy = graph.clone()
    changed = False
    for node in list(copy.nodes):
        scale = node.attrs.get("scale") if node.op.name == "attention" else None
        found = projections(node) if scale is not None else "it has the usual scale"
        if scale is None or isinstance(found, str) or not found.q.plain:
            continue
        factor, bias = scale * found.head_dim**0.5, found.q.bias
        scaled = None if bias is None else Scale(bias.recipe, factor)
        reweigh(found.q.linear, Scale(found.q.weight.recipe, factor), scaled)
        node.attrs["scale"], changed = None, True
    if changed:
        yield copy


def tensors_of(theirs: Graph, found: Match, layout: Layout) -> dict[str, Made]:
    """The tensors of the checkpoint whose model `theirs` was matched, over the parameters that it was matched with.

    Raises:
        WeftError: if a layout of the family has no inverse.
    """
    wanted = []
    for param in theirs.params.values():
        if param.name in found.params:
            shape, value = param.type.concrete({}), found.params[param.name]
            recipe = value.recipe if isinstance(value, Param) else Full(value, shape)
            wanted.append((param.recipe, Made(recipe, shape)))
    return inverted(wanted, layout)


def _layout(head: int, shapes: Mapping[str, Shape]) -> Layout:
    """The shapes of tensors that are reshaped when they are read: as known, or with a row of norms for each head."""

    def layout(key: str, count: int) -> Shape | None:
        if math.prod(shapes.get(key, (0,))) == count:
            return shapes[key]
        return (count // head, head) if "norm" in key else None

    return layout


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
    origin = model.graph.meta.get("source")
    path = Path(origin["path"]) / "generation_config.json" if isinstance(origin, Mapping) else None
    if path is not None and path.is_file():
        shutil.copyfile(path, folder / path.name)
    else:
        said = {key: value for key, value in _tokens(model).items() if value is not None}
        _write_json(folder / "generation_config.json", said)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
