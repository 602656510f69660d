"""KV cache bytes by sequence length: of this model, and of the same model with other head counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..model.network import Network, Vertex
from .kinds import Kind, list_attentions

GROUPS = 8  # key and value heads of the grouped variant, as most models have
WINDOW = 4096  # of the variant with one, as Mistral 7B has
Sizes = Counter[tuple[int, int | None]]  # (elements per token, window) -> number of layers


def build_panel(network: Network) -> dict[str, Any] | None:
    """Return the cache sizes of this model and of its variants; None for a model with neither caches nor states.

    "variants": this model, then those with other sizes: "name", "about", "kept" [[elements per token, window or None]].
    "state": the size of recurrent states: [elements in the model's dtype, bytes in other dtypes].
    "same": the name of the variant with this model's sizes, or None. "context": its maximum length in tokens, or None.
    """
    caches = [(v, kind, read_heads(v, kind, network)) for v, kind in list_attentions(network) if v.cache is not None]
    state = [sum(v.state[i] for v in network.vertices) for i in (0, 1)]
    if not caches and not any(state):
        return None
    indexes: Sizes = Counter(v.cache for v in network.vertices if v.cache is not None and not v.weft_op.attends)
    this = Counter(v.cache for v, _, _ in caches if v.cache is not None) + indexes
    alternatives = _list_variants(caches, network.context) if caches else {}
    alternatives = {name: (sizes + indexes, about) for name, (sizes, about) in alternatives.items()}
    variants = {"this model": (this, "")} | {name: v for name, v in alternatives.items() if v[0] != this}
    return {
        "context": network.context,
        "state": state,
        "variants": [
            {"name": name, "about": about, "kept": [[n * width, window] for (width, window), n in widths.items()]}
            for name, (widths, about) in variants.items()
        ],
        "same": next((name for name, (widths, _) in alternatives.items() if widths == this), None),
    }


def read_heads(v: Vertex, kind: Kind, network: Network) -> tuple[int, int]:
    """Return (features of a key, features of a value) of one head. In latent attention (DeepSeek-V2, 2024) they are the
    widths of its maps [heads · width, latent], for a key plus the rotary features; else the widths of its cache."""
    assert v.cache is not None
    width = v.cache[0]
    latent = v.weft_op.attrs.get("value_dim")
    if latent is None:
        value = int(v.types[0].rstrip("]").rpartition(", ")[2]) // kind.heads
        return width // kind.kv_heads - value, value
    maps = [u for u in network.vertices if u.scope == v.scope and u.weft_op.op == "head_linear" and u.weights]
    heads = [int(u.weights[0].dims[0]) // kind.heads for u in maps]
    rotary = width - int(str(latent))
    return (heads[0] + rotary, heads[-1]) if heads else (width, int(str(latent)))


def _list_variants(
    caches: list[tuple[Vertex, Kind, tuple[int, int]]], context: int | None
) -> dict[str, tuple[Sizes, str]]:
    """Map names of variants of the model, with other head counts or windows, to (cache sizes, description)."""

    def tally(width: Any) -> Sizes:
        return Counter((width(kind, *widths), kind.keys.window) for _, kind, widths in caches)

    heads = max(kind.heads for _, kind, _ in caches)
    variants = {"multi-head": (tally(lambda k, key, value: k.heads * (key + value)), "keys and values of every head")}
    if heads > GROUPS and all(kind.heads % GROUPS == 0 for _, kind, _ in caches):
        about = f"{GROUPS} key/value heads (Ainslie 2023)"
        variants["grouped-query"] = (tally(lambda k, key, value: GROUPS * (key + value)), about)
    variants["multi-query"] = (tally(lambda k, key, value: key + value), "one key/value head (Shazeer 2019)")
    latent = "a latent of 4 heads' width and a rotated key of half a head (DeepSeek-V2)"
    variants["latent"] = (tally(lambda k, key, value: 4 * value + value // 2), latent)
    if any(kind.keys.window is not None for _, kind, _ in caches):
        open_: Sizes = Counter((v.cache[0], None) for v, _, _ in caches if v.cache)
        variants["no window"] = (open_, "this model without windows")
    elif context is None or context > WINDOW:
        closed: Sizes = Counter((v.cache[0], WINDOW) for v, _, _ in caches if v.cache)
        variants["window"] = (closed, f"this model with windows of {WINDOW:,} tokens")
    return variants
