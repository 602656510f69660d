"""Parameters, FLOPs and bytes of a graph: what a model has, uses for a token, and keeps for the next one."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.interpreter import free_sizes
from weft.ir.op import Cost
from weft.ir.types import sizes

from .states import states

EXPERTS = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")  # operands of `moe` with an axis of experts


def learned(graph: Graph) -> list[Param]:
    """Parameters that hold trained or initialized numbers.

    Not tables that follow from a formula, nor the correction that a rule adds to a router's scores (DeepSeek-V3), which
    published counts leave out.
    """

    def corrects(param: Param) -> bool:
        readers = [node.op.name == "route" and node.operand("bias") is param for node in param.users]
        return bool(readers) and all(readers)

    return [p for p in graph.params.values() if not p.recipe.constant and not corrects(p)]


def elements(value: Value) -> int:
    """Count the numbers in a value of fixed shape."""
    return sizes.evaluate(value.type.elements, {})


def parameter_count(graph: Graph) -> int:
    """Count the model's parameters."""
    return sum(map(elements, learned(graph)))


def active_count(graph: Graph) -> int:
    """Count the parameters that a token uses: of experts, only those it is routed to."""
    idle = 0
    for node in graph.nodes:
        if node.op.name == "moe" and node.attrs["active"] is not None:
            stacks = [v for v in (node.operand(name) for name in EXPERTS) if v is not None]
            experts = sizes.evaluate(stacks[0].shape[0], {})
            idle += sum(elements(v) // experts for v in stacks) * (experts - node.attrs["active"])
    return parameter_count(graph) - idle


def cached(nodes: Iterable[Node]) -> list[tuple[int, int | None]]:
    """(numbers a token, window) of every attention that a cache serves."""
    found = []
    for node in nodes:
        if node.op is ops.attention and node.attrs["causal"]:
            k, v = node.operand("k"), node.operand("v")
            assert k is not None
            found.append((k.width + (0 if v is None else v.width), node.attrs["window"]))
    return found


def crossed(nodes: Iterable[Node]) -> int:
    """Count the numbers that cross-attention caches per source token."""
    found = 0
    for node in nodes:
        if node.op.name == "attention":
            q, k, v = (node.operand(name) for name in "qkv")
            assert q is not None and k is not None
            if k.shape[1] != q.shape[1]:
                found += k.width + (0 if v is None else v.width)
    return found


def state_bytes(nodes: Iterable[Node], item: int) -> int:
    """The bytes that recurrences keep for one text, however long it is, where the model's numbers take `item` bytes.

    Sums over all tokens are f32.
    """
    kept = (found for node in nodes for found in states(node).items())
    return sum(
        sizes.evaluate(sizes.product(shape), {"batch": 1}) * (item if part == "conv" else 4)
        for part, (_, shape) in kept
    )


TEXT = {"batch": 1, "seq": 64, "past": 0}


def cost(graph: Graph, **given: int) -> Cost:
    """FLOPs, bytes read and bytes written of one run of `graph`: of one text of 64 tokens with nothing before it, or of
    the sizes `given`. Sizes of neither kind (keys, tokens of a source) are as many as the tokens.
    """
    binding = TEXT | given
    binding = dict.fromkeys(free_sizes(graph), binding["past"] + binding["seq"]) | binding
    flops = read = written = 0
    for node in graph.nodes:
        one = node.op.node_cost(node)
        flops += sizes.evaluate(one.flops, binding)
        read += sizes.evaluate(one.read, binding)
        written += sizes.evaluate(one.written, binding)
    return Cost(flops, read, written)


def weight_bytes(graph: Graph) -> int:
    """Bytes of all parameters, in the dtypes that they are declared with."""
    bits = (sizes.evaluate(p.type.elements, {}) * p.type.dtype.bits for p in graph.params.values())
    return sum(bits) // 8
