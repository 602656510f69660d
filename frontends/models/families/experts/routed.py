"""Mixtures with special routing or blocks: Llama 4, DBRX, Phi-3.5-MoE, JetMoE, LongCat-Flash."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.ir.recipes import Permute, Recipe, Reshape, Scale, Slice

from ....dsl import GatedMLP, Mask, MixtureOfAttention, MoE, RMSNorm, RoPE, Router, ShortcutBlock, Temperature
from ...tables import gguf
from ...tables.family import Config, Fetch, Template, key, mask_layers, read_nested, read_required, set_all, template
from ...tables.rope_config import find_rope, read_rope
from ...tables.settings import ACTIVATIONS, Settings
from ...tables.templates import find_experts, name_gated_mlp, slice_expert_half, slice_rows, split_qkv
from ..dense.llama import LLAMA, find_rotary_layers, rotate_listed
from .deepseek import DEEPSEEK_V3, build_mla, find_latent_attention, name_latent_attention
from .mixtral import MIXTRAL, map_expert_names, read_activation

# -- Llama 4


def _build_chunk_masks(config: Config) -> tuple[Mask | None, ...]:
    types = config.get("layer_types") or ["chunked_attention" if r else "full" for r in find_rotary_layers(config)]
    chunked = Mask(pattern="chunked", stride=config.get("attention_chunk_size") or 8192)
    return tuple(chunked if kind == "chunked_attention" else None for kind in types)


def _build_llama4_temperatures(config: Config) -> tuple[Temperature | None, ...]:
    tuned = config.get("attn_temperature_tuning", True)
    grown = Temperature(config.get("attn_scale", 0.1), config.get("floor_scale", 8192), offset=1)
    return tuple(None if r or not tuned else grown for r in find_rotary_layers(config))


def _find_llama4_sparse_layers(config: Config) -> list[bool]:
    layers, step = key("num_hidden_layers")(config), config.get("interleave_moe_layer_step", 1)
    chosen = config.get("moe_layers")
    return [i in chosen if chosen is not None else (i + 1) % step == 0 for i in range(layers)]


def _build_llama4_moe(config: Config) -> MoE:
    hidden, act = key("intermediate_size")(config), read_activation(config)
    count, k = key("num_local_experts", default=16)(config), key("num_experts_per_tok", default=1)(config)
    shared, router = GatedMLP(hidden, act), Router(scoring="sigmoid", renormalize=False)
    return MoE(count, hidden, k, act, weigh_input=True, shared=shared, router=router)


@template
def _transpose_half(fetch: Fetch, part: str, settings: Settings, name: str, index: int | None) -> Recipe:
    """Return half `index` of axis 2 (all of it for None) of tensor `name` [experts, in, out], as [experts, out, in]."""
    hidden, stored = find_experts(settings).hidden, fetch(name)
    if index is not None:
        stored = Slice(stored, 2, index * hidden, (index + 1) * hidden)
    return Permute(stored, (0, 2, 1))


_WINDOW = "attention.sliding_window"
_GGUF_CHUNKED = Mask(pattern="chunked", stride=8192)


def _find_gguf_chunks(config: Config) -> list[bool]:
    """Return for each layer whether it has RoPE: all layers if the window is 0, else the layers with chunks."""
    return [True] * config["block_count"] if config.get(_WINDOW) == 0 else gguf.find_local_layers(config, 4)


def _build_gguf_llama4_moe(config: Config) -> MoE:
    count, k, hidden = read_required(config, "expert_count", "expert_used_count", "expert_feed_forward_length")
    shared = GatedMLP(hidden)
    return MoE(count, hidden, k, weigh_input=True, shared=shared, router=Router(scoring="sigmoid", renormalize=False))


_FEED = "layers.{i}.feed_forward"
LLAMA4 = LLAMA.derive(
    "llama4_text",
    names={
        **name_gated_mlp("layers.{i}.ffn", _FEED),
        **name_gated_mlp("layers.{i}.ffn.shared", f"{_FEED}.shared_expert"),
        "layers.{i}.ffn.router": f"{_FEED}.router",
        "layers.{i}.ffn.experts.gate": _transpose_half(f"{_FEED}.experts.gate_up_proj", 0),
        "layers.{i}.ffn.experts.up": _transpose_half(f"{_FEED}.experts.gate_up_proj", 1),
        "layers.{i}.ffn.experts.down": _transpose_half(f"{_FEED}.experts.down_proj", None),
    },
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ffn=key("intermediate_size_mlp", default=16384),
    ffn_bias=False,
    rope=rotate_listed(rope_theta=5e5, interleaved=True),
    qk_norm=lambda c: tuple("head" if r and c.get("use_qk_norm", True) else "none" for r in find_rotary_layers(c)),
    qk_norm_last=True,
    qk_norm_weight=False,
    temperature=_build_llama4_temperatures,
    mask=_build_chunk_masks,
    moe=mask_layers(_build_llama4_moe, _find_llama4_sparse_layers),
    gguf=gguf.SPARSE_BASE.derive(
        "llama4",
        rope=lambda c: tuple(gguf.build_interleaved_rope(c) if local else None for local in _find_gguf_chunks(c)),
        # Only the model with 128 experts has no norms; files do not say so.
        qk_norm=lambda c: tuple("head" if r and c.get("expert_count") != 128 else "none" for r in _find_gguf_chunks(c)),
        from_keys={"qk_norm": None},
        qk_norm_last=True,
        qk_norm_weight=False,
        temperature=lambda c: tuple(None if r else Temperature(0.1, 8192, offset=1) for r in _find_gguf_chunks(c)),
        mask=lambda c: tuple(_GGUF_CHUNKED if r and c.get(_WINDOW) != 0 else None for r in _find_gguf_chunks(c)),
        moe=gguf.mask_unlisted(_build_gguf_llama4_moe, gguf.SPARSE),
    ),
)

# -- DBRX


def _build_dbrx_moe(config: Config) -> MoE:
    act = (read_nested("ffn_config", "ffn_act_fn", {})(config)).get("name", "silu")
    return MoE(
        read_nested("ffn_config", "moe_num_experts", 4)(config),
        read_nested("ffn_config", "ffn_hidden_size", 3584)(config),
        read_nested("ffn_config", "moe_top_k", 1)(config),
        ACTIVATIONS[act],
        router=Router(renormalize=config.get("ffn_config", {}).get("moe_normalize_expert_weights", 1.0) is not None),
    )


@template
def _split_experts(fetch: Fetch, part: str, settings: Settings, name: str, transpose: bool = False) -> Recipe:
    """Return all experts' rows as [experts, hidden, dim], or if `transpose` as [experts, dim, hidden]."""
    moe = find_experts(settings)
    rows = Reshape(fetch(name), (moe.experts, moe.hidden, -1))
    return Permute(rows, (0, 2, 1)) if transpose else rows


