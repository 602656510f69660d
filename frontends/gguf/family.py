"""Families in GGUF files: llama.cpp's metadata keys and tensor names as tables of differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.frequencies import yarn_amplitude
from weft.ir.recipes import Map, Permute, Recipe, Reshape, Scale, Source

from ..dsl import RoPE
from ..families import Family, Loaded, Settings, load
from ..families.family import Fetch, Template, key
from .archive import GGUFArchive
from .tokenizer import TokenIds, has_tokenizer, token_ids

FREQUENCIES = "rope_freqs.weight"


def half_split(name: str, which: str) -> Template:
    """Rows of q or k from llama.cpp's order, pairs interleaved in every head, back to first and second halves."""

    def template(fetch: Fetch, part: str, s: Settings) -> Recipe:
        heads = s.groups if which == "k" else s.heads or 1
        half = s.head_size // 2
        rest = (-1,) if part == "weight" else ()
        axes = (0, 2, 1, 3)[: 3 + len(rest)]
        split = Permute(Reshape(fetch(f"{name}.{part}"), (heads, half, 2, *rest)), axes)
        return Reshape(split, (heads * half * 2, *rest))

    return template


def _rope(config: Mapping[str, Any]) -> RoPE:
    dim = config.get("rope.dimension_count")
    plain: dict[str, Any] = {"theta": config.get("rope.freq_base", 10_000.0), "dim": dim}
    kind, factor = config.get("rope.scaling.type", "none"), config.get("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0, 1):
        return RoPE(**plain)
    if kind == "linear":
        return RoPE(**plain, scaling="linear", factor=factor)
    if kind == "yarn":
        original = config.get("rope.scaling.original_context_length") or config["context_length"]
        amplitude = config.get("rope.scaling.attn_factor", 1.0) * yarn_amplitude(factor)
        return RoPE(**plain, scaling="yarn", factor=factor, original=original, amplitude=amplitude)
    raise WeftError(f"rope.scaling.type {kind!r} is not supported; known are none, linear, yarn")


def _has(*names: str) -> Callable[[frozenset[str]], bool]:
    return lambda keys: not keys.isdisjoint(names)


LLAMA = Family(
    model_types=("llama",),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("embedding_length"),
        "layers": key("block_count"),
        "heads": key("attention.head_count"),
        "kv_heads": key("attention.head_count_kv", default=None),
        "head_dim": key("attention.key_length", default=None),
        "ffn": key("feed_forward_length"),
        "eps": key("attention.layer_norm_rms_epsilon"),
        "context": key("context_length", default=None),
        "rope": _rope,
    },
    names={
        "embed": "token_embd",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.attn.q": half_split("blk.{i}.attn_q", "q"),
        "layers.{i}.attn.k": half_split("blk.{i}.attn_k", "k"),
        "layers.{i}.attn.v": "blk.{i}.attn_v",
        "layers.{i}.attn.o": "blk.{i}.attn_output",
        "layers.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.ffn_norm": "blk.{i}.ffn_norm",
        "layers.{i}.ffn.gate": "blk.{i}.ffn_gate",
        "layers.{i}.ffn.up": "blk.{i}.ffn_up",
        "layers.{i}.ffn.down": "blk.{i}.ffn_down",
        "final_norm": "output_norm",
        "lm_head": "output",
    },
    found={
        "tie": lambda keys: "output.weight" not in keys,
        "qkv_bias": _has("blk.0.attn_q.bias"),
        "out_bias": _has("blk.0.attn_output.bias"),
        "ffn_bias": _has("blk.0.ffn_up.bias"),
        "qk_norm": lambda keys: "head" if "blk.0.attn_q_norm.weight" in keys else "none",
    },
    unused=("*.attn_rot_embd", FREQUENCIES),
    refuse={"expert_count": (0, None)},
)
PLAIN = {"layers.{i}.attn.q": "blk.{i}.attn_q", "layers.{i}.attn.k": "blk.{i}.attn_k"}
QWEN2 = LLAMA.but("qwen2", names=PLAIN)
QWEN3 = QWEN2.but("qwen3")

FAMILIES = {f.model_types[0]: f for f in (LLAMA, QWEN2, QWEN3)}


def load_gguf(path: Path) -> tuple[GGUFArchive, Loaded]:
    """The model of the GGUF file at `path`, its parameters pointing at the weights.

    Raises:
        WeftError: naming the file and the key or tensor that is missing, unsound or not supported.
    """
    archive = GGUFArchive(path)
    name = archive.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise WeftError(f"{path}: architecture {name!r} is not known; weft imports {', '.join(FAMILIES)} from GGUF")
    config = _config(archive.metadata, f"{name}.")
    if "token_embd.weight" in set(archive.keys()):
        config.setdefault("vocab_size", archive.shape("token_embd.weight")[0])
    loaded = load(FAMILIES[name], config, archive, str(path))
    frequencies = loaded.graph.params.get("rope.frequencies")
    if frequencies is not None and FREQUENCIES in loaded.ignored:
        frequencies.recipe = Scale(frequencies.recipe, Map(Source(FREQUENCIES), "reciprocal"))
        loaded.ignored.remove(FREQUENCIES)
    ids = token_ids(archive.metadata) if has_tokenizer(archive.metadata) else TokenIds(None, [], None, False, False)
    loaded.graph.meta.update(
        eos_token_ids=list(ids.eos),
        bos_token_id=ids.bos,
        pad_token_id=ids.pad,
        source={"format": "gguf", "path": str(path)},
    )
    return archive, loaded


def _config(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The architecture's keys without their prefix; float32 numbers as the decimals they stand for."""
    found = {k.removeprefix(prefix): _decimal(v) for k, v in metadata.items() if k.startswith(prefix)}
    if "tokenizer.ggml.tokens" in metadata:
        found.setdefault("vocab_size", len(metadata["tokenizer.ggml.tokens"]))
    return found


def _decimal(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value
