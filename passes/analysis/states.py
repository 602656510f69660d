"""Caches of a model, and states of constant size, by the specs of its ops.

A graph takes the cache of attention i as past_key_values.{i}.{part} and returns it as present.{i}.{part}, the state of
recurrence j as past_states.{j}.{part} and present_states.{j}.{part}, and the keys of the index j, by which queries
choose keys, as past_index.{j}.key and present_index.{j}.key. Each of the three is counted for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from weft.ir import Graph, Node, Value, WeftError
from weft.ir.op import Growth, StateKind, StateSpec

from ..edits.edit import changed

EMBEDDED = "inputs_embeds"  # the input of embeddings in the place of input_ids
SOUND = ("input_features", "input_values")  # a spectrogram, a waveform
SOURCE = ("encoder_input_ids", *SOUND, "encoder_attention_mask")  # the inputs of an encoder, and of nothing else


NamedState = tuple[StateSpec, str, str]  # with the input that takes it, the output that makes it


def tokens_of(graph: Graph) -> Value | None:
    """The input that has the tokens of a call: their ids [batch, seq], or their embeddings [batch, seq, dim]."""
    return graph.inputs.get("input_ids") or graph.inputs.get(EMBEDDED)


def specs(node: Node) -> tuple[StateSpec, ...]:
    """All that `node` keeps from call to call, whether or not it takes it from operands already."""
    return node.op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)


def states(node: Node) -> tuple[StateSpec, ...]:
    """The states of constant size that `node` keeps, if it is a recurrence, in the order of its outputs."""
    return tuple(filter(_constant, specs(node)))


def caches(node: Node) -> tuple[StateSpec, ...]:
    """The caches of `node`, if it is an attention or an index whose keys are those of its own text."""
    return tuple(s for s in specs(node) if s.growth in (Growth.TEXT, Growth.WINDOW))


def keeper(node: Node) -> Node:
    """The attention in whose cache `node` finds its keys and values: the first of those that read the same; one with a
    window has its own, which may roll."""
    return sharing(node)[0]


def sharing(node: Node) -> list[Node]:
    """The attentions that read the cache of `node`, in order, itself among them."""
    known = _kept_by(node)
    alike = set() if known is None else {n for n in node.required("k").users if _kept_by(n) == known}
    return [node] if len(alike) < 2 else [n for n in node.graph.nodes if n in alike]


def _kept_by(node: Node) -> tuple[object, ...] | None:
    """Return all that two attentions which share a cache agree in; None for one that shares none."""
    own = caches(node)
    if not own or any(spec.window is not None or spec.growth is not Growth.TEXT for spec in own):
        return None
    named = {o.name for o in node.op.operands}
    read = ("k", "v", "k_scale", "v_scale", *(spec.taken for spec in own))
    return node.op, own, *(node.operand(name) if name in named else None for name in read)


def sums(node: Node) -> set[int]:
    """The places of the operands that add up all tokens so far, and so stay in f32."""
    return {node.op.operand_index(s.taken, node.attrs) for s in states(node) if s.kind.accumulates}


def has_state(node: Node) -> bool:
    """Return whether `node` takes a cache or a state of earlier calls as an operand."""
    return any(node.operand(s.taken) is not None for s in (*caches(node), *states(node)))


def has_cache(graph: Graph) -> bool:
    """Return whether `graph` has caches or states."""
    return any(map(has_state, graph.nodes))


def give_states(graph: Graph, node: Node, numbers: Counter[str], given: dict[str, Value | None]) -> dict[str, Value]:
    """Let `node`, an attention, an index or a recurrence, go on from inputs of `graph`, and return what it leaves.

    `numbers` counts those before it (`_named`); `given` are other operands, by name, that it then has. The inputs are
    returned, by the operands that take them.

    Raises:
        WeftError: if it leaves keys out, which a state cannot.
    """
    masked = "key_mask" in (o.name for o in node.op.operands) and node.operand("key_mask") is not None
    if masked and states(node):
        raise WeftError(f"kv-cache: %{node.output.name} has a key mask, which a state of constant size cannot have")
    found = _named((*caches(node), *states(node)), numbers)
    pasts = {spec.taken: graph.add_input(name, spec.type) for spec, name, _ in found}
    for (_, _, name), present in zip(found, changed(node, {**given, **pasts}).outputs[1:], strict=True):
        graph.add_output(name, present)
    return pasts


_CACHE, _INDEX, _STATE = (
    ("past_key_values", "present"),
    ("past_index", "present_index"),
    ("past_states", "present_states"),
)


def _named(specs: tuple[StateSpec, ...], numbers: Counter[str]) -> list[NamedState]:
    """Name the states of one node after how many of its sort `numbers` has counted, and count it."""
    first = specs[0]
    past, present = _STATE if _constant(first) else _INDEX if first.kind is StateKind.INDEX else _CACHE
    number = numbers[past]
    numbers[past] += 1
    return [(spec, f"{past}.{number}.{spec.part}", f"{present}.{number}.{spec.part}") for spec in specs]


def _constant(spec: StateSpec) -> bool:
    return spec.growth is Growth.CONSTANT


def named_states(nodes: Iterable[tuple[StateSpec, ...]]) -> Iterator[NamedState]:
    """Name the states of some nodes, those of one together, as kv-cache names what a graph takes and returns."""
    numbers = Counter[str]()
    for found in nodes:
        yield from _named(found, numbers)


def taken_states(graph: Graph) -> Iterator[NamedState]:
    """The states that `graph` takes, in the order of its inputs; of a cache that several read, as its writer does."""
    for name, value in graph.inputs.items():
        found = list[NamedState]()
        for node, place in value.uses:
            given = [s for s in (*caches(node), *states(node)) if node.op.operand_index(s.taken, node.attrs) == place]
            for spec in given[:1]:
                made = node.outputs[node.op.results(node.inputs, node.attrs).index(spec.made)]
                found.append((spec, name, next(iter(graph.outputs.names(made)), "")))
        yield from sorted(found, key=lambda state: not state[2])[:1]


def cache_records(carried: Iterable[NamedState]) -> list[dict[str, Any]]:
    """A record per cache of an attention.

    `layer` is its number, `window` that of the attention or None; a `rolling` cache holds `capacity` keys (None: as
    many as the text has tokens), a `latent` one has no values beside them. One of codes has their `bits`.
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
    """A record per state of constant size: its input's `name` and the `shape` of a row."""
    return [{"name": name, "shape": list(spec.row)} for spec, name, _ in carried if _constant(spec)]


