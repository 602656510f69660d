"""DeepSeek-V3.2 and GLM-5: latent attention to the keys that an index chooses (DeepSeek sparse attention, 2025)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError

from ....dsl import MLA, LightningIndex
from ...tables.family import Config, Rule, key
from .deepseek import DEEPSEEK_V3, corrected, experts_after, mla

FULL, SHARED = "full", "shared"  # the types of indexes: of its own, or that of the layer before


def index_types(config: Config) -> list[str]:
    """The type of each layer's index: indexer_types, or index_topk_pattern (a letter per layer), or full for every
    index_topk_freq-th layer from the one before index_skip_topk_offset on, and all before that."""
    layers, said = key("num_hidden_layers")(config), "indexer_types"
    types = config.get(said)
    if types is None and (pattern := config.get("index_topk_pattern")) is not None:
        said, types = "index_topk_pattern", [{"F": FULL, "S": SHARED}.get(each, each) for each in pattern]
    if types is None:
        every, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        types = [SHARED if max(i + 1 - offset, 0) % every else FULL for i in range(layers)]
    if len(types) < layers or types[0] != FULL or not {FULL, SHARED}.issuperset(types):
        raise WeftError(f"{said}={types} must say full or shared for each of the {layers} layers, full for the first")
    return list(types[:layers])


def indexed(types: Callable[[Config], list[str]] | None, heads: int, interleaved: bool) -> Rule:
    """The rule for latent attention with an index of, by default, `heads` heads, in the layers that `types` call full;
    in all of them if that is None. RoPE of the index is `interleaved` or not, whatever that of attention is."""

    def rule(config: Config) -> MLA | tuple[MLA, ...]:
        plain = mla({**config, "rope_interleave": True})
        if plain.q_rank is None or plain.rope is None:
            raise WeftError("q_lora_rank=None is not supported: an index reads the latent of the queries")
        index = LightningIndex(
            key("index_n_heads", default=heads)(config),
            key("index_head_dim", default=128)(config),
            key("index_topk", default=2048)(config),
            replace(plain.rope, dim=plain.rope_dim, interleaved=interleaved),
        )
        if types is None:
            return replace(plain, index=index)
        found = types(config)
        own = replace(plain, index=index), replace(plain, index=index, keep_index="index")
        return tuple(
            replace(plain, share_index="index") if kind == SHARED else own[following == SHARED]
            for kind, following in zip(found, [*found[1:], FULL], strict=True)
        )

    return rule


def _everywhere(config: Config) -> Any:
    """Refuse layers of other types than those that have an index."""
    other = next((kind for kind in config.get("layer_types") or () if kind != "indexed_attention"), None)
    if other is not None:
        raise WeftError(f"layer_types has {other!r}; only indexed_attention is supported")
    return indexed(None, 64, interleaved=False)(config)


DEEPSEEK_V32 = DEEPSEEK_V3.but(
    "deepseek_v32",
    names={
        "layers.{i}.attn.index.q": "layers.{i}.self_attn.indexer.wq_b",
        "layers.{i}.attn.index.k": "layers.{i}.self_attn.indexer.wk",
        "layers.{i}.attn.index.k_norm": "layers.{i}.self_attn.indexer.k_norm",
        "layers.{i}.attn.index.weights": "layers.{i}.self_attn.indexer.weights_proj",
    },
    mixer=_everywhere,
    moe=experts_after(corrected(), first_dense=3, shared=1),
)
GLM_MOE_DSA = DEEPSEEK_V32.but(
    "glm_moe_dsa",
    eps=key("rms_norm_eps", default=1e-5),
    unused=(*DEEPSEEK_V32.unused, "model.layers.78.*"),  # a further layer, trained to predict two tokens ahead
    mixer=indexed(index_types, 32, interleaved=True),
    moe=experts_after(corrected(groups=1, top_groups=1), first_dense=3, shared=1),
)