DBRX = LLAMA.derive(
    "dbrx",
    inert=("num_key_value_heads", "ffn_config.hidden_size"),
    names={
        "embed": "wte",
        "layers.{i}.attn_norm": "blocks.{i}.norm_attn_norm.norm_1",
        "layers.{i}.ffn_norm": "blocks.{i}.norm_attn_norm.norm_2",
        **split_qkv("layers.{i}.attn", "blocks.{i}.norm_attn_norm.attn.Wqkv"),
        "layers.{i}.attn.o": "blocks.{i}.norm_attn_norm.attn.out_proj",
        "layers.{i}.ffn.router": "blocks.{i}.ffn.router.layer",
        "layers.{i}.ffn.experts.gate": _split_experts("blocks.{i}.ffn.experts.mlp.w1"),
        "layers.{i}.ffn.experts.up": _split_experts("blocks.{i}.ffn.experts.mlp.v1"),
        "layers.{i}.ffn.experts.down": _split_experts("blocks.{i}.ffn.experts.mlp.w2", transpose=True),
        "final_norm": "norm_f",
    },
    prefix="transformer.",
    refuse={"ffn_config.moe_normalize_expert_weights": (1, None)},
    dim=key("d_model"),
    layers=key("n_layers"),
    heads=key("n_heads"),
    kv_heads=read_nested("attn_config", "kv_n_heads", 1),
    head_dim=None,
    ffn=None,
    context=key("max_seq_len", default=None),
    norm="layer",
    norm_bias=False,
    eps=1e-5,
    qkv_bias=False,
    out_bias=False,
    clip=read_nested("attn_config", "clip_qkv"),
    moe=_build_dbrx_moe,
    gguf=gguf.SPARSE_BASE.derive(
        "dbrx",
        names={**gguf.PACKED, "layers.{i}.ffn_norm": "blk.{i}.attn_output_norm"},
        norm="layer",
        from_keys={"norm_bias": lambda keys: False},
        clip=key("attention.clamp_kqv"),
        moe=gguf.build_experts(Router()),
    ),
)

