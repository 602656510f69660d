"""Caches of a model, and states of constant size, by the `StateSpec`s of its ops.

A graph takes the cache of attention i as past_key_values.{i}.{part} and returns it as present.{i}.{part}, the state of
recurrence j as past_states.{j}.{part} and present_states.{j}.{part}, and the keys of index k, by which queries select
keys, as past_index.{k}.key and present_index.{k}.key. The three kinds are numbered independently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from weft.ir import Graph, Node, Value, WeftError
from weft.ir.op import Growth, StateKind, StateSpec

from ..edits.edit import rebuild_node

EMBEDDED = "inputs_embeds"  # the input of embeddings that replaces input_ids
SOUND = ("input_features", "input_values")  # a spectrogram, a waveform
SOURCE = ("encoder_input_ids", *SOUND, "encoder_attention_mask")  # inputs that only an encoder has


NamedState = tuple[StateSpec, str, str]  # with the names of the input and the output of the graph


def tokens_of(graph: Graph) -> Value | None:
    """Return the input with the tokens of a call: their ids [batch, seq], or their embeddings [batch, seq, dim]."""
    return graph.inputs.get("input_ids") or graph.inputs.get(EMBEDDED)


def specs(node: Node) -> tuple[StateSpec, ...]:
    """Return all caches and states of `node`, whether or not it has operands for them yet."""
    return node.op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)


def states(node: Node) -> tuple[StateSpec, ...]:
    """Return the states of constant size of `node`, a recurrence, in the order of its outputs; () for other nodes."""
    return tuple(filter(_is_constant, specs(node)))


def caches(node: Node) -> tuple[StateSpec, ...]:
    """Return the caches of `node`, a self-attention or an index of keys of its own sequence; () for other nodes."""
    return tuple(s for s in specs(node) if s.growth in (Growth.TEXT, Growth.WINDOW))


def cache_owner(node: Node) -> Node:
    """Return the attention whose cache holds the keys and values of `node`: the first of those that share it.

    An attention with a window has its own cache, which may roll.
    """
    return cache_sharers(node)[0]


def cache_sharers(node: Node) -> list[Node]:
    """Return the attentions that read the cache of `node`, in order, `node` among them."""
    key = _cache_key(node)
    sharers = set() if key is None else {n for n in node.required("k").users if _cache_key(n) == key}
    return [node] if len(sharers) < 2 else [n for n in node.graph.nodes if n in sharers]


def _cache_key(node: Node) -> tuple[object, ...] | None:
    """Return a key that is equal for attentions which share a cache; None for one that shares none."""
    cache_specs = caches(node)
    if not cache_specs or any(spec.window is not None or spec.growth is not Growth.TEXT for spec in cache_specs):
        return None
    named = {o.name for o in node.op.operands}
    read = ("k", "v", "k_scale", "v_scale", *(spec.taken for spec in cache_specs))
    return node.op, cache_specs, *(node.operand(name) if name in named else None for name in read)


def sum_operands(node: Node) -> set[int]:
    """Return the indices of operands that are sums over all tokens so far, which stay in f32."""
    return {node.op.operand_index(s.taken, node.attrs) for s in states(node) if s.kind.accumulates}


def has_state(node: Node) -> bool:
    """Return whether `node` takes a cache or a state of earlier calls as an operand."""
    return any(node.operand(s.taken) is not None for s in (*caches(node), *states(node)))


def has_cache(graph: Graph) -> bool:
    """Return whether `graph` has caches or states."""
    return any(map(has_state, graph.nodes))


def add_state_io(graph: Graph, node: Node, numbers: Counter[str], given: dict[str, Value | None]) -> dict[str, Value]:
    """Add inputs of `graph` for the past caches or states of `node`, and outputs for the present ones.

    `node` is an attention, an index or a recurrence. `numbers` counts the nodes before it by kind (`_name_states`);
    `given` are further operands, by name, that it gets. Return the new inputs by their operand's name.

    Raises:
        WeftError: if `node` has a key mask and a state, which cannot leave keys out.
    """
    is_masked = "key_mask" in (o.name for o in node.op.operands) and node.operand("key_mask") is not None
    if is_masked and states(node):
        raise WeftError(f"kv-cache: %{node.output.name} has a key mask, which a state of constant size cannot have")
    named = _name_states((*caches(node), *states(node)), numbers)
    pasts = {spec.taken: graph.add_input(name, spec.type) for spec, name, _ in named}
    for (_, _, name), present in zip(named, rebuild_node(node, {**given, **pasts}).outputs[1:], strict=True):
        graph.add_output(name, present)
    return pasts


_CACHE, _INDEX, _STATE = (
    ("past_key_values", "present"),
    ("past_index", "present_index"),
    ("past_states", "present_states"),
)


def _name_states(specs: tuple[StateSpec, ...], numbers: Counter[str]) -> list[NamedState]:
    """Name the states of one node by the number of its kind in `numbers`, and count it there."""
    first = specs[0]
    past, present = _STATE if _is_constant(first) else _INDEX if first.kind is StateKind.INDEX else _CACHE
    number = numbers[past]
    numbers[past] += 1
    return [(spec, f"{past}.{number}.{spec.part}", f"{present}.{number}.{spec.part}") for spec in specs]


def _is_constant(spec: StateSpec) -> bool:
    return spec.growth is Growth.CONSTANT


def named_states(nodes: Iterable[tuple[StateSpec, ...]]) -> Iterator[NamedState]:
    """Yield the states of some nodes, given as one tuple per node, with the names that kv-cache gives them."""
    numbers = Counter[str]()
    for node_specs in nodes:
        yield from _name_states(node_specs, numbers)


def taken_states(graph: Graph) -> Iterator[NamedState]:
    """Yield the states that `graph` takes, in the order of its inputs; for a shared cache, the spec of its writer."""
    for name, value in graph.inputs.items():
        candidates = list[NamedState]()
        for node, operand in value.uses:
            matching = [
                s for s in (*caches(node), *states(node)) if node.op.operand_index(s.taken, node.attrs) == operand
            ]
            for spec in matching[:1]:
                output = node.outputs[node.op.results(node.inputs, node.attrs).index(spec.made)]
                candidates.append((spec, name, next(iter(graph.outputs.names(output)), "")))
        yield from sorted(candidates, key=lambda state: not state[2])[:1]


def cache_records(carried: Iterable[NamedState]) -> list[dict[str, Any]]:
    """Return a record per cache of an attention.

    `layer` is its number, `window` the window of the attention or None; a `rolling` cache holds `capacity` keys (None:
    one per token), a `latent` one has no values besides the keys. A cache of integer codes has `bits`.
    """
    keys = (spec for spec, _, _ in carried if spec.part == "key" and spec.kind is not StateKind.INDEX)
    return [
        {
            "layer": i,
            "kv_heads": spec.type.shape[1],
            "head_dim": spec.type.shape[3],
            "window": spec.window,
            "rolling": (rolling := spec.growth is Growth.WINDOW),
            "capacity": spec.type.shape[2] if rolling else None,
            "latent": spec.kind is StateKind.LATENT,
            **({"bits": spec.type.dtype.bits} if spec.type.dtype.is_int else {}),
        }
        for i, spec in enumerate(keys)
    ]


def state_records(carried: Iterable[NamedState]) -> list[dict[str, Any]]:
    """Return a record per state of constant size: its input's `name` and the `shape` of a batch row."""
    return [{"name": name, "shape": list(spec.row)} for spec, name, _ in carried if _is_constant(spec)]


