"""The vocabulary of GGUF tables: llama.cpp's metadata keys and tensor names.

llama.cpp calls the same thing by the same name in every architecture, so one table of names and of what the tensors
decide serves them all; an architecture adds what neither its metadata nor its tensors say. Which layers have experts or
a state space only the tensors say: the reader of a file adds that to its config, under the keys SPARSE, RECURRENT and
so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Permute, Recipe, Reshape

from ...dsl import GatedMLP, MoE, RoPE
from .family import Architecture, Config, Fetch, Lookup, Rule, Template, in_layers, key, required
from .rope_config import FREQUENCIES, LONG, SHORT, rope_of_gguf
from .settings import Settings
from .templates import half_of_each, packed_parts

SPARSE, RECURRENT = "layers with experts", "layers with a state"
NORMED = "layers with a norm behind their state"
BIASED = "layers with a table of relative positions"
GATED = "layers with a gate in their feed-forward"
INDEXED = "layers with an index of keys"
VALUED = "layers with a map of values"  # others take the keys for them, or those of another layer
_GATING = ("", "softmax", "sigmoid")  # by expert_gating_func


def half_split(name: str, which: str) -> Template:
    """Rows of q or k from llama.cpp's order, pairs interleaved in every head, back to first and second halves."""

    def template(fetch: Fetch, part: str, s: Settings) -> Recipe:
        heads = s.groups if which == "k" else s.head_count
        half = s.head_size // 2
        rest = (-1,) if part == "weight" else ()
        axes = (0, 2, 1, 3)[: 3 + len(rest)]
        split = Permute(Reshape(fetch(f"{name}.{part}"), (heads, half, 2, *rest)), axes)
        return Reshape(split, (heads * half * 2, *rest))

    return template


def _context(config: Config) -> Any:
    """The original context where longer texts need other frequencies."""
    return config.get("rope.scaling.original_context_length" if LONG in config else "context_length")


def _has(*names: str) -> Callable[[frozenset[str]], bool]:
    return lambda keys: not keys.isdisjoint(names)


def local_layers(config: Config, every: int) -> list[bool]:
    """Return for each layer if it is local: as attention.sliding_window_pattern says, or all but each `every`-th."""
    pattern, layers = config.get("attention.sliding_window_pattern", every), range(config["block_count"])
    if isinstance(pattern, list):  # which may go on to layers that predict further tokens
        return [bool(found) for found in pattern[: len(layers)]]
    return [pattern == 0 or (i + 1) % pattern != 0 for i in layers]


def windows(every: int) -> Callable[[Config], Any]:
    """The window of the file in its local layers."""

    def rule(config: Config) -> tuple[int | None, ...] | None:
        window = config.get("attention.sliding_window")
        return tuple(window if found else None for found in local_layers(config, every)) if window else None

    return rule


def rotary_where_local(every: int, interleaved: bool = False) -> Rule:
    """The rule for `rope` of models whose global layers know no positions."""

    def rule(config: Config) -> tuple[RoPE | None, ...]:
        rope = replace(rope_of_gguf(config), interleaved=interleaved)
        return tuple(rope if local else None for local in local_layers(config, every))

    return rule


def interleaved(config: Config) -> RoPE:
    """RoPE whose pairs are neighbours, as in the Hugging Face model (elsewhere the converter reorders rows)."""
    return replace(rope_of_gguf(config), interleaved=True)


def most_kv_heads(config: Config) -> int | None:
    """attention.head_count_kv of the layers with attention; it is 0 in the others."""
    said = config.get("attention.head_count_kv")
    return max(said) if isinstance(said, list) else said


class _EachLayer(Lookup):
    """A setting that files give once, or for each layer; heads that differ stay a list, which is refused."""

    def __call__(self, config: Config) -> Any:
        value, layers = super().__call__(config), key("block_count")(config)
        if not isinstance(value, list) or len(value) < layers:
            return value
        value = value[:layers]  # it may go on to layers that predict further tokens
        return value[0] if value == value[:1] * layers else tuple(value) if self.keys == _WIDTH else value


_WIDTH = ("feed_forward_length",)
BASE = Architecture(
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
        "rope": rope_of_gguf,
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
    inert=(
        *("attention.value_length", "use_parallel_residual", "leading_dense_block_count", "interleave_moe_layer_step"),
        *("expert_shared_count", "nextn_predict_layers"),  # which the tensors say
        "rope.dimension_sections",  # of images; the three positions of texts are equal
    ),
    refuse={"expert_count": (0, None), "attention.causal": (True, None)},
)
UNGATED = BASE.but(norm="layer", activation="gelu_new", gated=False)
INTERLEAVED = {f"layers.{{i}}.attn.{x}": half_split(f"blk.{{i}}.attn_{x}", x) for x in "qk"}
NORM_AFTER = {"layers.{i}.ffn_norm": "blk.{i}.post_attention_norm"}  # named so, but before the feed-forward
PACKED = packed_parts("layers.{i}.attn", "blk.{i}.attn_qkv")


