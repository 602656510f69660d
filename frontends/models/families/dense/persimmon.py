"""Persimmon, CodeGen and DiffLlama: projections in unusual layouts, differences of attention maps."""

from __future__ import annotations

from weft.ir.recipes import Recipe, Reshape, Slice

from ....dsl import DifferentialAttention
from ...tables.family import BIASES, Config, Fetch, key, set_all, template
from ...tables.rope_config import read_rope, rope_with
from ...tables.settings import Settings
from ...tables.templates import split_qkv
from .eleuther import GPTJ
from .llama import LLAMA

PERSIMMON = LLAMA.derive(
    "persimmon",
    kv_heads=None,
    norm="layer",
    eps=key("layer_norm_eps", default=1e-5),
    qk_norm=lambda config: "head" if config.get("qk_layernorm", True) else "none",
    **set_all(True, *BIASES),
    rope=rope_with(partial_rotary_factor=0.5),
    defaults={"hidden_act": "relu2"},
    gated=False,
    names={
        **split_qkv("layers.{i}.attn", "layers.{i}.self_attn.query_key_value", grouped=True),
        "layers.{i}.attn.o": "layers.{i}.self_attn.dense",
        "layers.{i}.attn.q_norm": "layers.{i}.self_attn.q_layernorm",
        "layers.{i}.attn.k_norm": "layers.{i}.self_attn.k_layernorm",
        "layers.{i}.ffn.up": "layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.ffn.down": "layers.{i}.mlp.dense_4h_to_h",
        "final_norm": "final_layernorm",
    },
    transformers="PersimmonForCausalLM",
)


@template
def _merge_device_parts(fetch: Fetch, part: str, settings: Settings, which: int) -> Recipe:
    """Return CodeGen's q (`which` 0), v (1) or k (2); the tensor has q, v and k of each of four devices."""
    by_device = Reshape(fetch(f"h.{{i}}.attn.qkv_proj.{part}"), (4, 3, settings.dim // 4, -1))
    return Reshape(Slice(by_device, 1, which, which + 1), (settings.dim, -1))


CODEGEN = GPTJ.derive(
    "codegen",
    names={f"layers.{{i}}.attn.{name}": _merge_device_parts(which) for which, name in enumerate("qvk")},
    transformers="CodeGenForCausalLM",
)


def _build_differential_attention(config: Config) -> tuple[DifferentialAttention, ...]:
    heads, layers = key("num_attention_heads")(config), key("num_hidden_layers")(config)
    return tuple(
        DifferentialAttention(
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim"),
            read_rope(config),
            DifferentialAttention.lambda_of(i),
            key("rms_norm_eps", default=1e-5)(config),
            config.get("attention_bias", False),
        )
        for i in range(layers)
    )


DIFFLLAMA = LLAMA.derive(
    "diffllama",
    names={f"layers.{{i}}.attn.lambda_{x}{i}": f"layers.{{i}}.self_attn.lambda_{x}{i}" for x in "qk" for i in (1, 2)},
    defaults={"rms_norm_eps": 1e-5},
    ffn_bias=False,
    heads=None,
    kv_heads=None,
    mixer=_build_differential_attention,
)
