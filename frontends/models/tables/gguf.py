"""The vocabulary of GGUF tables: llama.cpp's metadata keys and tensor names.

llama.cpp has the same names in every architecture, so all tables derive from `BASE`; an architecture adds what neither
its metadata nor its tensors state. Only the tensors show which layers have experts or a state space: the reader of a
file adds lists of these layers to the config, under keys such as SPARSE and RECURRENT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Permute, Recipe, Reshape

from ...dsl import GatedMLP, MoE, RoPE, Router
from .family import (
    Config,
    Fetch,
    GGUFArchitecture,
    Lookup,
    Rule,
    Template,
    key,
    mask_layers,
    read_required,
    rule,
    template,
)
from .rope_config import FREQUENCIES, LONG, SHORT, read_gguf_rope
from .settings import Settings
from .templates import reshape_tensor, slice_expert_half, split_gate_up, split_qkv

SPARSE, RECURRENT = "layers with experts", "layers with a recurrent state"
NORMED = "layers with a norm after their state"
BIASED = "layers with a table of relative positions"
GATED = "layers with a gate in their feed-forward"
INDEXED = "layers with an indexer that selects keys"
VALUED = "layers with a value projection"  # others use their keys, or another layer's values
_GATING = ("", "softmax", "sigmoid")  # by expert_gating_func


@template
def deinterleave_heads(fetch: Fetch, part: str, s: Settings, name: str, role: str) -> Recipe:
    """Return the projection `name` of q or k (`role`), with the rows of each head reordered: the first row of every
    rotated pair, then the second row of every pair. In llama.cpp's order the two rows of a pair are adjacent."""
    heads = s.groups if role == "k" else s.head_count
    half = s.head_size // 2
    rest = (-1,) if part == "weight" else ()
    axes = (0, 2, 1, 3)[: 3 + len(rest)]
    split = Permute(Reshape(fetch(f"{name}.{part}"), (heads, half, 2, *rest)), axes)
    return Reshape(split, (heads * half * 2, *rest))


def _context(config: Config) -> Any:
    """Return the context length, with LongRoPE the original one, since other frequencies are needed beyond it."""
    return config.get("rope.scaling.original_context_length" if LONG in config else "context_length")


def _has(*names: str) -> Callable[[frozenset[str]], bool]:
    return lambda keys: not keys.isdisjoint(names)


def find_local_layers(config: Config, every: int) -> list[bool]:
    """Return for each layer whether it is local, with a sliding window; the others are global.
    attention.sliding_window_pattern lists them, or is a period that overrides `every`: each `every`-th layer is global.
    Period 0 means that all layers are local."""
    pattern, layers = config.get("attention.sliding_window_pattern", every), range(config["block_count"])
    if isinstance(pattern, list):  # it may have more entries, for layers that predict more tokens
        return [bool(is_local) for is_local in pattern[: len(layers)]]
    return [pattern == 0 or (i + 1) % pattern != 0 for i in layers]


@rule
def build_windows(config: Config, every: int) -> tuple[int | None, ...] | None:
    """Return the window of each layer, None for global ones (see `find_local_layers`); None without a window."""
    window = config.get("attention.sliding_window")
    return tuple(window if is_local else None for is_local in find_local_layers(config, every)) if window else None


@rule
def build_local_ropes(config: Config, every: int, interleaved: bool = False) -> tuple[RoPE | None, ...]:
    """Return the RoPE of each layer, None for global layers (see `find_local_layers`), which are not rotated."""
    rope = replace(read_gguf_rope(config), interleaved=interleaved)
    return tuple(rope if local else None for local in find_local_layers(config, every))


def build_interleaved_rope(config: Config) -> RoPE:
    """Return the RoPE of `config` with adjacent pairs, for architectures whose rows llama.cpp does not reorder."""
    return replace(read_gguf_rope(config), interleaved=True)


@rule
def build_two_ropes(config: Config, windows: Rule, near_scaled: bool, near_theta: float | None = None) -> Any:
    """Return the RoPE of each layer, or one for all if `windows(config)` is None; a layer with window None is global.
    The base of local layers is rope.freq_base_swa, by default `near_theta`; if that is None, the base of global layers.
    RoPE scaling applies to local layers only if `near_scaled`."""
    wide, local = read_gguf_rope(config), windows(config)
    near = replace(
        wide if near_scaled else RoPE(dim=wide.dim), theta=config.get("rope.freq_base_swa", near_theta or wide.theta)
    )
    return wide if local is None else tuple(wide if window is None else near for window in local)


