"""Costs of a graph: total and active parameters, FLOPs and bytes per run, and the sizes of its caches and states."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.interpreter import list_named_sizes
from weft.ir.op import Cost, Growth, StateSpec
from weft.ir.types import sizes

from .states import find_cache_owner, find_caches, find_specs, find_states

EXPERTS = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")  # operands of `moe` with an axis of experts


def find_learned_params(graph: Graph) -> list[Param]:
    """Return the parameters with trained or initialized values, in the order of `graph.params`.

    Excluded are tables computed by a formula (`Recipe.is_constant`) and the correction bias of a router (DeepSeek-V3).
    A rule updates this bias during training; published counts also exclude it.
    """

    def corrects(param: Param) -> bool:
        readers = [node.op is ops.route and node.operand("bias") is param for node in param.users]
        return bool(readers) and all(readers)

    return [p for p in graph.params.values() if not p.recipe.is_constant and not corrects(p)]


def count_elements(value: Value) -> int:
    """Return the number of elements of `value`. Its shape must not have named sizes."""
    return sizes.evaluate(value.type.elements, {})


def count_parameters(graph: Graph) -> int:
    """Return the number of elements of all learned parameters (`find_learned_params`)."""
    return sum(map(count_elements, find_learned_params(graph)))


def count_active_parameters(graph: Graph) -> int:
    """Return `count_parameters(graph)` minus the experts of `moe` nodes that a token does not use."""
    idle = 0
    for node in graph.nodes:
        if node.op is ops.moe and node.attrs["active"] is not None:
            stacks = [v for v in (node.operand(name) for name in EXPERTS) if v is not None]
            experts = sizes.evaluate(stacks[0].shape[0], {})
            idle += sum(count_elements(v) // experts for v in stacks) * (experts - node.attrs["active"])
    return count_parameters(graph) - idle


def find_cache_sizes(nodes: Iterable[Node]) -> list[tuple[int, int | None]]:
    """Return (elements per cached token, window or None) of each cache of `nodes`, in order.
    A shared cache counts only at its first attention (`find_cache_owner`)."""
    return [
        (_count_per_slot(parts), parts[0].window)
        for node in nodes
        if (parts := find_caches(node)) and find_cache_owner(node) is node
    ]


def count_cross_cache(nodes: Iterable[Node]) -> int:
    """Return the number of elements per source token in the caches of the cross-attentions among `nodes`."""
    return sum(_count_per_slot(s for s in find_specs(node) if s.growth is Growth.SOURCE) for node in nodes)


def _count_per_slot(parts: Iterable[StateSpec]) -> int:
    return sum(sizes.evaluate(sizes.multiply_sizes(spec.slot_shape), {}) for spec in parts)


def count_state_bytes(nodes: Iterable[Node], item: int) -> int:
    """Return the bytes of the recurrent states of `nodes` per sequence: `item` per element, 4 for sums over tokens."""
    # Sums over all tokens are kept in f32, whatever the model's dtype (`StateKind.accumulates`).
    all_specs = [spec for node in nodes for spec in find_states(node)]
    counts = [sizes.evaluate(sizes.multiply_sizes(spec.row_shape), {}) for spec in all_specs]
    return sum(n * (4 if s.kind.accumulates else item) for n, s in zip(counts, all_specs, strict=True))


DEFAULT_SIZES = {"batch": 1, "seq": 64, "past": 0}
AUDIO_SIZES = {"samples": 16_000, "frames": 100}  # one second of a waveform at 16 kHz, and of a spectrogram


def compute_cost(graph: Graph, **named_sizes: int) -> Cost:
    """Return the FLOPs, bytes read and bytes written of one run of `graph`.

    `named_sizes` default to batch=1, seq=64, past=0, and one second of audio (samples=16000, frames=100); all others,
    such as the number of keys, default to past + seq.
    """
    binding = DEFAULT_SIZES | AUDIO_SIZES | named_sizes
    binding = dict.fromkeys(list_named_sizes(graph), binding["past"] + binding["seq"]) | binding
    flops = read = written = 0
    for node in graph.nodes:
        node_cost = node.op.node_cost(node)
        flops += sizes.evaluate(node_cost.flops, binding)
        read += sizes.evaluate(node_cost.read, binding)
        written += sizes.evaluate(node_cost.written, binding)
    return Cost(flops, read, written)


def count_weight_bytes(graph: Graph) -> int:
    """Return the bytes of all parameters in their declared dtypes."""
    bits = (sizes.evaluate(p.type.elements, {}) * p.type.dtype.bits for p in graph.params.values())
    # Divided at the end: a value of 4 bits takes half a byte.
    return sum(bits) // 8