def manifest_records(graph: Graph, carried: Iterable[NamedState]) -> dict[str, Any]:
    """The records of all that the model keeps: `cache` and `states` as above, and in `carried` every tensor.

    That has a `kind` and a `growth` (see `StateSpec`), the `shape` of a row (None: as long as the text, or the source)
    and the `input` and `output` of the graph, which keys and values of a source do not have; `initial` is there where
    a state does not begin with zeros.
    """

    def record(spec: StateSpec, **names: str) -> dict[str, Any]:
        shape = [n if isinstance(n, int) else None for n in spec.row]
        start = {"initial": spec.initial} if spec.initial else {}
        return {**names, "kind": spec.kind.value, "growth": spec.growth.value, "shape": shape, **start}

    carried = list(carried)
    own = [record(spec, input=name, output=present) for spec, name, present in carried]
    cross = [record(spec) for node in graph.nodes for spec in specs(node) if spec.growth is Growth.SOURCE]
    return {"cache": cache_records(carried), "states": state_records(carried), "carried": own + cross}


def max_source(graph: Graph, length: int) -> int:
    """The longest source of an encoder-decoder compiled for answers of `length` tokens."""
    limit = max(length, graph.meta.get("source_context") or 0)
    return min(limit, graph.meta.get("max_source_positions") or limit)
