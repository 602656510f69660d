"""What a model keeps from call to call: KV caches, and the states of constant size that recurrences carry."""

from __future__ import annotations

from typing import Any

from weft.ir import Graph, Node, TensorType, Value, WeftError
from weft.ir.types import dtypes
from weft.ir.types.sizes import Size

from ..edits.edit import changed

RECURRENCES = {"causal_conv", "selective_scan", "ssd", "linear_attention", "gated_linear_attention"}
State = tuple[str, tuple[Size, ...]]  # the operand that takes it, its shape


def states(node: Node) -> dict[str, State]:
    """The states of a recurrence by their parts — conv, ssm, state, norm — in the order of its outputs; or nothing."""
    name = node.op.name
    if name not in RECURRENCES or node.attrs.get("causal") is False:
        return {}
    batch, _, width = node.output.shape
    if name == "causal_conv":
        channels, taps = _shape(node, "weight")
        assert isinstance(taps, int)
        return {"conv": ("past", (batch, taps - 1, channels))}
    if name == "selective_scan":
        channels, numbers = _shape(node, "a")
        return {"ssm": ("past", (batch, numbers, channels))}
    heads = node.attrs["heads"]
    groups = heads if name == "linear_attention" else node.attrs["groups"]
    matrix = (batch, heads, _shape(node, "b" if name == "ssd" else "q")[2] // groups, width // heads)
    if name == "linear_attention":
        return {"state": ("past_state", matrix), "norm": ("past_norm", matrix[:3])}
    return {"ssm" if name == "ssd" else "state": ("past", matrix)}


def sums(node: Node) -> set[int]:
    """The places of the operands that add up all tokens so far, and so stay in f32."""
    operands = (operand for part, (operand, _) in states(node).items() if part != "conv")
    return {node.op.operand_index(operand) for operand in operands}


def has_state(node: Node) -> bool:
    """Whether `node` is a recurrence that takes its past from an operand."""
    return any(node.operand(operand) is not None for operand, _ in states(node).values())


def give_states(graph: Graph, node: Node, number: int) -> None:
    """Let the recurrence `node` go on from past_states.{number}.{part} and return present_states.{number}.{part}.

    Raises:
        WeftError: if it leaves keys out, which a state cannot.
    """
    if node.op.name == "linear_attention" and node.operand("key_mask") is not None:
        raise WeftError(f"kv-cache: %{node.output.name} has a key mask, which a state of constant size cannot have")
    parts, given = states(node), dict[str, Value | None]()
    for part, (operand, shape) in parts.items():
        dtype = node.output.type.dtype if part == "conv" else dtypes.f32
        given[operand] = graph.add_input(f"past_states.{number}.{part}", TensorType(dtype, shape))
    for part, present in zip(parts, changed(node, given).outputs[1:], strict=True):
        graph.add_output(f"present_states.{number}.{part}", present)


def _shape(node: Node, operand: str) -> tuple[Any, ...]:
    value = node.operand(operand)
    assert value is not None
    return value.shape


def has_cache(graph: Graph) -> bool:
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
