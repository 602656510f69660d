"""Shards of weights on one device: the divided axis by the style of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.transformers.scale.shards import add_vocabulary_plan, count_shard_elements, find_divided_axis
from weft.backends.torch.transformers.scale.split import Split

from ..tiny import base_of

PLANS = {
    "base_model_tp_plan": {
        "layers.*.attn.q": "colwise",
        "layers.*.attn.o": "rowwise",
        "layers.*.ffn.experts.gate_up_proj": "packed_colwise",
        "embed_tokens": "embedding_rowwise",
        "layers.*.attn.norm": "replicated_with_grad_allreduce",
    },
    "base_model_ep_plan": {"layers.*.ffn.experts.gate_up_proj": "grouped_gemm"},
}


@pytest.mark.parametrize(
    ("key", "rank", "split", "divided"),
    [
        ("layers.3.attn.q.weight", 2, Split(tp=4), (4, 0)),
        ("layers.3.attn.q.bias", 1, Split(tp=4), (4, 0)),
        ("layers.3.attn.o.weight", 2, Split(tp=4), (4, 1)),
        ("layers.3.attn.o.bias", 1, Split(tp=4), (4, None)),  # added once, after the sum
        ("layers.3.attn.norm.weight", 1, Split(tp=4), (4, None)),
        ("embed_tokens.weight", 2, Split(tp=4), (4, 0)),
        ("layers.3.attn.q.weight", 2, Split(pp=4), (1, None)),
        ("layers.3.ffn.experts.gate_up_proj", 3, Split(tp=4), (4, 1)),
        ("layers.3.ffn.experts.gate_up_proj", 3, Split(tp=4, ep=8), (8, 0)),
    ],
)
def test_divided_axis_depends_on_the_style(key: str, rank: int, split: Split, divided: tuple[int, Any]) -> None:
    assert find_divided_axis(key, rank, split, PLANS) == divided


def test_largest_shard_of_an_uneven_division_is_counted() -> None:
    assert count_shard_elements("layers.0.attn.q.weight", (10, 6), Split(tp=4), PLANS) == 3 * 6
    assert count_shard_elements("layers.0.attn.o.weight", (10, 6), Split(tp=4), PLANS) == 10 * 2
    assert count_shard_elements("layers.0.norm.weight", (10,), Split(tp=4), PLANS) == 10


def test_vocabulary_is_divided_unless_the_plan_says_otherwise() -> None:
    lowered = base_of("dense").lowered
    plan = add_vocabulary_plan({"base_model_tp_plan": {"a": "colwise"}}, lowered)
    assert list(plan["base_model_tp_plan"].items()) == [("embed_tokens", "embedding_rowwise"), ("a", "colwise")]
    kept = {"base_model_tp_plan": {"embed_tokens": "replicate"}}
    assert add_vocabulary_plan(kept, lowered) == kept
    assert add_vocabulary_plan({"base_model_pp_plan": {}}, lowered) == {"base_model_pp_plan": {}}
