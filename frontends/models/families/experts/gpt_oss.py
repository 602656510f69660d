"""gpt-oss: sinks, a window in every other layer, clamped and shifted experts with gate and up interleaved."""

from __future__ import annotations

from dataclasses import replace

from weft.ir.recipes import Permute, Recipe, Slice

from ....dsl import MoE, RoPE, Router
from ...tables import gguf
from ...tables.family import Config, Fetch, key, template
from ...tables.rope_config import read_gguf_rope, read_rope
from ...tables.settings import Settings
from ...tables.templates import find_experts
from ..dense.llama import LLAMA, alternate_windows

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_EXPERTS = "layers.{i}.mlp.experts"


@template
def _slice_interleaved(fetch: Fetch, part: str, settings: Settings, name: str, offset: int) -> Recipe:
    """Return gate (`offset` 0) or up (1), interleaved in tensor `name` [experts, dim, 2 · hidden], as
    [experts, hidden, dim]; for a bias [experts, 2 · hidden], as [experts, hidden]."""
    weight, last = fetch(name), 1 if part.endswith("bias") else 2
    mine = Slice(weight, last, offset, 2 * find_experts(settings).hidden, 2)
    return mine if last == 1 else Permute(mine, (0, 2, 1))


def _build_rope(config: Config) -> RoPE:
    scaled = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
    return read_rope({"rope_theta": 150_000.0, **config, "rope_parameters": scaled})


def _build_moe(config: Config) -> MoE:
    count, k = key("num_local_experts", "num_experts")(config), key("num_experts_per_tok", "experts_per_token")(config)
    act, limit = f"swish({config.get('swiglu_alpha', 1.702)})", config.get("swiglu_limit", 7.0)
    hidden = key("intermediate_size")(config)
    return MoE(count, hidden, k, act, bias=True, limit=limit, shift=1.0, router=Router(bias=True))


GPT_OSS = LLAMA.derive(
    "gpt_oss",
    inert=("initial_context_length", "experts_per_token"),
    names={
        "layers.{i}.attn.sinks": "layers.{i}.self_attn.sinks",
        "layers.{i}.ffn.router": "layers.{i}.mlp.router",
        "layers.{i}.ffn.experts.gate": _slice_interleaved(f"{_EXPERTS}.gate_up_proj", 0),
        "layers.{i}.ffn.experts.up": _slice_interleaved(f"{_EXPERTS}.gate_up_proj", 1),
        "layers.{i}.ffn.experts.gate_bias": _slice_interleaved(f"{_EXPERTS}.gate_up_proj_bias", 0),
        "layers.{i}.ffn.experts.up_bias": _slice_interleaved(f"{_EXPERTS}.gate_up_proj_bias", 1),
        # stored [experts, in, out]
        "layers.{i}.ffn.experts.down": lambda fetch, part, s: Permute(fetch(f"{_EXPERTS}.down_proj"), (0, 2, 1)),
        "layers.{i}.ffn.experts.down_bias": f"{_EXPERTS}.down_proj_bias",
    },
    defaults={"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
    rope=_build_rope,
    window=alternate_windows(2, window=128),
    sinks=True,
    moe=_build_moe,
    gguf=gguf.SPARSE_BASE.derive(
        "gpt-oss",
        names={
            "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
            "layers.{i}.ffn_norm": "blk.{i}.post_attention_norm",
        },
        rope=lambda c: replace(read_gguf_rope(c), truncate=False),
        window=gguf.build_windows(2),
        sinks=True,
        moe=gguf.build_experts(Router(bias=True), activation="swish(1.702)", bias=True, limit=7.0, shift=1.0),
    ),
)
