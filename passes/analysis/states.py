"""Caches of a model, and states of constant size, described by the `StateSpec`s of its ops.

Names of the graph inputs and outputs for them; i, j and k count independently from 0:
- the cache of attention i: past_key_values.{i}.{part} → present.{i}.{part},
- the state of recurrence j: past_states.{j}.{part} → present_states.{j}.{part},
- the keys of index k (a lightning index that selects keys): past_index.{k}.key → present_index.{k}.key.
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


NamedState = tuple[StateSpec, str, str]  # (spec, name of the graph input, name of the graph output)


def find_tokens(graph: Graph) -> Value | None:
    """Return the graph input ``input_ids`` [batch, seq], else ``inputs_embeds`` [batch, seq, dim], else None."""
    return graph.inputs.get("input_ids") or graph.inputs.get(EMBEDDED)


def find_specs(node: Node) -> tuple[StateSpec, ...]:
    """Return the specs of all caches and states that `node` can have, whether or not it has operands for them."""
    return node.op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)


def find_states(node: Node) -> tuple[StateSpec, ...]:
    """Return the specs of the states of a recurrence `node`, which have constant size; () for other nodes."""
    return tuple(filter(_is_constant, find_specs(node)))


def find_caches(node: Node) -> tuple[StateSpec, ...]:
    """Return the specs of the caches of a self-attention or lightning index; () for other nodes."""
    return tuple(s for s in find_specs(node) if s.growth in (Growth.TEXT, Growth.APPEND, Growth.WINDOW))


def find_cache_owner(node: Node) -> Node:
    """Return the first node, in graph order, with the cache of `node`: an earlier attention, or `node` itself."""
    return find_cache_sharers(node)[0]


def find_cache_sharers(node: Node) -> list[Node]:
    """Return all attentions, in graph order, that share the cache of `node` (the same keys and values), and `node`.

    An attention with a window shares its cache with no other, because its cache may roll.
    """
    key = _make_cache_key(node)
    sharers = set() if key is None else {n for n in node.required_operand("k").users if _make_cache_key(n) == key}
    return [node] if len(sharers) < 2 else [n for n in node.graph.nodes if n in sharers]


def _make_cache_key(node: Node) -> tuple[object, ...] | None:
    """Return a key that is equal for attentions that share a cache; None for a node that cannot share one."""
    cache_specs = find_caches(node)
    if not cache_specs or any(spec.window is not None or spec.growth is Growth.WINDOW for spec in cache_specs):
        return None
    named = {o.name for o in node.op.operands}
    read = ("k", "v", "k_scale", "v_scale", *(spec.past_operand for spec in cache_specs))
    return node.op, cache_specs, *(node.operand(name) if name in named else None for name in read)


def find_sum_operands(node: Node) -> set[int]:
    """Return the indices of the state operands of `node` that stay in f32, because they are sums over all tokens."""
    return {node.op.operand_index(s.past_operand, node.attrs) for s in find_states(node) if s.kind.accumulates}


def has_state(node: Node) -> bool:
    """Return whether `node` has an operand for a cache or a state of earlier tokens."""
    return any(node.operand(s.past_operand) is not None for s in (*find_caches(node), *find_states(node)))


def has_cache(graph: Graph) -> bool:
    """Return whether a node of `graph` has an operand for a cache or a state."""
    return any(map(has_state, graph.nodes))


def add_state_io(
    graph: Graph, node: Node, numbers: Counter[str], operands: dict[str, Value | None]
) -> dict[str, Value]:
    """Add graph inputs for the past caches or states of `node`, and graph outputs for the updated ones.

    `node` (attention, index or recurrence) is rebuilt with the inputs and `operands` (by name). `numbers` maps a prefix
    of input names to the number of earlier nodes, and is updated. Return the new inputs by operand name.

    Raises:
        WeftError: if `node` has both a key mask and a state: masked keys cannot be removed from a state.
    """
    is_masked = "key_mask" in (o.name for o in node.op.operands) and node.operand("key_mask") is not None
    if is_masked and find_states(node):
        why = "has a key mask and a state of constant size, from which masked tokens cannot be removed"
        raise WeftError(f"kv-cache: %{node.output.name} {why}: leave out the mask or kv-cache")
    named = _name_node_states((*find_caches(node), *find_states(node)), numbers)
    pasts = {spec.past_operand: graph.add_input(name, spec.type) for spec, name, _ in named}
    for (_, _, name), present in zip(named, rebuild_node(node, {**operands, **pasts}).outputs[1:], strict=True):
        graph.add_output(name, present)
    return pasts


_PRESENT = {"past_key_values": "present", "past_index": "present_index", "past_states": "present_states"}


def _name_node_states(node_specs: tuple[StateSpec, ...], numbers: Counter[str]) -> list[NamedState]:
    """Return the `node_specs` of one node with their input and output names, and count the node in `numbers`.
    `numbers` maps a kind (prefix of the input name, such as ``past_index``) to the number of earlier nodes."""
    first = node_specs[0]
    is_index = first.kind is StateKind.INDEX
    past = "past_states" if _is_constant(first) else "past_index" if is_index else "past_key_values"
    number = numbers[past]
    numbers[past] += 1
    return [(spec, f"{past}.{number}.{spec.part}", f"{_PRESENT[past]}.{number}.{spec.part}") for spec in node_specs]


def _is_constant(spec: StateSpec) -> bool:
    return spec.growth is Growth.CONSTANT


def name_states(nodes: Iterable[tuple[StateSpec, ...]]) -> Iterator[NamedState]:
    """Yield every spec of `nodes` (one non-empty tuple of specs per node) with the names that kv-cache assigns."""
    numbers = Counter[str]()
    for node_specs in nodes:
        yield from _name_node_states(node_specs, numbers)


def find_state_inputs(graph: Graph) -> Iterator[NamedState]:
    """Yield (spec, input name, output name) of each input of `graph` that is a cache or state, in the inputs' order.

    If several nodes read the input, the spec is that of the node whose updated cache is a graph output. If no updated
    cache or state is a graph output, the output name is "".
    """
    for name, value in graph.inputs.items():
        candidates = list[NamedState]()
        for node, operand in value.uses:
            own_specs = (*find_caches(node), *find_states(node))
            matching = [s for s in own_specs if node.op.operand_index(s.past_operand, node.attrs) == operand]
            for spec in matching[:1]:
                output = node.outputs[node.op.result_names(node.inputs, node.attrs).index(spec.present_output)]
                candidates.append((spec, name, next(iter(graph.outputs.names_of(output)), "")))
        yield from sorted(candidates, key=lambda state: not state[2])[:1]


def make_cache_records(states: Iterable[NamedState]) -> list[dict[str, Any]]:
    """Return a record per cache of an attention, in order:

    layer: the number of the cache, from 0; kv_heads and head_dim: its sizes.
    window: the window of the attention, or None.
    rolling: whether it is a rolling cache. capacity: its number of keys if it is, else None.
    latent: True for a cache of keys only, which contain the values.
    bits: the bits of a cache of integer codes; absent for others.
    """
    keys = (spec for spec, _, _ in states if spec.part == "key" and spec.kind is not StateKind.INDEX)
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


def make_state_records(states: Iterable[NamedState]) -> list[dict[str, Any]]:
    """Return a record per state of constant size: the `name` of its input and its `shape` without the batch axis."""
    return [{"name": name, "shape": list(spec.row_shape)} for spec, name, _ in states if _is_constant(spec)]


def make_manifest_records(graph: Graph, states: Iterable[NamedState]) -> dict[str, Any]:
    """Return the manifest's entries `cache` (`make_cache_records`), `states` (`make_state_records`) and `carried`.

    The list `carried` has a record for each of `states`, then for each tensor that a cross-attention caches:
    input, output: the names of the graph input and output; absent for cross-attention.
    kind, growth: see `StateSpec`.
    shape: without the batch axis; None for a size that is not constant, such as the length of the sequence.
    initial: the initial value, if it is not zero.
    """

    def record(spec: StateSpec, **names: str) -> dict[str, Any]:
        shape = [n if isinstance(n, int) else None for n in spec.row_shape]
        start = {"initial": spec.initial} if spec.initial else {}
        return {**names, "kind": spec.kind.value, "growth": spec.growth.value, "shape": shape, **start}

    states = [*states]
    records = [record(spec, input=name, output=present) for spec, name, present in states]
    cross = [record(spec) for node in graph.nodes for spec in find_specs(node) if spec.growth is Growth.SOURCE]
    constant = make_state_records(states)
    return {"cache": make_cache_records(states), "states": constant, "carried": records + cross}


def limit_source(graph: Graph, length: int) -> int:
    """Return the maximum source length, in tokens, of an encoder-decoder compiled for outputs of `length` tokens.

    It is the larger of `length` and the metadata's source_context, limited by max_source_positions.
    """
    limit = max(length, graph.meta.get("source_context") or 0)
    return min(limit, graph.meta.get("max_source_positions") or limit)