# -- Phi-3.5-MoE


def _build_phimoe_rope(config: Config) -> RoPE:
    """Return the RoPE, with the amplitude short_mscale at all lengths if the frequencies are scaled."""
    config = {"rope_theta": 1e6, **config}
    settings = find_rope(config)
    if settings.get("rope_type", settings.get("type", "default")) == "default":
        return read_rope(config)
    return read_rope({**config, "rope_parameters": {**settings, "attention_factor": key("short_mscale")(settings)}})


PHIMOE = MIXTRAL.derive(
    "phimoe",
    aliases={"block_sparse_moe.gate": "mlp.router"},
    norm="layer",
    qkv_bias=key("attention_bias", default=False),
    out_bias=key("attention_bias", default=False),
    rope=_build_phimoe_rope,
    head_bias=key("lm_head_bias", default=False),
    moe=lambda c: replace(
        MIXTRAL.settings["moe"](c), router=Router("sparsemixer", jitter=float(c.get("router_jitter_noise", 0.01)))
    ),
    gguf=gguf.SPARSE_BASE.derive(
        "phimoe",
        norm="layer",
        window=lambda c: c.get(_WINDOW) or None,
        moe=gguf.build_experts(Router("sparsemixer", jitter=0.01)),  # llama.cpp leaves both out
    ),
)

# -- JetMoE


def _count_jet_experts(config: Config) -> tuple[int, int]:
    return key("num_local_experts", default=8)(config), key("num_experts_per_tok", default=2)(config)


def _build_moa(config: Config) -> MixtureOfAttention:
    kv, d = key("num_key_value_heads", default=16)(config), key("kv_channels", default=128)(config)
    return MixtureOfAttention(*_count_jet_experts(config), kv, d, read_rope({**config, "head_dim": d}))


def _build_jet_moe(config: Config) -> MoE:
    experts, k = _count_jet_experts(config)
    name = key("activation_function", default="silu")(config)
    return MoE(experts, key("intermediate_size")(config), k, ACTIVATIONS[name], out_bias=True)


@template
def _order_by_head(fetch: Fetch, part: str, settings: Settings, name: str, rows: bool) -> Recipe:
    """Return tensor `name` with the `rows` (else columns) of the experts by KV head: head 0 of every expert first."""
    mixer: MixtureOfAttention = settings.mixer
    experts, heads, d = mixer.experts, mixer.kv_heads, mixer.head_dim
    if rows:
        by_head = Permute(Reshape(fetch(name), (experts, heads, d, -1)), (1, 0, 2, 3))
        return Reshape(by_head, (heads * experts * d, -1))
    by_head = Permute(Reshape(fetch(name), (experts, settings.dim, heads, d)), (1, 2, 0, 3))
    return Reshape(by_head, (settings.dim, -1))


