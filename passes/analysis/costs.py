"""What a graph costs to run, in numbers."""

from __future__ import annotations

from weft.ir import Graph
from weft.ir.interpreter import free_sizes
from weft.ir.op import Cost
from weft.ir.types import sizes

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
