"""Costs: parameters, caches, states, FLOPs and bytes."""

from __future__ import annotations

from weft.ir import Graph, TensorType, ops
from weft.ir.types import dtypes
from weft.ir.types.sizes import floordiv
from weft.passes.analysis.costs import count_cross_cache

from ..models import BATCH, SEQ


def test_runs_of_tokens_keep_no_keys_of_a_source() -> None:
    """Attention in parts of texts is no cross-attention, though a part sees more keys than it has tokens."""
    for parts, kept in ((False, 2 * 12), (True, 0)):
        graph = Graph("runs")
        rows = BATCH * floordiv(SEQ + 3, 4) if parts else BATCH
        q, k = (graph.add_input(name, TensorType(dtypes.f32, (rows, n, 12))) for name, n in (("q", 4), ("k", SEQ + 8)))
        graph.add_output("y", ops.attention(q, k, k, heads=3, kv_heads=3))
        assert count_cross_cache(graph.nodes) == kept
