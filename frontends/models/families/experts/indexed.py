"""DeepSeek-V3.2 and GLM-5: latent attention to keys that an index selects (DeepSeek sparse attention, 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.ir.errors import WeftError

from ....dsl import MLA, LightningIndex
from ...tables import gguf
from ...tables.family import Config, key, rule
from .deepseek import DEEPSEEK_GGUF, DEEPSEEK_V3, build_gguf_mla, build_mla, make_moe_rule, make_v3_router

FULL, SHARED = "full", "shared"  # the types of indexes: a separate one, or that of an earlier layer


def read_index_types(config: Config) -> list[str]:
    """Return the type of each layer's index (full or shared): indexer_types, else the letters of index_topk_pattern.

    The default is full for every index_topk_freq-th layer from index_skip_topk_offset − 1 on, and for all before it.
    Raises WeftError for other types, fewer types than layers, or if the first type is not full.
    """
    layers, source = key("num_hidden_layers")(config), "indexer_types"
    types = config.get(source)
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        source, types = "index_topk_pattern", [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    if types is None:
        every, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        types = [SHARED if max(i + 1 - offset, 0) % every else FULL for i in range(layers)]
    if len(types) < layers or types[0] != FULL or not {FULL, SHARED}.issuperset(types):
        raise WeftError(f"{source}={types} must list full or shared for each of {layers} layers, first full")
    return list(types[:layers])


def _share_index(plain: MLA, index: LightningIndex, has_index: Sequence[bool]) -> tuple[MLA, ...]:
    """Return `plain` per layer: with `index` where `has_index` is true, else with the last such layer's selection."""
    keeping = replace(plain, index=index, keep_index="index")
    return tuple(
        replace(plain, share_index="index") if not has else keeping if not following else replace(plain, index=index)
        for has, following in zip(has_index, [*has_index[1:], True], strict=True)
    )


@rule
def make_index_rule(config: Config, heads: int, interleaved: bool) -> tuple[MLA, LightningIndex]:
    """Return latent attention, and its index with index_n_heads heads, by default `heads`. `interleaved` is a setting
    of the index's RoPE. Raise WeftError without q_lora_rank."""
    plain = build_mla({**config, "rope_interleave": True})
    if plain.q_rank is None or plain.rope is None:
        raise WeftError("q_lora_rank=None is not supported: the indexer reads queries of this rank")
    index = LightningIndex(
        key("index_n_heads", default=heads)(config),
        key("index_head_dim", default=128)(config),
        key("index_topk", default=2048)(config),
        replace(plain.rope, dim=plain.rope_dim, interleaved=interleaved),
    )
    return plain, index


_V32, _GLM = make_index_rule(64, interleaved=False), make_index_rule(32, interleaved=True)


def _build_indexed_mla(config: Config) -> MLA:
    """Return latent attention with an index, for all layers; raise WeftError if a layer has another type."""
    unsupported = next((kind for kind in config.get("layer_types") or () if kind != "indexed_attention"), None)
    if unsupported is not None:
        raise WeftError(f"layer_types has {unsupported!r}; only indexed_attention is supported")
    plain, index = _V32(config)
    return replace(plain, index=index)


def _build_gguf_mlas(config: Config) -> tuple[MLA, ...]:
    """Return each layer's latent attention; the file's key of index types, else its tensors, show who has an index."""
    plain, layers = build_gguf_mla(config), range(key("block_count")(config))
    assert plain.rope is not None
    index = LightningIndex(
        key("attention.indexer.head_count")(config),
        key("attention.indexer.key_length")(config),
        key("attention.indexer.top_k")(config),
        replace(plain.rope, dim=plain.rope_dim),
    )
    types, there = config.get("attention.indexer.types"), config[gguf.INDEXED]
    has_index = [i in there if types is None else bool(types[i]) for i in layers]
    if not has_index[0]:
        raise WeftError("tensor blk.0.indexer.proj is missing: the first layer needs an indexer")
    return _share_index(plain, index, has_index)


DEEPSEEK_V32 = DEEPSEEK_V3.derive(
    "deepseek_v32",
    names={
        "layers.{i}.attn.index.q": "layers.{i}.self_attn.indexer.wq_b",
        "layers.{i}.attn.index.k": "layers.{i}.self_attn.indexer.wk",
        "layers.{i}.attn.index.k_norm": "layers.{i}.self_attn.indexer.k_norm",
        "layers.{i}.attn.index.weights": "layers.{i}.self_attn.indexer.weights_proj",
    },
    mixer=_build_indexed_mla,
    moe=make_moe_rule(make_v3_router(), first_dense=3, shared=1),
)
GLM_MOE_DSA = DEEPSEEK_V32.derive(
    "glm_moe_dsa",
    inert=("num_key_value_heads", "head_dim", "layer_types"),
    defaults={"rms_norm_eps": 1e-5},
    unused=(*DEEPSEEK_V32.unused, "model.layers.78.*"),  # an extra layer, trained to predict two tokens ahead
    mixer=lambda c: _share_index(*_GLM(c), [kind == FULL for kind in read_index_types(c)]),
    moe=make_moe_rule(make_v3_router(groups=1, top_groups=1), first_dense=3, shared=1),
    gguf=DEEPSEEK_GGUF.derive(
        "glm-dsa",
        names={
            "layers.{i}.attn.index.q": "blk.{i}.indexer.attn_q_b",
            "layers.{i}.attn.index.k": "blk.{i}.indexer.attn_k",
            "layers.{i}.attn.index.k_norm": "blk.{i}.indexer.k_norm",
            "layers.{i}.attn.index.weights": "blk.{i}.indexer.proj",
        },
        mixer=_build_gguf_mlas,
    ),
)
