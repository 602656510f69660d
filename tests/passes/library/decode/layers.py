"""Graphs of the zoo whose layers a decode step fuses, and streams of tokens."""

from __future__ import annotations

from weft.ir import Graph, TensorType, Value
from weft.ir.types import dtypes, sizes

STREAM = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), 6))


LAYERS = {
    "variant/grouped": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/norms of q and k": "norm_qkv attention linear_residual norm_glu linear_residual",
    "packed/family qwen3-gqa": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/parallel": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/experts": "norm_qkv attention linear_residual norm_route mixture",
    "family/nemotron": "norm_qkv attention linear_residual norm_linear linear_residual",
    "family/mamba": "norm_linear split causal_conv norm_linear split gated_selective_scan linear_residual",
    "family/mamba2": "norm_linear split causal_conv split gated_ssd linear_residual",
}


def stream(*shapes: str) -> tuple[Graph, list[Value]]:
    """A graph with inputs x, y and z like a stream of tokens."""
    graph = Graph("sums")
    return graph, [graph.add_input(name, STREAM) for name in shapes]
