"""Propose a model's GGUF metadata, in llama.cpp's keys, from its graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Literal, Map, Scale
from weft.ir.recipes.frequencies import RopeFrequencies

from ...models.families import FAMILIES, Settings, architectures
from ...models.tables.family import Architecture, Loader
from ...models.tables.gguf import NORMED, RECURRENT, SPARSE, VALUED
from ...models.tables.rope_config import FREQUENCIES, LONG, SHORT, gguf_rope
from ..inversion import Made

# Of all architectures that express a graph the first is proposed: these in this order, the plainest first, then others.
_FIRST = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi2", "phi3", "gpt2", "gptneox", "starcoder2"),
    *("stablelm", "olmo2", "olmo", "granite", "smollm3", "command-r", "qwen2moe", "qwen3moe", "olmoe", "granitemoe"),
)
# What the importer finds in the tensors, not in the metadata.
INTERNAL = SPARSE, RECURRENT, NORMED, VALUED, SHORT, LONG
_MANY = 131_072  # positions, where the model does not say


def exported(own: str | None) -> tuple[str | None, list[str]]:
    """Return the architecture of the family `own` and those that llama.cpp loads: this one, then the plainest first."""
    known, family = architectures(), FAMILIES.get(own or "")
    first = own if family is None or family.gguf is None else family.gguf.model_types[0]
    # The sort is stable: the own architecture comes first, the others keep their order.
    names = sorted(dict.fromkeys((*_FIRST, *known)), key=lambda name: name != first)
    return first, [name for name in names if known[name].loader is not None and known[name].model_types[0] == name]


def propose(table: Architecture, s: Settings) -> dict[str, Any]:
    """The keys of `s`, without the architecture before them; what is not said stands for nothing special.

    Raises:
        WeftError: if the architecture cannot say something of the kind.
    """
    architecture, loader = table.model_types[0], table.loader or Loader()
    partial = s.rope is not None and any(r is not None and r.dim not in (None, s.head_size) for r in s.each("rope"))
    if loader.experts == ("none" if s.moe is not None else "required"):
        raise WeftError(f"{architecture} has {'no' if s.moe is not None else 'only'} experts")
    if loader.head == ("own" if s.tie else "tied"):
        raise WeftError(f"{architecture} {'has a head of its own' if s.tie else 'ties its head to the embedding'}")
    if partial and not loader.partial_rope:
        raise WeftError(f"{architecture} turns whole heads")
    if s.head_size * s.head_count != s.dim and not loader.free_heads:
        raise WeftError(f"{architecture} has heads of the width divided by their number")
    windows = [w for w in s.each("window") if w is not None and loader.windows]
    plain = s.head_size**-0.5
    unusual = s.scale is not None and not isinstance(s.scale, tuple) and abs(s.scale / plain - 1) > 1e-6
    said = {
        **table.says(replace(s, scale=s.scale if unusual else None)),
        "context_length": s.learned_positions or s.context or _MANY,
        "feed_forward_length": s.ffn or (s.moe is not None and s.first("moe").hidden) or None,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps if s.norm == "rms" else None,
        "attention.layer_norm_epsilon": s.eps if s.norm != "rms" else None,
        "attention.sliding_window": windows[0] if windows else None,
        "attn_logit_softcapping": s.softcap,
        "final_logit_softcapping": s.logit_softcap,
        "use_parallel_residual": s.first("arrangement").startswith("parallel"),
        **_ropes(s),
        **_experts(s),
    }
    return {key: value for key, value in said.items() if value is not None}


def tensors_there(table: Architecture, s: Settings) -> frozenset[str]:
    """Tensors whose presence decides settings, which are in a checkpoint of `s`: biases if llama.cpp loads them."""
    loader = table.loader or Loader()
    biases = {
        "n": ("blk.0.attn_norm.bias", s.norm_bias),
        "q": ("blk.0.attn_q.bias", s.qkv_bias),
        "o": ("blk.0.attn_output.bias", s.out_bias),
        "f": ("blk.0.ffn_up.bias", s.ffn_bias),
        "h": ("output.bias", s.head_bias),
    }
    there = {
        name: letter in loader.biases or (letter in loader.optional_biases and has)
        for letter, (name, has) in biases.items()
    }
    there |= {
        "output.weight": not s.tie,
        "blk.0.attn_q_norm.weight": s.qk_norm != "none" and loader.qk_norm,
        "blk.0.ffn_norm.weight": s.arrangement != "parallel",
    }
    return frozenset(name for name, is_there in there.items() if is_there)


def _ropes(s: Settings) -> dict[str, Any]:
    """Rotary positions; a second base, of the layers with windows, is Gemma 3's."""
    pairs = [pair for pair in zip(s.each("rope"), s.each("window"), strict=True) if pair[0] is not None]
    if not pairs:
        return {}
    wide = next((rope for rope, window in pairs if window is None), pairs[0][0])
    local = next((rope for rope, window in pairs if window is not None), wide)
    said = gguf_rope(wide) | {"rope.dimension_count": wide.dim or s.head_size}
    return said if local == wide else {**said, "rope.freq_base_swa": local.theta}


def _experts(s: Settings) -> dict[str, Any]:
    if s.moe is None:
        return {SPARSE: []}
    moe = s.first("moe")
    return {
        "expert_shared_feed_forward_length": None if moe.shared is None else moe.shared.hidden,
        "expert_count": moe.experts,
        "expert_used_count": moe.k,
        "expert_feed_forward_length": moe.hidden,
        SPARSE: [i for i, layer in enumerate(s.each("moe")) if layer is not None],
    }


def divide_frequencies(graph: Graph, theirs: Graph) -> tuple[Graph, dict[str, Made]]:
    """The tensor of divisors by which the rotary frequencies of `theirs` become those of `graph`, where they have a
    formula that GGUF does not know (Llama 3's), and `theirs` with a parameter that reads them."""
    ours, plain = ([p for p in g.params.values() if isinstance(p.recipe, RopeFrequencies)] for g in (graph, theirs))
    recipes = [p.recipe for p in (*ours, *plain) if isinstance(p.recipe, RopeFrequencies)]
    if len(ours) != 1 or len(plain) != 1 or recipes[0].scaling != "llama3" or recipes[0].dim != recipes[1].dim:
        return theirs, {}
    divisors = Literal.of((recipes[1].frequencies() / recipes[0].frequencies()).astype(np.float32))
    divided = theirs.clone({plain[0].name: Scale(recipes[1], Map(divisors, "reciprocal"))})
    return divided, {FREQUENCIES: Made(divisors, divisors.dims)}


def factors(s: Settings) -> dict[str, Made]:
    """LongRoPE's divisors, which are tensors."""
    rope = s.first("rope") if s.rope is not None else None
    if rope is None or "factors" not in rope.used:
        return {}
    both = {SHORT: rope.factors, LONG: rope.long_factors}
    if not all(both.values()):
        raise WeftError("LongRoPE needs both lists of factors")
    return {name: Made(Literal(values, (len(values),)), (len(values),)) for name, values in both.items()}