def either(name: str, other: Template) -> Template:
    """A tensor, or what some files have in its place."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        return fetch(f"{name}.{part}") if fetch.has(f"{name}.{part}") else other(fetch, part, settings)

    return template


APART_OR_PACKED = {
    f"layers.{{i}}.attn.{x}": either(f"blk.{{i}}.attn_{x}", PACKED[f"layers.{{i}}.attn.{x}"]) for x in "qkv"
}

# -- experts


def per_layer(make: Rule, where: str) -> Rule:
    """Restrict the rule `make` to the layers that the config lists under `where`."""
    return in_layers(make, lambda c: (i in c[where] for i in range(key("block_count")(c))))


def shaped(name: str, *dims: int) -> Template:
    """Tensor `name` in another shape; the last size may be -1."""
    return lambda fetch, part, settings: Reshape(fetch(name), dims)


def experts(renormalize: bool, shared_gate: bool = False, **options: Any) -> Rule:
    """The rule for `moe` of an architecture whose files say how many experts there are and how wide."""

    def make(config: Config) -> MoE:
        wide = config.get("expert_shared_feed_forward_length")
        count, k = required(config, "expert_count", "expert_used_count")
        hidden = key("expert_feed_forward_length", "feed_forward_length")(config)
        shared = GatedMLP(wide) if wide else None
        return MoE(count, hidden, k, renormalize=renormalize, shared=shared, shared_gate=shared_gate, **options)

    return per_layer(make, SPARSE)


def routing(config: Config, scoring: str, renormalize: bool = False) -> dict[str, Any]:
    """Return how experts are scored and weighed; the arguments are the defaults of llama.cpp. What corrects the choice
    stands beside every sigmoid."""
    gating = config.get("expert_gating_func") or _GATING.index(scoring)
    if gating not in (1, 2):
        raise WeftError(f"expert_gating_func={gating!r} is not supported; known are 1 (softmax), 2 (sigmoid)")
    sigmoid, groups = _GATING[gating] == "sigmoid", config.get("expert_group_count") or 1
    return {
        "scoring": _GATING[gating],
        "correction": sigmoid,
        "renormalize": config.get("expert_weights_norm", renormalize),
        "scale": config.get("expert_weights_scale") or 1.0,
        "groups": groups,
        "top_groups": config.get("expert_group_used_count") or 1,
        "group_score": "max" if groups > 1 and not sigmoid else "top2",
    }


def routed(scoring: str, renormalize: bool = False, **options: Any) -> Rule:
    """The rule for `moe` of an architecture whose files say how experts are scored and weighed, too; see `routing`."""

    def make(config: Config) -> MoE:
        count, k, hidden = required(config, "expert_count", "expert_used_count", "expert_feed_forward_length")
        wide = config.get("expert_shared_feed_forward_length") or hidden * config.get("expert_shared_count", 0)
        shared = GatedMLP(wide) if wide else None
        return MoE(count, hidden, k, **{**routing(config, scoring, renormalize), "shared": shared, **options})

    return per_layer(make, SPARSE)


def of_experts(part: str, kind: str) -> Template:
    """Gate or up of all experts: a tensor, or a half of the one for both (the converter's --fuse-gate-up-exps)."""
    alone, both = f"blk.{{i}}.ffn_{part}_exps.{kind}", f"blk.{{i}}.ffn_gate_up_exps.{kind}"
    half = half_of_each(both, 0 if part == "gate" else 1)
    return lambda fetch, name, settings: half(fetch, name, settings) if fetch.has(both) else fetch(alone)


MIXED = BASE.but(
    names={
        "layers.{i}.ffn.router": "blk.{i}.ffn_gate_inp",
        "layers.{i}.ffn.router.correction": "blk.{i}.exp_probs_b.bias",
        **{f"layers.{{i}}.ffn.experts.{n}": of_experts(n, "weight") for n in ("gate", "up")},
        **{f"layers.{{i}}.ffn.experts.{n}_bias": of_experts(n, "bias") for n in ("gate", "up")},
        "layers.{i}.ffn.experts.down": "blk.{i}.ffn_down_exps.weight",
        "layers.{i}.ffn.experts.down_bias": "blk.{i}.ffn_down_exps.bias",
        **{f"layers.{{i}}.ffn.shared.{n}": f"blk.{{i}}.ffn_{n}_shexp" for n in ("gate", "up", "down")},
        "layers.{i}.ffn.shared_gate.weight": shaped("blk.{i}.ffn_gate_inp_shexp.weight", 1, -1),
    },
    refuse={"expert_count": None},
)
