"""Proposals of GGUF metadata, in llama.cpp's keys, for the settings of a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Literal, Map, Scale
from weft.ir.recipes.frequencies import RopeFrequencies

from ...models.families import FAMILIES, Settings, index_tables
from ...models.tables.family import GGUFArchitecture, Loader
from ...models.tables.gguf import NORMED, RECURRENT, SPARSE, VALUED
from ...models.tables.rope_config import FREQUENCIES, LONG, SHORT, write_gguf_rope
from ..inversion import ShapedRecipe

# The first architecture that expresses a graph is chosen: these in this order, the plainest first, then others.
_FIRST = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi2", "phi3", "gpt2", "gptneox", "starcoder2"),
    *("stablelm", "olmo2", "olmo", "granite", "smollm3", "command-r", "qwen2moe", "qwen3moe", "olmoe", "granitemoe"),
)
# Facts that the importer reads from the tensors, not from the metadata.
INTERNAL = SPARSE, RECURRENT, NORMED, VALUED, SHORT, LONG
_MANY = 131_072  # the context, if the model does not state it


def list_architectures(family_name: str | None) -> tuple[str | None, list[str]]:
    """Return the GGUF architecture of the family `family_name` (that name itself without one), and the names of all
    architectures that weft exports to: first that one, if it is among them, then the plainest."""
    tables, family = index_tables(), FAMILIES.get(family_name or "")
    first = family_name if family is None or family.gguf is None else family.gguf.model_types[0]
    # The sort is stable: the family's architecture comes first, the others keep their order.
    names = sorted(dict.fromkeys((*_FIRST, *tables)), key=lambda name: name != first)
    return first, [name for name in names if tables[name].loader is not None and tables[name].model_types[0] == name]


def propose_metadata(table: GGUFArchitecture, s: Settings) -> dict[str, Any]:
    """Return the metadata for the settings `s`: {key without the architecture's prefix: value}.

    Settings that are None, and the default scale of attention, have no key.

    Raises:
        WeftError: if the architecture cannot express the settings.
    """
    architecture, loader = table.model_types[0], table.loader or Loader()
    is_partial = any(rope is not None and rope.dim not in (None, s.head_size) for rope in s.expand("rope"))
    if loader.experts == ("none" if s.moe is not None else "required"):
        raise WeftError(f"{architecture} {'does not support' if s.moe is not None else 'requires'} mixtures of experts")
    if loader.head == ("own" if s.tie else "tied"):
        raise WeftError(f"{architecture} requires a head that is {'not ' if s.tie else ''}tied to the embedding")
    if is_partial and not loader.partial_rope:
        raise WeftError(f"{architecture} requires RoPE on all {s.head_size} features of a head")
    if s.head_size * s.head_count != s.dim and not loader.free_heads:
        sizes = f"{s.dim} / {s.head_count} heads, not {s.head_size}"
        raise WeftError(f"{architecture} requires the head size width / heads = {sizes}")
    windows = [w for w in s.expand("window") if w is not None and loader.windows]
    default_scale = s.head_size**-0.5
    has_scale = s.scale is not None and not isinstance(s.scale, tuple) and abs(s.scale / default_scale - 1) > 1e-6
    metadata = {
        **table.to_config(replace(s, scale=s.scale if has_scale else None)),
        "context_length": s.learned_positions or s.context or _MANY,
        "feed_forward_length": s.ffn or (s.moe is not None and s.find_first("moe").hidden) or None,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps if s.norm == "rms" else None,
        "attention.layer_norm_epsilon": s.eps if s.norm != "rms" else None,
        "attention.sliding_window": windows[0] if windows else None,
        "attn_logit_softcapping": s.softcap,
        "final_logit_softcapping": s.logit_softcap,
        "use_parallel_residual": s.find_first("arrangement").startswith("parallel"),
        **_list_rope_keys(s),
        **_list_expert_keys(s),
    }
    return {key: value for key, value in metadata.items() if value is not None}


def list_tensor_names(table: GGUFArchitecture, s: Settings) -> frozenset[str]:
    """Return the names of tensors whose presence implies settings in `s`: biases that llama.cpp loads, the head and
    norms."""
    loader = table.loader or Loader()
    biases = {
        "n": ("blk.0.attn_norm.bias", s.norm_bias),
        "q": ("blk.0.attn_q.bias", s.qkv_bias),
        "o": ("blk.0.attn_output.bias", s.out_bias),
        "f": ("blk.0.ffn_up.bias", s.ffn_bias),
        "h": ("output.bias", s.head_bias),
    }
    presence = {
        name: letter in loader.biases or (letter in loader.optional_biases and has)
        for letter, (name, has) in biases.items()
    }
    presence |= {
        "output.weight": not s.tie,
        "blk.0.attn_q_norm.weight": s.qk_norm != "none" and loader.qk_norm,
        "blk.0.ffn_norm.weight": s.arrangement != "parallel",
    }
    return frozenset(name for name, is_present in presence.items() if is_present)


def _list_rope_keys(s: Settings) -> dict[str, Any]:
    """Return the keys of rotary positions, with a second base if the RoPE of layers with windows differs (Gemma 3)."""
    pairs = [pair for pair in zip(s.expand("rope"), s.expand("window"), strict=True) if pair[0] is not None]
    if not pairs:
        return {}
    full = next((rope for rope, window in pairs if window is None), pairs[0][0])
    local = next((rope for rope, window in pairs if window is not None), full)
    metadata = write_gguf_rope(full) | {"rope.dimension_count": full.dim or s.head_size}
    return metadata if local == full else {**metadata, "rope.freq_base_swa": local.theta}


def _list_expert_keys(s: Settings) -> dict[str, Any]:
    if s.moe is None:
        return {SPARSE: []}
    moe = s.find_first("moe")
    return {
        "expert_shared_feed_forward_length": None if moe.shared is None else moe.shared.hidden,
        "expert_count": moe.experts,
        "expert_used_count": moe.k,
        "expert_feed_forward_length": moe.hidden,
        SPARSE: [i for i, layer in enumerate(s.expand("moe")) if layer is not None],
    }


def divide_frequencies(graph: Graph, reference: Graph) -> tuple[Graph, dict[str, ShapedRecipe]]:
    """Return `reference` with divided rotary frequencies, and {name: tensor of divisors}.

    The divisors convert the rotary frequencies of `reference` to those of `graph`, for a formula that GGUF lacks
    (Llama 3's). For other formulas, and unless both have one table of equal width, return `reference` and {}.
    """
    ours, theirs = ([p for p in g.params.values() if isinstance(p.recipe, RopeFrequencies)] for g in (graph, reference))
    recipes = [p.recipe for p in (*ours, *theirs) if isinstance(p.recipe, RopeFrequencies)]
    if len(ours) != 1 or len(theirs) != 1 or recipes[0].scaling != "llama3" or recipes[0].dim != recipes[1].dim:
        return reference, {}
    divisors = Literal.from_array((recipes[1].frequencies() / recipes[0].frequencies()).astype(np.float32))
    divided = reference.clone({theirs[0].name: Scale(recipes[1], Map(divisors, "reciprocal"))})
    return divided, {FREQUENCIES: ShapedRecipe(divisors, divisors.dims)}


def list_divisors(s: Settings) -> dict[str, ShapedRecipe]:
    """Return tensor name → LongRoPE's divisors; {} for other rotations. Raise WeftError if a list is missing."""
    rope = s.find_first("rope") if s.rope is not None else None
    if rope is None or "factors" not in rope.used_settings:
        return {}
    lists = {SHORT: rope.factors, LONG: rope.long_factors}
    if not all(lists.values()):
        raise WeftError(f"RoPE of scaling longrope lacks {'long_factors' if lists[SHORT] else 'factors'}")
    return {name: ShapedRecipe(Literal(values, (len(values),)), (len(values),)) for name, values in lists.items()}
