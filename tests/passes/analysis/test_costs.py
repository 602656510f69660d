"""Costs: parameters, caches, states, FLOPs and bytes."""

from __future__ import annotations

from weft.ir import Graph, TensorType, ops, parse
from weft.ir.types import dtypes
from weft.ir.types.sizes import floordiv
from weft.passes.analysis.costs import (
    compute_cost,
    count_active_parameters,
    count_cross_cache,
    count_parameters,
    count_weight_bytes,
    find_cache_sizes,
    find_learned_params,
)

from ..models import BATCH, SEQ


def test_windowed_self_attention_has_no_cross_cache() -> None:
    """Attention in parts of texts is no cross-attention, though a part sees more keys than it has tokens."""
    for parts, kept in ((False, 2 * 12), (True, 0)):
        graph = Graph("runs")
        rows = BATCH * floordiv(SEQ + 3, 4) if parts else BATCH
        q, k = (graph.add_input(name, TensorType(dtypes.f32, (rows, n, 12))) for name, n in (("q", 4), ("k", SEQ + 8)))
        graph.add_output("y", ops.attention(q, k, k, heads=3, kv_heads=3))
        assert count_cross_cache(graph.nodes) == kept


MIXTURE = parse("""graph g {
  input %x: f32[batch, seq, 4]
  param %router: f32[3, 4] = normal([3, 4], std=0.5, stream="router")
  param %correction: f32[3] = full(0.0, dims=[3])
  param %up: f32[3, 6, 4] = normal([3, 6, 4], std=0.5, stream="up")
  param %down: f32[3, 4, 6] = normal([3, 4, 6], std=0.5, stream="down")
  param %frequencies: f32[1] = rope_frequencies(2)
  %logits: f32[batch, seq, 3] = linear(%x, %router)
  %combine: f32[batch, seq, 3] = route(%logits, %correction, k=2)
  %y: f32[batch, seq, 4] = moe(%x, %combine, %up, %down, active=2)
  output y = %y
  output f = %frequencies
}""")


def test_parameters_without_tables_of_formulas_and_corrections() -> None:
    assert [p.name for p in find_learned_params(MIXTURE)] == ["router", "up", "down"]
    assert count_parameters(MIXTURE) == 12 + 72 + 72
    assert count_active_parameters(MIXTURE) == 12 + 48 + 48  # two experts of three
    assert count_weight_bytes(MIXTURE) == 4 * (12 + 3 + 72 + 72 + 1)


def test_cost_of_a_linear_is_two_operations_for_each_weight_and_token() -> None:
    g = parse(
        'graph g { input %x: f32[batch, seq, 4] param %w: f32[6, 4] = normal([6, 4], std=1.0, stream="w") '
        "%y: f32[batch, seq, 6] = linear(%x, %w) output y = %y }"
    )
    cost = compute_cost(g, batch=2, seq=5)
    assert cost.flops == 2 * 10 * 24 and cost.read == 4 * (10 * 4 + 24) and cost.written == 4 * 10 * 6
    assert compute_cost(g).flops == 2 * 64 * 24  # one sequence of 64 tokens


def test_cache_sizes_count_key_and_value_of_each_token() -> None:
    text = (
        "graph g { input %q: f32[batch, seq, 8] input %k: f32[batch, seq, 4] "
        "%y: f32[batch, seq, 8] = attention(%q, %k, %k, heads=4, kv_heads=2, causal=true, window=3) "
        "%z: f32[batch, seq, 8] = attention(%q, %k, %k, heads=4, kv_heads=2) output y = %y output z = %z }"
    )
    assert find_cache_sizes(parse(text).nodes) == [(2 * 2 * 2, 3)]
    assert find_cache_sizes([]) == []
