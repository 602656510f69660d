"""Masks, rolling caches and receptive fields, compared with the ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft import (
    MLP,
    Attention,
    Block,
    BlockSparse,
    Encoder,
    TransientGlobalAttention,
    TransientGlobals,
    load_source,
)
from weft.backends.viz.panels import mask_panel as attention
from weft.ir.schema.visible_keys import PATTERNS

from ....ir.ops.attention_oracle import write_rolling_cache
from ..pages import model_of
from .graphs import find_visible_keys, model, panels_of

KINDS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 5, "keep_first": 2},
    *({"pattern": name, "stride": 3} for name in PATTERNS[1:]),
    {"pattern": "dilated", "window": 9, "stride": 2},
    {"pattern": "fixed", "stride": 6, "summary": 2},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masks_equal_the_reference_of_the_op(kind: dict[str, Any]) -> None:
    graph = model(kind)
    (found,) = panels_of(graph)["attention"]["kinds"]
    assert not found["scaled"]
    shown = np.array([[c == "1" for c in row] for row in found["mask"]])
    assert (shown == find_visible_keys(graph, attention.TOKENS)[0]).all()


def test_large_windows_are_drawn_small_and_described_exactly() -> None:
    (found,) = panels_of(model_of("mistral-7b").graph)["attention"]["kinds"]
    assert found["scaled"] and found["title"] == "Causal, window 4,096" and found["where"] == "layers 0–31"
    assert found["mask"][20] == "0" * 13 + "1" * 8 + "0" * 3
    assert any("less than 4,096 positions away; 8 in the picture" in text for text in found["sentences"])


def test_masks_of_encoders_cross_attention_and_sinks() -> None:
    both, causal, cross = panels_of(model_of("t5-base").graph)["attention"]["kinds"]
    assert [k["where"] for k in (both, causal, cross)] == ["encoder layers 0–11", *["decoder layers 0–11"] * 2]
    assert set(both["mask"]) == {"1" * 24} and set(cross["mask"]) == {"1" * 16} and cross["cross"]
    (sinks,) = panels_of(model({"sinks": True}))["attention"]["kinds"]
    assert sinks["sinks"] and any("extra logit" in text for text in sinks["sentences"])


@pytest.mark.parametrize(
    ("sparse", "scaled"), [(BlockSparse(2), False), (BlockSparse(64, sides=3, first_weight=4, dense=704), True)]
)
def test_masks_of_block_sparse_attention(sparse: BlockSparse, scaled: bool) -> None:
    graph = load_source(Encoder(50, 32, 2, Block(Attention(4, mask=sparse), MLP(48)))).graph
    (found,) = panels_of(graph)["attention"]["kinds"]
    n, block = attention.TOKENS, np.arange(attention.TOKENS) // 2
    sides, last = min(sparse.sides, 2), (n - 1) // 2
    near = abs(block[:, None] - block) <= sides
    ends = (block == 0) | (block == last)
    assert found["mask"] == ["".join("01"[int(x)] for x in row) for row in near | ends | ends[:, None]]
    assert (found["scaled"], found["title"]) == (scaled, f"Bidirectional, blocks of {sparse.block}")
    texts = " ".join(found["sentences"])
    assert ("count 4 times" in texts) == ("at most 704 tokens" in texts) == ("(2 in the picture)" in texts) == scaled
    assert panels_of(graph)["attention"]["reach"] is None


def test_attention_within_folded_windows_has_no_mask() -> None:
    layers = Block(TransientGlobalAttention(4), MLP(48)), Block(Attention(4), MLP(48))
    relative = TransientGlobals(4, window=4, block=2)
    for chosen, wheres in ((layers, ["layer 1"]), (layers[:1], [])):
        graph = load_source(Encoder(50, 32, [*chosen], relative=relative)).graph
        found = panels_of(graph).get("attention", {"kinds": []})
        assert [kind["where"] for kind in found["kinds"]] == wheres


def test_rolling_cache_equals_write_rolling_cache() -> None:
    (found,) = panels_of(model({"window": 5, "keep_first": 2}))["attention"]["kinds"]
    steps, cache = found["rolling"]["held"], np.full((1, 7, 1), -1.0)
    assert (found["rolling"]["slots"], found["rolling"]["first"]) == (7, 2) and len(steps) > 14
    for t, held in enumerate(steps):
        cache = write_rolling_cache(cache, np.full((1, 1, 1), float(t)), np.array([t]), t, 2)
        assert held == cache[0, :, 0].tolist()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_reach_of_a_pattern_equals_that_of_its_mask(pattern: str) -> None:
    graph, n = model({"pattern": pattern, "stride": 5} if pattern != "dense" else {}), 64
    reach, (mask,) = panels_of(graph)["attention"]["reach"], find_visible_keys(graph, n)
    first = int(np.flatnonzero(mask[-1])[0])
    back = reach["steps"][0][1] if reach else None
    assert first < 5 if back is None else back == n - 1 - first


@pytest.mark.parametrize(
    "kinds",
    [
        [{"window": 3}] * 4,
        [{"window": 3}, {"window": 6}, {"window": 2}],
        [{"window": 3}, {"pattern": "chunked", "stride": 8}, {"window": 4}],
        [{"pattern": "dilated", "window": 7, "stride": 3}] * 3,
    ],
    ids=str,
)
def test_reach_of_layers_equals_the_product_of_their_masks(kinds: list[dict[str, Any]]) -> None:
    graph, n = model(*kinds), 64
    path, steps = np.eye(n, dtype=bool), panels_of(graph)["attention"]["reach"]["steps"]
    for mask, (_, back, _) in zip(find_visible_keys(graph, n), steps, strict=True):
        path = mask.astype(int) @ path.astype(int) > 0
        assert back == n - 1 - np.flatnonzero(path[-1])[0]


def test_reach_is_unbounded_from_a_full_layer_on() -> None:
    reach = panels_of(model({"window": 4}, {"window": 4}, {}, {"window": 4}))["attention"]["reach"]
    assert [back for _, back, _ in reach["steps"]] == [3, 6, None, None]
    assert panels_of(model({}))["attention"]["reach"] is None
    mistral = panels_of(model_of("mistral-7b").graph)["attention"]["reach"]
    assert mistral["steps"][-1][1] == 32 * 4095 and mistral["context"] == 32_768
