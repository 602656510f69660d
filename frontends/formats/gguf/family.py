"""Families in GGUF files: llama.cpp's metadata keys and tensor names as tables of differences.

llama.cpp calls the same thing by the same name in every architecture, so one table of names and of what the tensors
decide serves them all; an architecture adds what neither its metadata nor its tensors say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.recipes import Permute, Recipe, Reshape

from ...dsl import ALiBi, RoPE
from ...models.families import Family, Settings
from ...models.tables.family import Config, Families, Fetch, Template, key
from ...models.tables.rope_config import FREQUENCIES, LONG, SHORT, rope_of_gguf
from ...models.tables.templates import flattened, half, packed_parts
from . import sparse

Keys = frozenset[str]


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


def _context(config: Config) -> Any:
    """The original context where longer texts need other frequencies."""
    return config.get("rope.scaling.original_context_length" if LONG in config else "context_length")


def _has(*names: str) -> Callable[[Keys], bool]:
    return lambda keys: not keys.isdisjoint(names)


def _windows(every: int) -> Callable[[Config], Any]:
    """Local layers: those that attention.sliding_window_pattern says, or all but each `every`-th."""

    def rule(config: Config) -> tuple[int | None, ...] | None:
        window = config.get("attention.sliding_window")
        if not window:
            return None
        pattern, layers = config.get("attention.sliding_window_pattern", every), range(config["block_count"])
        local = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in layers]
        return tuple(window if found else None for found in local)

    return rule


BASE = Family(
    model_types=("qwen2",),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("embedding_length"),
        "layers": key("block_count"),
        "heads": key("attention.head_count"),
        "kv_heads": key("attention.head_count_kv", default=None),
        "head_dim": key("attention.key_length", default=None),
        "ffn": key("feed_forward_length"),
        "eps": key("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        "context": _context,
        "rope": rope_of_gguf,
    },
    names={
        "embed": "token_embd",
        "embed_norm": "token_embd_norm",
        "positions": "position_embd",
        "token_types": "token_types",
        "layers.{i}.norm": "blk.{i}.attn_norm",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.attn.q": "blk.{i}.attn_q",
        "layers.{i}.attn.k": "blk.{i}.attn_k",
        "layers.{i}.attn.v": "blk.{i}.attn_v",
        "layers.{i}.attn.o": "blk.{i}.attn_output",
        "layers.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.ffn_norm": "blk.{i}.ffn_norm",
        "layers.{i}.ffn.gate": "blk.{i}.ffn_gate",
        "layers.{i}.ffn.up": "blk.{i}.ffn_up",
        "layers.{i}.ffn.down": "blk.{i}.ffn_down",
        "layers.{i}.ffn_post_norm": "blk.{i}.post_ffw_norm",
        "final_norm": "output_norm",
        "lm_head": "output",
    },
    found={
        "tie": lambda keys: "output.weight" not in keys,
        "qkv_bias": _has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "out_bias": _has("blk.0.attn_output.bias"),
        "ffn_bias": _has("blk.0.ffn_up.bias"),
        "head_bias": _has("output.bias"),
        "norm_bias": _has("blk.0.attn_norm.bias", "blk.0.attn_output_norm.bias"),
        "qk_norm": lambda keys: "head" if "blk.0.attn_q_norm.weight" in keys else "none",
    },
    unused=("*.attn_rot_embd", FREQUENCIES, SHORT, LONG),
    refuse={"expert_count": (0, None)},
)

QWEN3 = BASE.but("qwen3")

# -- q and k with interleaved pairs

LLAMA = BASE.but(  # with experts, Mixtral
    "llama",
    names={**sparse.EXPERTS, **{f"layers.{{i}}.attn.{x}": half_split(f"blk.{{i}}.attn_{x}", x) for x in "qk"}},
    refuse=sparse.KNOWN,
    moe=sparse.experts(renormalize=True),
)
GRANITE = LLAMA.but(
    "granite",
    embed_scale=key("embedding_scale", default=1.0),
    scale=key("attention.scale", default=None),
    residual_scale=key("residual_scale", default=1.0),
    logit_scale=lambda c: 1 / key("logit_scale")(c),
)
GRANITE_MOE = GRANITE.but("granitemoe")
OLMO = LLAMA.but("olmo", norm="layer", norm_weight=False, clip=key("attention.clamp_kqv", default=None))
SMOLLM3 = LLAMA.but(
    "smollm3",
    rope=lambda c: tuple(rope_of_gguf(c) if (i + 1) % 4 else None for i in range(c["block_count"])),
)

# -- pre-norm and its relatives


def _gemma_scale(layers_of_27b: int) -> Callable[[Config], float]:
    """By the size of the heads, but for the model of 27 B, whose heads are smaller than their share of the width."""

    def rule(config: Config) -> float:
        share = key("embedding_length")(config) // key("attention.head_count")(config)
        wide = config["block_count"] == layers_of_27b
        return float((share if wide else config.get("attention.key_length", share)) ** -0.5)

    return rule


def _gemma3_ropes(config: Config) -> Any:
    """Local layers have a base of their own and no scaling."""
    wide = rope_of_gguf(config)
    local = RoPE(config.get("rope.freq_base_swa", 10_000.0), wide.dim)
    windows = _windows(6)(config)
    return wide if windows is None else tuple(wide if window is None else local for window in windows)


GEMMA = BASE.but("gemma", activation="gelu_pytorch_tanh", embed_scale=lambda c: math.sqrt(c["embedding_length"]))
GEMMA2 = GEMMA.but(
    "gemma2",
    arrangement="sandwich",
    scale=_gemma_scale(46),
    softcap=lambda c: c.get("attn_logit_softcapping", 50.0) or None,
    logit_softcap=lambda c: c.get("final_logit_softcapping", 30.0) or None,
    window=lambda c: _windows(2)({"attention.sliding_window": 4096, **c}),
)
GEMMA3 = GEMMA2.but(
    "gemma3",
    scale=_gemma_scale(62),
    softcap=None,
    logit_softcap=lambda c: c.get("final_logit_softcapping") or None,
    rope=_gemma3_ropes,
    window=_windows(6),
)
OLMO2 = BASE.but("olmo2", found={"qk_norm": lambda keys: "full"}, arrangement="post_sublayer")
COHERE = BASE.but(
    "command-r",
    names={f"layers.{{i}}.attn.{x}_norm": flattened(f"blk.{{i}}.attn_{x}_norm") for x in "qk"},
    found={"qk_norm": lambda keys: "each" if "blk.0.attn_q_norm.weight" in keys else "none"},
    norm="layer",
    arrangement="parallel",
    rope=lambda c: replace(rope_of_gguf(c), interleaved=True),
    logit_scale=key("logit_scale"),
)
STABLELM = BASE.but(
    "stablelm",
    names=COHERE.names,
    found={
        "qk_norm": COHERE.found["qk_norm"],
        "arrangement": lambda keys: "pre" if "blk.0.ffn_norm.weight" in keys else "parallel",
    },
    norm="layer",
)
UNGATED = BASE.but("starcoder2", norm="layer", activation="gelu_new", gated=False)
PHI2 = UNGATED.but("phi2", arrangement="parallel")

# -- q, k and v in one tensor

PACKED = packed_parts("layers.{i}.attn", "blk.{i}.attn_qkv")

PHI3 = BASE.but(
    "phi3",
    names={
        **PACKED,
        "layers.{i}.ffn.gate": half("blk.{i}.ffn_up", 0),
        "layers.{i}.ffn.up": half("blk.{i}.ffn_up", 1),
    },
    window=lambda c: c.get("attention.sliding_window") or None,
)
GPT2 = UNGATED.but("gpt2", names=PACKED, rope=None, learned_positions=key("context_length"))
STARCODER = GPT2.but("starcoder")
BLOOM = UNGATED.but("bloom", names=PACKED, rope=None, bias=lambda c: ALiBi(), embed_norm=True)
MPT = BLOOM.but(
    "mpt",
    activation="gelu",
    embed_norm=False,
    bias=lambda c: ALiBi(c.get("attention.max_alibi_bias") or 8.0),
    clip=key("attention.clamp_kqv", default=None),
)
GPT_NEOX = UNGATED.but(
    "gptneox",
    names=PACKED,
    activation="gelu",
    arrangement=lambda c: "parallel_norms" if c.get("use_parallel_residual", True) else "pre",
)
FALCON = UNGATED.but(
    "falcon",
    names={**PACKED, "layers.{i}.attn_norm": "blk.{i}.attn_norm_2", "layers.{i}.ffn_norm": "blk.{i}.attn_norm"},
    found={"arrangement": lambda keys: "parallel_norms" if "blk.0.attn_norm_2.weight" in keys else "parallel"},
    activation="gelu",
)

# -- experts, latent attention, state spaces

QWEN2_MOE = BASE.but(
    "qwen2moe", names=sparse.EXPERTS, refuse=sparse.KNOWN, moe=sparse.experts(renormalize=False, shared_gate=True)
)
QWEN3_MOE = BASE.but("qwen3moe", names=sparse.EXPERTS, refuse=sparse.KNOWN, moe=sparse.experts(renormalize=True))
OLMOE = BASE.but(
    "olmoe",
    names=sparse.EXPERTS,
    refuse=sparse.KNOWN,
    found={"qk_norm": lambda keys: "full"},
    moe=sparse.experts(renormalize=False),
)
GPT_OSS = BASE.but(
    "gpt-oss",
    names={
        **sparse.EXPERTS,
        "layers.{i}.attn.sinks": "blk.{i}.attn_sinks.weight",
        "layers.{i}.ffn_norm": "blk.{i}.post_attention_norm",
    },
    refuse=sparse.KNOWN,
    rope=lambda c: replace(rope_of_gguf(c), truncate=False),
    window=_windows(2),
    sinks=True,
    moe=sparse.experts(True, activation="swish(1.702)", bias=True, router_bias=True, limit=7.0, shift=1.0),
)
DEEPSEEK2 = BASE.but(
    "deepseek2",
    names={**sparse.EXPERTS, **sparse.LATENT},
    refuse=sparse.KNOWN,
    mixer=sparse.latent_attention(rope_of_gguf),
    moe=sparse.deepseek_experts,
)
MAMBA = BASE.but(
    "mamba",
    names=sparse.STATES,
    heads=None,
    kv_heads=None,
    ffn=None,
    rope=None,
    context=None,  # the file's number is arbitrary
    mixer=sparse.mamba(),
)
MAMBA2 = MAMBA.but("mamba2", names=sparse.HEADED_STATES, mixer=sparse.mamba2)
JAMBA = BASE.but(
    "jamba",
    names={**sparse.EXPERTS, **sparse.STATES},
    refuse=sparse.KNOWN,
    kv_heads=lambda c: max(key("attention.head_count_kv")(c)),  # 0 where a layer has no attention
    rope=None,
    mixer=sparse.mamba(normed=True),
    moe=sparse.experts(renormalize=False),
)

# -- encoders

BERT = UNGATED.but(
    "bert",
    names={"layers.{i}.attn_norm": "blk.{i}.attn_output_norm", "layers.{i}.ffn_norm": "blk.{i}.layer_output_norm"},
    kind="encoder",
    arrangement="post",
    activation="gelu",
    rope=None,
    embed_norm=True,
    learned_positions=key("context_length"),
    token_types=lambda c: c["token_types"],
)

FAMILIES = Families("GGUF architecture", __name__, "see `weft families`")
FAMILIES.register(*list(globals().values()))