def manifest_records(graph: Graph, carried: Iterable[NamedState]) -> dict[str, Any]:
    """Return the records of all caches and states: `cache` and `states` as above, and `carried` with every tensor.

    A carried tensor has a `kind` and a `growth` (see `StateSpec`), the `shape` of a batch row (None: the length of the
    sequence, or of the source), and its `input` and `output` of the graph, which keys and values of a source do not
    have; `initial` is present if a state does not start with zeros.
    """

    def record(spec: StateSpec, **names: str) -> dict[str, Any]:
        shape = [n if isinstance(n, int) else None for n in spec.row]
        start = {"initial": spec.initial} if spec.initial else {}
        return {**names, "kind": spec.kind.value, "growth": spec.growth.value, "shape": shape, **start}

    carried = list(carried)
    records = [record(spec, input=name, output=present) for spec, name, present in carried]
    cross = [record(spec) for node in graph.nodes for spec in specs(node) if spec.growth is Growth.SOURCE]
    return {"cache": cache_records(carried), "states": state_records(carried), "carried": records + cross}


def max_source(graph: Graph, length: int) -> int:
    """Return the longest source of an encoder-decoder compiled for answers of `length` tokens."""
    limit = max(length, graph.meta.get("source_context") or 0)
    return min(limit, graph.meta.get("max_source_positions") or limit)
