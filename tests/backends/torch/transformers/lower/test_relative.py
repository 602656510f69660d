"""Attention with relative keys and values in models for transformers."""

from __future__ import annotations

from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides

from .....lowered import forms
from ....torch.generated import graph_of


def test_relative_attention_computes_visible_keys_and_distances_once() -> None:
    graph = graph_of("variant/relative")
    (lowered,) = lower_sides(forms(graph, "transformers"))
    count = sum(n.op.name == "relative_attention" for n in lowered.graph.nodes)
    texts = [s.text for s in lowered.base.statements]
    calls = [t for t in texts if t.startswith("relative_attention(")]
    assert len(calls) == count > 1 and all(t.endswith(".transpose(1, 2).flatten(2)") for t in calls)
    assert texts.count("visible({0}, {1})") == texts.count("key_distances({0}, {1})") == 1
    assert sum(".update(" in t for t in texts) == count
