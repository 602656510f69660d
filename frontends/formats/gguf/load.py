"""Load a GGUF file as a model: its metadata selects an architecture's table, its tensors are the weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.runtime.core.sampler import read_sampling_defaults
from weft.ir.errors import WeftError
from weft.ir.recipes import Map, Scale, Source
from weft.ir.storage.documents import Record, quote_value

from ...models.families import LoadedModel, index_tables, load
from ...models.left_out import LeftOut, find_unread_modules
from ...models.tables.gguf import BIASED, GATED, INDEXED, NORMED, RECURRENT, SPARSE, VALUED
from ...models.tables.rope_config import FREQUENCIES, LONG, SHORT
from .reader import GGUFTensors
from .tokenizer import TokenIds, has_tokenizer, read_token_ids

# For each list of layers in the config, the tensor that exists in exactly these layers.
LAYER_TENSORS = {
    SPARSE: "ffn_gate_inp",
    RECURRENT: "ssm_in",
    NORMED: "ssm_norm",
    INDEXED: "indexer.proj",
    VALUED: "attn_v",
    BIASED: "attn_rel_b",
    GATED: "ffn_gate",
}

# Regular expressions for metadata keys (without the architecture prefix), by the reason why they are not reported.
_KNOWN = {
    "is read": r"general\.(architecture|alignment|sampling\.(temp|top_k|top_p|min_p|penalty_repeat)) split\..+ "
    r"tokenizer\.ggml\.(model|pre|tokens|token_type|scores|merges|precompiled_charsmap|remove_extra_whitespaces) "
    r"xielu\..+ tokenizer\.ggml\.(bos|eos|eot|eom|unknown|seperator|padding|cls|mask)_token_id "
    r"tokenizer\.ggml\.add_(bos_token|eos_token|space_prefix) tokenizer\.chat_template",
    "describes the file": r"general\.(type|name|author|version|organization|finetune|basename|description|quantized_by"
    r"|size_label|license|url|doi|uuid|repo_url|source|base_model|datasets?|tags|languages|file_type"
    r"|quantization_version)(\..+)? (quantize\.)?imatrix\..+ mradermacher\..+",
    "is in the tensors": r"tokenizer\.ggml\.token_type_count",
    "is the same tokenizer for other engines": r"tokenizer\.huggingface\.json tokenizer\.rwkv\.world",
    "is about pairs of sequences, which no head of GGUF files reads": r"tokenizer\.ggml\.add_sep_token",
}
_KNOWN_KEYS = re.compile("|".join(" ".join(_KNOWN.values()).split()))
_SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"} | {
    k: k for k in ("top_k", "top_p", "min_p")
}
POOLINGS = ("none", "mean", "cls", "last")  # of llama.cpp, by number

DERIVED_KEYS = (*LAYER_TENSORS, "vocab_size", "token_types", FREQUENCIES, SHORT, LONG)


def load_gguf(path: Path) -> tuple[GGUFTensors, LoadedModel]:
    """Return a reader of the GGUF file at `path`, and its model, whose parameters read tensors on demand.

    Raises:
        WeftError: naming the file and the key or tensor that is missing, unsound or not supported.
    """
    reader = GGUFTensors(path)
    name, families = reader.metadata.get("general.architecture"), index_tables()
    if not isinstance(name, str) or name not in families:
        raise WeftError(
            f"{path}: general.architecture {quote_value(name)} is not supported; "
            f"weft imports {', '.join(sorted(families))} from GGUF"
        )
    config = _read_config(reader, f"{name}.")
    loaded = load(families[name], config, reader, str(path))
    frequencies = loaded.graph.params.get("rope.frequencies")
    if frequencies is not None and FREQUENCIES in loaded.ignored and FREQUENCIES not in config:
        # The tensor has divisors of the frequencies (Llama 3's scaling).
        frequencies.recipe = Scale(frequencies.recipe, Map(Source(FREQUENCIES), "reciprocal"))
        loaded.ignored.remove(FREQUENCIES)
    if config.get("nextn_predict_layers"):
        layers = range(loaded.settings.layers, loaded.settings.layers + config["nextn_predict_layers"])
        prefixes = tuple(f"blk.{i}." for i in layers)
        loaded.ignored.extend(key for key in loaded.unread if key.startswith(prefixes))
        loaded.unread[:] = [key for key in loaded.unread if not key.startswith(prefixes)]
    loaded.ignored[:] = [name for name in loaded.ignored if name not in config]
    if loaded.settings.kind == "encoder" and (pooling := config.get("pooling_type")) in (1, 2, 3):
        loaded.graph.meta["pooling"] = POOLINGS[pooling]
        del config["pooling_type"]
    loaded.left_out[:] = [*_find_unread(loaded, name, config), *_list_metadata(reader.metadata, name)]
    ids = read_token_ids(reader.metadata) if has_tokenizer(reader.metadata) else TokenIds(None, [], None, False, False)
    loaded.graph.meta.update(
        eos_token_ids=list(ids.eos),
        bos_token_id=ids.bos,
        pad_token_id=ids.pad,
        source={"format": "gguf", "path": str(path)},
    )
    metadata = {k: _to_decimal(v) for k, v in reader.metadata.items() if k.startswith("general.sampling.")}
    names = {ours: f"general.sampling.{k}" for ours, k in _SAMPLING.items()}
    if sampling := read_sampling_defaults(Record(path, metadata), names):
        loaded.graph.meta["sampling"] = sampling
    if (start := config.get("decoder_start_token_id")) is not None:
        loaded.graph.meta["decoder_start_token_id"] = start
    return reader, loaded


def _find_unread(loaded: LoadedModel, architecture: str, unread_keys: Collection[str]) -> Iterator[LeftOut]:
    """Yield the unread tensors of `loaded`, and its unread keys that are in `unread_keys`, with the prefix
    `architecture`. Skip keys that weft derived from tensors, and keys of RoPE if the graph has no RoPE."""
    yield from find_unread_modules(loaded.unread, [k for p in loaded.graph.params.values() for k in p.recipe.sources()])
    rotates = any(node.op.name == "rope" for node in loaded.graph.nodes)
    for part in loaded.left_out:
        is_idle = part.name.startswith("rope.") and not rotates
        expected = part.name in DERIVED_KEYS or part.name not in unread_keys or is_idle
        if part.kind == "key" and not expected:
            yield replace(part, name=f"{architecture}.{part.name}")


def _list_metadata(metadata: Mapping[str, Any], architecture: str) -> Iterator[LeftOut]:
    """Yield the keys of `metadata` that nothing reads; skip keys with the prefix of the `architecture`."""
    for key, value in metadata.items():
        if not key.startswith(f"{architecture}.") and not _KNOWN_KEYS.fullmatch(key):
            yield LeftOut("key", key, quote_value(value))


def _read_config(reader: GGUFTensors, prefix: str) -> dict[str, Any]:
    """Return the metadata keys with `prefix`, without it; float32 values become their shortest decimals. Facts that
    only the tensors state are added: the vocabulary size, the number of token types, the lists of layers of
    `LAYER_TENSORS`, and RoPE's factors. Layers that predict later tokens are subtracted from block_count."""
    prefixes = (prefix, "xielu.")  # the keys of this activation do not have the architecture's prefix
    config = {k.removeprefix(prefix): _to_decimal(v) for k, v in reader.metadata.items() if k.startswith(prefixes)}
    if config.get("rope.scaling.type") == "none":
        del config["rope.scaling.type"]
    # Layers that are trained to predict later tokens come last.
    if isinstance(extra := config.get("nextn_predict_layers"), int) and isinstance(config.get("block_count"), int):
        config["block_count"] -= extra
    keys = set(reader.keys())
    if isinstance(tokens := reader.metadata.get("tokenizer.ggml.tokens"), list):
        config.setdefault("vocab_size", len(tokens))
    for name, tensor in (("vocab_size", "token_embd.weight"), ("token_types", "token_types.weight")):
        if tensor in keys:
            config.setdefault(name, reader.shape(tensor)[0])
    for kind, tensor in LAYER_TENSORS.items():
        pattern = re.compile(rf"(?:enc\.)?blk\.(\d{{1,9}})\.{tensor}\.weight")
        config[kind] = sorted(int(match[1]) for key in keys if (match := pattern.fullmatch(key)))
    for tensor in keys & {SHORT, LONG, *([FREQUENCIES] if prefix == "gemma4." else [])}:
        config[tensor] = tuple(_to_decimal(float(f)) for f in reader.read(tensor, 0, reader.shape(tensor)[0]))
    return config


def _to_decimal(value: Any) -> Any:
    # 1e-05 in float32 is 9.99999974e-06 as a Python float; the shortest decimal is the intended value.
    return float(str(np.float32(value))) if isinstance(value, float) else value