def find_max_kv_heads(config: Config) -> int | None:
    """Return attention.head_count_kv, or the maximum if it is a list, which has 0 for layers without attention; None
    if the key is absent."""
    counts = config.get("attention.head_count_kv")
    return max(counts) if isinstance(counts, list) else counts


class _EachLayer(Lookup):
    """A rule for a setting that files state once or as a list with one value per layer. Equal values become one value.

    Unequal values become a tuple for the feed-forward width; else they stay a list, which `Table.read` refuses.
    """

    def __call__(self, config: Config) -> Any:
        value, layers = super().__call__(config), key("block_count")(config)
        if not isinstance(value, list) or len(value) < layers:
            return value
        value = value[:layers]  # it may have more entries, for layers that predict more tokens
        return value[0] if value == value[:1] * layers else tuple(value) if self.keys == _WIDTH else value


_WIDTH = ("feed_forward_length",)
BASE = GGUFArchitecture(
    model_types=(),
    settings={
        "vocab": key("vocab_size"),
        "dim": key("embedding_length"),
        "layers": key("block_count"),
        "heads": _EachLayer(("attention.head_count",)),
        "kv_heads": _EachLayer(("attention.head_count_kv",), None),
        "head_dim": key("attention.key_length", default=None),
        "ffn": _EachLayer(_WIDTH),
        "eps": key("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        "context": _context,
        "rope": read_gguf_rope,
    },
    names={
        "embed": "token_embd",
        "embed_norm": "token_embd_norm",
        "positions": "position_embd",
        "token_types": "token_types",
        "layers.{i}.norm": "blk.{i}.attn_norm",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        **{f"layers.{{i}}.attn.{n}": f"blk.{{i}}.attn_{n}" for n in ("q", "k", "v", "q_norm", "k_norm")},
        "layers.{i}.attn.o": "blk.{i}.attn_output",
        "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.ffn_norm": "blk.{i}.ffn_norm",
        **{f"layers.{{i}}.ffn.{n}": f"blk.{{i}}.ffn_{n}" for n in ("gate", "up", "down")},
        "layers.{i}.ffn_post_norm": "blk.{i}.post_ffw_norm",
        "final_norm": "output_norm",
        "lm_head": "output",
    },
    from_keys={
        "tie": lambda keys: "output.weight" not in keys,
        "qkv_bias": _has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "out_bias": _has("blk.0.attn_output.bias"),
        "ffn_bias": _has("blk.0.ffn_up.bias"),
        "head_bias": _has("output.bias"),
        "norm_bias": _has("blk.0.attn_norm.bias", "blk.0.attn_output_norm.bias"),
        "qk_norm": lambda keys: "head" if "blk.0.attn_q_norm.weight" in keys else "none",
    },
    unused=("*.attn_rot_embd", FREQUENCIES, SHORT, LONG),
    inert=(
        *("attention.value_length", "use_parallel_residual", "leading_dense_block_count", "interleave_moe_layer_step"),
        *("expert_shared_count", "nextn_predict_layers"),  # shown by the tensors
        "rope.dimension_sections",  # of images; the three positions of text tokens are equal
    ),
    refuse={"expert_count": (0, None), "attention.causal": (True, None)},
)
UNGATED = BASE.derive(norm="layer", activation="gelu_new", gated=False)
INTERLEAVED = {f"layers.{{i}}.attn.{x}": deinterleave_heads(f"blk.{{i}}.attn_{x}", x) for x in "qk"}
NORM_AFTER = {"layers.{i}.ffn_norm": "blk.{i}.post_attention_norm"}  # despite its name, it precedes the feed-forward
PACKED = split_qkv("layers.{i}.attn", "blk.{i}.attn_qkv")
PACKED_GATE = split_gate_up("layers.{i}.ffn", "blk.{i}.ffn_up")
ENCODER: dict[str, Any] = {"kind": "encoder", "refuse": {"attention.causal": (False, None)}}  # changes for encoders


@template
def read_or(fetch: Fetch, part: str, settings: Settings, name: str, fallback: Template) -> Recipe:
    """Return the tensor `name`, or the result of `fallback` if the file lacks it."""
    return fetch(f"{name}.{part}") if fetch.has(f"{name}.{part}") else fallback(fetch, part, settings)


SEPARATE_OR_PACKED = {
    f"layers.{{i}}.attn.{x}": read_or(f"blk.{{i}}.attn_{x}", PACKED[f"layers.{{i}}.attn.{x}"]) for x in "qkv"
}

# -- experts


def mask_unlisted(make: Rule, list_key: str) -> Rule:
    """Return the rule for a setting per layer: `make(config)` in layers listed under config[list_key], else None."""
    return mask_layers(make, lambda c: (i in c[list_key] for i in range(key("block_count")(c))))


def build_experts(router: Router, shared_gate: bool = False, **options: Any) -> Rule:
    """Return the rule for `moe` with the file's experts and shared expert (if any); `options` are arguments of `MoE`.
    Layers that the file does not list under `SPARSE` have None."""

    def make(config: Config) -> MoE:
        shared_width = config.get("expert_shared_feed_forward_length")
        count, k = read_required(config, "expert_count", "expert_used_count")
        hidden = key("expert_feed_forward_length", "feed_forward_length")(config)
        shared = GatedMLP(shared_width) if shared_width else None
        return MoE(count, hidden, k, router=router, shared=shared, shared_gate=shared_gate, **options)

    return mask_unlisted(make, SPARSE)


def read_routing(config: Config, scoring: str, renormalize: bool = False) -> Router:
    """Return the router that `config` states, by default with `scoring` (softmax or sigmoid) and `renormalize`; raise
    WeftError for any other scoring. Routers with sigmoid scores always have a correction bias."""
    gating = config.get("expert_gating_func") or _GATING.index(scoring)
    if gating not in (1, 2):
        raise WeftError(f"expert_gating_func={gating!r} is not supported; known are 1 (softmax), 2 (sigmoid)")
    sigmoid, groups = _GATING[gating] == "sigmoid", config.get("expert_group_count") or 1
    return Router(
        scoring=_GATING[gating],
        correction=sigmoid,
        renormalize=config.get("expert_weights_norm", renormalize),
        scale=config.get("expert_weights_scale") or 1.0,
        groups=groups,
        top_groups=config.get("expert_group_used_count") or 1,
        group_score="max" if groups > 1 and not sigmoid else "top2",
    )


def route_experts(scoring: str, renormalize: bool = False, **options: Any) -> Rule:
    """Return the rule for `moe` with the file's experts and the router of `read_routing`, in which `options` replace
    fields. Layers that the file does not list under `SPARSE` have None."""

    def make(config: Config) -> MoE:
        count, k, hidden = read_required(config, "expert_count", "expert_used_count", "expert_feed_forward_length")
        shared_width = config.get("expert_shared_feed_forward_length") or hidden * config.get("expert_shared_count", 0)
        shared = GatedMLP(shared_width) if shared_width else None
        return MoE(
            count, hidden, k, router=replace(read_routing(config, scoring, renormalize), **options), shared=shared
        )

    return mask_unlisted(make, SPARSE)


def read_expert_part(part: str, kind: str) -> Template:
    """Return a template for weight or bias (`kind`) of experts' gate or up (`part`), from a fused tensor if stored."""
    separate, fused = f"blk.{{i}}.ffn_{part}_exps.{kind}", f"blk.{{i}}.ffn_gate_up_exps.{kind}"
    half = slice_expert_half(fused, 0 if part == "gate" else 1)
    return lambda fetch, name, settings: half(fetch, name, settings) if fetch.has(fused) else fetch(separate)


SPARSE_BASE = BASE.derive(
    names={
        "layers.{i}.ffn.router": "blk.{i}.ffn_gate_inp",
        "layers.{i}.ffn.router.correction": "blk.{i}.exp_probs_b.bias",
        **{f"layers.{{i}}.ffn.experts.{n}": read_expert_part(n, "weight") for n in ("gate", "up")},
        **{f"layers.{{i}}.ffn.experts.{n}_bias": read_expert_part(n, "bias") for n in ("gate", "up")},
        "layers.{i}.ffn.experts.down": "blk.{i}.ffn_down_exps.weight",
        "layers.{i}.ffn.experts.down_bias": "blk.{i}.ffn_down_exps.bias",
        **{f"layers.{{i}}.ffn.shared.{n}": f"blk.{{i}}.ffn_{n}_shexp" for n in ("gate", "up", "down")},
        "layers.{i}.ffn.shared_gate.weight": reshape_tensor("blk.{i}.ffn_gate_inp_shexp.weight", 1, -1),
    },
    refuse={"expert_count": None},
)
