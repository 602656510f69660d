"""Facts about a compiled folder, read from weft.json or the genai_config.json of onnxruntime-genai's builder.

Folders record every state in weft.json; generated PyTorch modules name the growth of their caches. For older models
and folders of onnxruntime-genai's builder, states are inferred from the names of inputs and classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.schema.states import Growth
from weft.ir.storage import MANIFEST as MANIFEST
from weft.ir.storage import check_format
from weft.ir.storage.documents import Record

from ..folder_facts import Embedding, FolderFacts, Sound, StateRecord, Task
from ..target import TARGETS
from .core.sampler import read_sampling_defaults

GENAI = "genai_config.json"
_ENCODED = {"image-encoder": "images", "audio-encoder": "sound"}
GENAI_TARGET = "onnx"  # the builder names no target: its models run on any device


def read_facts(folder: str | Path) -> FolderFacts:
    """Return the facts of a compiled folder, read from its weft.json or else its genai_config.json. Raises WeftError if
    the folder or a file is missing, or a value is missing or of the wrong type."""
    folder = Path(folder)
    if not folder.is_dir():
        raise WeftError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if (folder / MANIFEST).is_file():
        facts = _read_weft_folder(folder)
    elif (folder / GENAI).is_file():
        facts = _read_genai_folder(folder)
    else:
        raise WeftError(f"{folder}: no {MANIFEST} in it, so it is not a compiled model; create one with `weft compile`")
    for file in facts.files:
        if not file.is_file():
            raise WeftError(f"{file}: no such file, though {folder} is described as a compiled model; compile again")
    return facts


def read_manifest(folder: Path) -> Record:
    """Return the weft.json in `folder`, or an empty record if the file is missing. Raises WeftError if it is broken, or
    its format is newer than this weft."""
    path = folder / MANIFEST
    if not path.is_file():
        return Record(path, {})
    manifest = Record.read(path)
    check_format(path, manifest.data)
    return manifest


def _read_weft_folder(folder: Path) -> FolderFacts:
    data = read_manifest(folder)
    if (kind := data.get("kind", str, "")) in _ENCODED:
        raise WeftError(
            f"{folder} encodes {_ENCODED[kind]}, not texts: run its model with ONNX Runtime or PyTorch itself"
        )
    kind = data.choice("kind", ("decoder", "encoder", "encoder-decoder"))
    target = data.choice("target", tuple(TARGETS))
    optional: dict[str, Any] = {}
    if kind == "encoder-decoder" and "layout" in data:
        raise WeftError(
            f"weft cannot run {folder}, an encoder-decoder in the layout of optimum: load it with optimum or "
            f"transformers.js, or compile its source without this layout"
        )
    if kind == "encoder":
        optional = {name: data.get(name, of) for name, of in (("pooling", str), ("normalize", bool)) if name in data}
        optional["embedding"] = _read_embedding(data, data.record("sentence", {}))
        optional["task"] = _read_task(data)
    if kind == "encoder-decoder":
        optional["start"] = data.integer("decoder_start_token_id", least=0)
        optional["max_source"] = data.integer("max_source_length", least=1)
        if "sound" in data:
            sound = data.record("sound")
            bins, length = (sound.integer(name, None, least=1) for name in ("bins", "length"))
            optional["sound"] = Sound(sound.text("input"), bins, length)
    if kind != "encoder":
        optional["forced"] = _read_forced(data, begins=kind == "encoder-decoder")
    if "sampling" in data:
        sampling = data.record("sampling")
        most = sampling.integer("max_tokens", None, least=1)
        optional["defaults"] = read_sampling_defaults(sampling) | ({} if most is None else {"max_tokens": most})
    if "outputs" in data:
        optional["outputs"] = tuple(data.get("outputs", list[str]))
    caches, adapters = data.records("cache", []), data.get("adapters", dict[str, str], {})
    return FolderFacts(
        folder=folder,
        files=tuple(folder / name for name in data.get("models", list[str], TARGETS[target].files(kind))),
        kind=kind,
        target=target,
        vocab=data.integer("vocab", least=1),
        max_length=data.integer("max_length", least=1),
        eos=frozenset(data.tokens("eos_token_ids")),
        compares=data.flag("compares_tokens", False),
        compares_above=data.integer("compares_above", 0, least=0),
        keeps_blocks=bool(data.text("kept_blocks", "")),
        rounds=data.choice("arithmetic", ("", "int8"), "") == "int8",
        states=read_states(data),
        adapters={name: _resolve_file(folder / MANIFEST, file) for name, file in adapters.items()},
        rolling=frozenset(i for i, cache in enumerate(caches) if cache.flag("rolling", False)),
        **optional,
    )


def _read_embedding(data: Record, sentence: Record) -> Embedding:
    kinds = [module.text("type") for module in sentence.records("modules", [])]
    prompts = {"query": "", "document": "", **sentence.get("prompts", dict[str, str], {})}
    default = sentence.choice("default_prompt_name", tuple(prompts), None)
    dim, include = sentence.integer("truncate_dim", None, least=1), sentence.flag("include_prompt", True)
    pad = data.integer("pad_token_id", None, least=0) or 0 if data.choice("padding", ("max_length",), None) else None
    return Embedding(prompts, default, dim, include, "pooling" not in data, kinds[-1:] == ["Normalize"], pad)


def _read_task(data: Record) -> Task | None:
    if "task" not in data:
        return None
    labels = tuple(data.get("labels", list[str], []))
    default = "multi_label_classification" if len(labels) == 1 else "single_label_classification"
    rank = data.record("rank", {})
    return Task(
        data.text("task"),
        labels,
        data.text("problem_type", default),
        rank.text("activation", "sigmoid"),
        rank.flag("template", False),
        rank.text("prompt", ""),
    )


def _read_forced(data: Record, begins: bool) -> dict[str, Any]:
    """Return the arguments of `TokenRules` that the manifest `data` implies. If `begins` is False (a decoder), forced
    first tokens are ignored: transformers forces none after a prompt."""
    first, last = (data.tokens(f"forced_{name}_token_id") for name in ("bos", "eos"))
    begin = [place.tokens("any_of") for place in data.records("begin_tokens", [])] or ([[min(first)]] if first else [])
    begin = begin if begins else []
    vocab = data.integer("vocab")
    if max((token for place in begin for token in place), default=0) >= vocab:
        culprit = "begin_tokens" if "begin_tokens" in data else "forced_bos_token_id"
        raise data.build_type_error(culprit, f"the model has {vocab} tokens")
    # Transformers ignores ids outside the vocabulary.
    names = {"never": "suppress_tokens", "never_first": "begin_suppress_tokens"}
    never = {field: tuple(token for token in data.tokens(name) if token < vocab) for field, name in names.items()}
    return {"begin": tuple(map(tuple, begin)), "last": min(last, default=None), **never}


def _read_genai_folder(folder: Path) -> FolderFacts:
    model = Record.read(folder / GENAI).record("model")
    decoder = model.record("decoder")
    sliding = decoder.record("sliding_window", {})
    return FolderFacts(
        folder=folder,
        files=(_resolve_file(folder / GENAI, decoder.text("filename")),),
        kind="decoder",
        target=GENAI_TARGET,
        vocab=model.integer("vocab_size", least=1),
        max_length=model.integer("context_length", least=1),
        eos=frozenset(model.tokens("eos_token_id")),
        head_dim=decoder.integer("head_size", None, least=1),
        rolling=frozenset(sliding.tokens("layers")),
    )


def _resolve_file(path: Path, name: str) -> Path:
    """Return the path of the file `name` next to the config at `path`. Raises WeftError if `name` has a folder part or
    is a symbolic link: the file could be anywhere."""
    if Path(name).name != name or (path.parent / name).is_symlink():
        raise WeftError(
            f"{path}: filename is {name!r}, but it must be the name of a file in the same folder, and not a link"
        )
    return path.parent / name


def read_states(manifest: Record) -> tuple[StateRecord, ...]:
    """Return the states that a manifest records with a graph input; () without such records, as in older manifests.
    Raises WeftError if a record is broken."""
    growths = tuple(growth.value for growth in Growth)
    return tuple(
        StateRecord(
            record.text("input"),
            record.text("output"),
            Growth(record.choice("growth", growths)),
            float(record.get("initial", float, 0.0)),
        )
        for record in manifest.records("carried", [])
        if "input" in record
    )


_CACHE, _STATE = re.compile(r"past_key_values\.(\d+)\.(?:key|value)"), re.compile(r"past_states\.\d+\.\w+")


def infer_states(inputs: Iterable[str], rolling: Collection[int] = ()) -> tuple[StateRecord, ...]:
    """Return the states among the `inputs` of a graph: names past_key_values.{i}.key|value and past_states.{i}.{part}.
    `rolling` has the indices i of rolling caches. Other inputs are ignored."""
    states = []
    for name in inputs:
        if (cache := _CACHE.fullmatch(name)) is not None:
            growth = Growth.WINDOW if int(cache[1]) in rolling else Growth.TEXT
            states.append(StateRecord(name, name.replace("past_key_values", "present"), growth))
        elif _STATE.fullmatch(name):
            states.append(StateRecord(name, name.replace("past_states", "present_states"), Growth.CONSTANT))
    return tuple(states)


_CLASSES = {
    **dict.fromkeys(("KVCache", "KeyCache"), Growth.TEXT),
    **dict.fromkeys(("RollingKVCache", "RollingKeyCache"), Growth.WINDOW),
    **{"State": Growth.CONSTANT, "CrossCache": Growth.SOURCE},
}


def get_growth(layer: Any) -> Growth:
    """Return the growth of `layer`, a cache object of a generated module: its attribute `growth`, or for modules of
    older versions, which lack it, the growth that the name of the class implies."""
    return Growth(layer.growth) if hasattr(layer, "growth") else _CLASSES[type(layer).__name__]
