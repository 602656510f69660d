"""The vocabulary of GGUF tables: row orders, layers by lists and periods, experts and their routers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import Router
from weft.frontends.models.tables import gguf
from weft.frontends.models.tables.family import Fetch
from weft.frontends.models.tables.settings import Settings
from weft.frontends.models.tables.templates import reshape_tensor
from weft.ir import MemoryReader, WeftError

SETTINGS = Settings(11, 8, 2, heads=2, ffn=6)
EXPERTS = {
    "block_count": 2,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 6,
    gguf.SPARSE: [1],
}
FILE: dict[str, Any] = {
    **{"vocab_size": 11, "embedding_length": 8, "block_count": 2, "attention.head_count": 2},
    **{"feed_forward_length": 6, "attention.layer_norm_rms_epsilon": 1e-5, "context_length": 64},
}


def value(template: Any, tensors: dict[str, np.ndarray], part: str = "weight") -> np.ndarray:
    recipe = template(Fetch(frozenset(tensors), "", {}, "0"), part, SETTINGS)
    return np.asarray(recipe.evaluate(MemoryReader(tensors)))


def test_adjacent_rows_of_pairs_are_separated() -> None:
    rows = np.arange(8.0, dtype=np.float32)
    found = value(gguf.deinterleave_heads("q", "q"), {"q.bias": rows}, "bias")
    np.testing.assert_array_equal(found, [0, 2, 1, 3, 4, 6, 5, 7])
    matrix = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(
        value(gguf.deinterleave_heads("q", "k"), {"q.weight": matrix}), matrix[[0, 2, 1, 3, 4, 6, 5, 7]]
    )


@pytest.mark.parametrize(
    ("pattern", "local"),
    [(None, [True, False, True]), (3, [True, True, False]), (0, [True] * 3), ([1, 0, 0, 1], [True, False, False])],
)
def test_local_layers_have_a_period_or_a_list(pattern: Any, local: list[bool]) -> None:
    config = {"block_count": 3} | ({} if pattern is None else {"attention.sliding_window_pattern": pattern})
    assert gguf.find_local_layers(config, 2) == local
    assert gguf.build_windows(2)(config) is None
    windows = gguf.build_windows(2)({**config, "attention.sliding_window": 8})
    assert windows == tuple(8 if is_local else None for is_local in local)
    assert [rope is not None for rope in gguf.build_local_ropes(2)(config)] == local


def test_kv_heads_of_hybrids_are_the_maximum() -> None:
    assert gguf.find_max_kv_heads({"attention.head_count_kv": [0, 2, 0]}) == 2
    assert gguf.find_max_kv_heads({"attention.head_count_kv": 3}) == 3
    assert gguf.build_interleaved_rope({}).interleaved


def test_widths_may_differ_by_layer_but_heads_may_not() -> None:
    assert gguf.BASE.read({**FILE, "feed_forward_length": [6, 6, 9]}, frozenset(), "f").ffn == 6
    assert gguf.BASE.derive("x").read({**FILE, "feed_forward_length": [6, 8]}, frozenset(), "f").ffn == (6, 8)
    with pytest.raises(WeftError, match=r"attention.head_count="):
        gguf.BASE.derive("x").read({**FILE, "attention.head_count": [2, 4]}, frozenset(), "f")


def test_tensors_show_biases_ties_and_norms() -> None:
    keys = frozenset(["blk.0.attn_q.bias", "output.bias", "output.weight", "blk.0.attn_q_norm.weight"])
    s = gguf.BASE.read(FILE, keys, "f")
    assert (s.tie, s.qkv_bias, s.out_bias, s.head_bias, s.qk_norm) == (False, True, False, True, "head")
    assert gguf.BASE.read(FILE, frozenset(), "f").tie


def test_tensors_that_may_be_packed() -> None:
    template = gguf.read_or("a", lambda fetch, part, s: fetch(f"b.{part}"))
    np.testing.assert_array_equal(value(template, {"a.weight": np.ones(1), "b.weight": np.zeros(1)}), [1])
    np.testing.assert_array_equal(value(template, {"b.weight": np.zeros(1)}), [0])
    assert value(reshape_tensor("a", 2, -1), {"a": np.ones(4)}).shape == (2, 2)


def test_experts_are_in_the_listed_layers() -> None:
    dense, sparse = gguf.build_experts(Router(), limit=7.0)(EXPERTS)
    assert dense is None
    assert (sparse.experts, sparse.hidden, sparse.k, sparse.limit, sparse.shared) == (4, 6, 2, 7.0, None)
    routed = gguf.route_experts("sigmoid", scale=3.0)({**EXPERTS, "expert_shared_count": 2})[1]
    assert (routed.router.scoring, routed.router.scale, routed.shared.hidden) == ("sigmoid", 3.0, 12)


def test_routers_follow_the_file() -> None:
    router = gguf.read_routing({}, "sigmoid")
    assert (router.scoring, router.correction, router.renormalize, router.scale) == ("sigmoid", True, False, 1.0)
    stated = {
        "expert_gating_func": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 4,
    }
    router = gguf.read_routing(stated, "sigmoid")
    assert (router.scoring, router.correction, router.renormalize, router.scale) == ("softmax", False, True, 2.5)
    assert (router.groups, router.group_score) == (4, "max")
    with pytest.raises(
        WeftError, match=r"expert_gating_func=3 is not supported; known are 1 \(softmax\), 2 \(sigmoid\)"
    ):
        gguf.read_routing({"expert_gating_func": 3}, "softmax")
