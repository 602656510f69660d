"""What a graph that decodes remembers from call to call, as manifests and configurations say it."""

from __future__ import annotations

from typing import Any

from weft.ir import Graph


def remembers(graph: Graph) -> bool:
    """Whether `graph` has caches or states."""
    return any(name.startswith(("past_key_values.", "past_states.")) for name in graph.inputs)


def cache_records(graph: Graph) -> list[dict[str, Any]]:
    """A record per cache of a graph whose attentions are not lowered yet.

    `layer` is its number, `window` that of the attention or None; a `rolling` cache holds `capacity` keys (None: as
    many as the text has tokens), a `latent` one has no values beside them.
    """
    found = []
    for i in range(len(graph.inputs)):
        value = graph.inputs.get(f"past_key_values.{i}.key")
        if value is None:
            break
        (node, _), *_ = value.uses
        rolling, window = node.attrs.get("rolling", False), node.attrs.get("window")
        record = {"layer": i, "kv_heads": value.shape[1], "head_dim": value.shape[3], "window": window}
        capacity = value.shape[2] if rolling else None
        found.append({**record, "rolling": rolling, "capacity": capacity, "latent": node.operand("v") is None})
    return found


def state_records(graph: Graph) -> list[dict[str, Any]]:
    """A record per state of constant size: its input's `name` and the `shape` of a row."""
    states = ((name, v.shape[1:]) for name, v in graph.inputs.items() if name.startswith("past_states."))
    return [{"name": name, "shape": list(shape)} for name, shape in states]


def max_source(graph: Graph, length: int) -> int:
    """The longest source of an encoder-decoder compiled for answers of `length` tokens."""
    limit = max(length, graph.meta.get("source_context") or 0)
    return min(limit, graph.meta.get("max_source_positions") or limit)