_MOA = "layers.{i}.self_attention.experts"
JETMOE = LLAMA.derive(
    "jetmoe",
    inert=("num_attention_heads",),
    names={
        "layers.{i}.attn.q": _order_by_head(f"{_MOA}.input_linear.weight", rows=True),
        "layers.{i}.attn.o": _order_by_head(f"{_MOA}.output_linear.weight", rows=False),
        **{
            f"layers.{{i}}.attn.{x}": slice_rows(
                "layers.{i}.self_attention.kv_proj", index, lambda s: s.mixer.kv_heads * s.mixer.head_dim
            )
            for index, x in enumerate("kv")
        },
        "layers.{i}.attn.bias": f"{_MOA}.bias",
        "layers.{i}.attn.router": f"{_MOA}.router.layer",
        "layers.{i}.ffn.router": "layers.{i}.mlp.router.layer",
        "layers.{i}.ffn.out_bias": "layers.{i}.mlp.bias",
        "layers.{i}.ffn.experts.gate": slice_expert_half("layers.{i}.mlp.input_linear.weight", 0),
        "layers.{i}.ffn.experts.up": slice_expert_half("layers.{i}.mlp.input_linear.weight", 1),
        "layers.{i}.ffn.experts.down": "layers.{i}.mlp.output_linear.weight",
    },
    refuse={"rms_norm_eps": (1e-6, None)},  # only the last norm would follow it
    **set_all(None, "heads", "kv_heads", "head_dim", "ffn", "rope"),
    mixer=_build_moa,
    moe=_build_jet_moe,
    defaults={"tie_word_embeddings": True},
)

# -- LongCat-Flash


@template
def _scale_latent(fetch: Fetch, part: str, settings: Settings, name: str, rank: str) -> Recipe:
    """Return the layer `name` times √(dim / r), where r is the field `rank` of the latent attention (LongCat)."""
    return Scale(fetch(f"{name}.{part}"), math.sqrt(settings.dim / getattr(find_latent_attention(settings), rank)))


def _build_longcat_block(config: Config) -> ShortcutBlock:
    experts, hidden, k = read_required(config, "n_routed_experts", "expert_ffn_hidden_size", "moe_topk")
    scale, zero = float(config.get("routed_scaling_factor", 6.0)), config.get("zero_expert_num") or 0
    router = Router(correction=True, renormalize=False, scale=scale, zero_experts=zero)
    moe = MoE(experts, hidden, k, read_activation(config), router)
    ffn = GatedMLP(key("ffn_hidden_size")(config), read_activation(config))
    latent = build_mla({"rope_theta": 1e7, **config, "rope_interleave": True})
    return ShortcutBlock(latent, ffn, moe, RMSNorm(key("rms_norm_eps", default=1e-5)(config)))


def _map_longcat_names(half: str, i: int) -> dict[str, str | Template]:
    at, theirs = f"layers.{{i}}.{half}.attn", f"layers.{{i}}.self_attn.{i}"
    return {
        f"layers.{{i}}.{half}.attn_norm": f"layers.{{i}}.input_layernorm.{i}",
        f"layers.{{i}}.{half}.ffn_norm": f"layers.{{i}}.post_attention_layernorm.{i}",
        **name_gated_mlp(f"layers.{{i}}.{half}.ffn", f"layers.{{i}}.mlps.{i}"),
        **name_latent_attention(at, theirs),
        f"{at}.q_up": _scale_latent(f"{theirs}.q_b_proj", "q_rank"),
        f"{at}.kv_norm": _scale_latent(f"{theirs}.kv_a_layernorm", "rank"),
        f"{at}.o": f"{theirs}.o_proj",
    }


LONGCAT_FLASH = DEEPSEEK_V3.derive(
    "longcat_flash",
    inert=("num_key_value_heads", "head_dim"),
    names={
        **_map_longcat_names("first", 0),
        **_map_longcat_names("second", 1),
        "layers.{i}.moe.router": "layers.{i}.mlp.router.classifier",
        "layers.{i}.moe.router.correction": "layers.{i}.mlp.router.e_score_correction_bias",
        **map_expert_names("layers.{i}.mlp.experts", "gate_proj", "up_proj", "down_proj", at="layers.{i}.moe"),
    },
    unused=(*LLAMA.unused, "model.mtp.*"),
    idle=("*.mlp.experts.*",),  # transformers also stores the identity experts
    layers=key("num_layers", "num_hidden_layers"),
    rope=None,
    ffn=None,
    defaults={"rms_norm_eps": 1e-5},
    block=_build_longcat_block,
    mixer=None,
    moe=None,
)
