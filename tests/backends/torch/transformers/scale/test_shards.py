"""Shards of weights on one device: the divided axis by the style of a plan."""

from __future__ import annotations

import re
from typing import Any

import pytest

from weft.backends.torch.transformers.scale.shards import (
    Split,
    Stages,
    add_vocabulary_plan,
    check_split,
    count_shard_elements,
    find_divided_axis,
    list_mixtures,
)
from weft.ir import WeftError

from ..tiny import base_of, plans_of

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


def stages_of(name: str, count: int) -> Stages:
    base = base_of(name)
    return Stages(base.lowered, base, count)


def test_first_stages_have_the_layers_left_over() -> None:
    stages = stages_of("dense", 2)
    assert [stages.get_layers(s) for s in range(2)] == [range(2), range(2, 3)]
    assert [len(stages_of("dense", 3).get_layers(s)) for s in range(3)] == [1, 1, 1]


def test_modules_are_in_the_stage_of_their_layer() -> None:
    stages = stages_of("dense", 2)
    paths = {"embed_tokens": 0, "layers.1.attn": 0, "layers.2": 1, "layers.2.ffn.up": 1, "norm": 1}
    assert {path: stages.find_stage(path) for path in paths} == paths


def test_tied_table_is_stored_in_the_first_and_last_stage() -> None:
    tied, dense = stages_of("tied", 2), stages_of("dense", 2)
    assert tied.list_stages("model.embed_tokens.weight") == [0, 1]
    assert dense.list_stages("model.embed_tokens.weight") == [0]
    assert dense.list_stages("lm_head.weight") == [1]
    assert dense.list_stages("model.layers.1.attn.q.weight") == [0]


def test_nodes_between_layers_follow_the_layer_before() -> None:
    stages = stages_of("dense", 3)
    places = stages.map_nodes()
    assert list(places.values()) == sorted(places.values())
    for node, stage in places.items():
        if node.scope.startswith("layers."):
            assert stage == int(node.scope.split(".")[1])
    first, last = next(iter(places)), list(places)[-1]
    assert (first.op.name, places[first], last.op.name, places[last]) == ("embedding", 0, "linear", 2)


def test_missing_degrees_are_one() -> None:
    assert Split.parse("tp=8, ep=4,pp=2") == Split(8, 4, 2, 1)
    assert Split.parse("pp=2,microbatches=8") == Split(1, 1, 2, 8)


@pytest.mark.parametrize(("split", "devices"), [(Split(), 1), (Split(4, 2, 3), 12), (Split(2, 8, 1, 16), 8)])
def test_experts_share_the_devices_of_tensor_parallelism(split: Split, devices: int) -> None:
    assert split.devices == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2", "--parallel 'dp' is unknown: choose among tp, ep, pp, microbatches, such as tp=8,ep=8,pp=2"),
        ("", "--parallel '' is unknown"),
        ("tp=0", "--parallel 'tp=0': tp takes a whole number from 1"),
        ("tp=²", "--parallel 'tp=²': tp takes a whole number from 1"),
        ("tp=1000001", "tp takes a whole number from 1"),
        ("tp=2,tp=2", "--parallel gives tp twice; give it once"),
    ],
)
def test_invalid_degrees_are_refused(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        Split.parse(text)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("dense", Split(tp=3), "tp=3 cannot share the 4 key/value heads of layers.*.attn in dense evenly; tp must"),
        ("dense", Split(ep=2), "ep=2 divides experts, but dense has none: leave ep out"),
        ("experts", Split(ep=3), "ep=3 cannot share the 8 experts of layers.*.ffn.experts in experts evenly"),
        ("experts", Split(tp=4, ep=2), "ep=2 is not a multiple of tp=4: choose ep=4 or a multiple of it"),
        ("dense", Split(pp=4), "pp=4 is more than the 3 layers of dense: each stage needs one"),
        ("mamba", Split(tp=2), "tp=2 cannot divide any part of mamba: it has no attention"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_divided_are_named(name: str, split: Split, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        check_split(split, base_of(name), plans_of(name))


def test_even_splits_are_accepted() -> None:
    check_split(Split(tp=4, pp=3), base_of("dense"), plans_of("dense"))
    check_split(Split(tp=2, ep=8), base_of("experts"), plans_of("experts"))


def test_mixtures_are_listed_with_experts_and_hidden_width() -> None:
    lowered = base_of("experts").lowered
    assert list(list_mixtures(lowered.graph)) == [(8, 16, f"layers.{i}.ffn.experts") for i in range(2)]
    assert list(list_mixtures(base_of("dense").lowered.graph)) == []
