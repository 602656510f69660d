"""Panels, compared with the ops themselves, products of masks, formulas by hand, and the runtime's memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import (
    MLA,
    MLP,
    Attention,
    Block,
    BlockSparse,
    Decoder,
    Encoder,
    GatedMLP,
    LightningIndex,
    Mamba,
    RMSNorm,
    RoPE,
    TransientGlobalAttention,
    TransientGlobals,
    load_source,
)
from weft.backends.viz import panels
from weft.backends.viz.model.network import build_network
from weft.backends.viz.panels import mask_panel as attention
from weft.backends.viz.panels.kinds import abbreviate_layers, group_by_kind
from weft.frontends.app.api.inspect.counting import inspect
from weft.ir import Graph
from weft.ir.ops import caches
from weft.ir.ops.softmax_attention import attention as op
from weft.ir.schema.visible_keys import PATTERNS

from .pages import model_of

KINDS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 5, "keep_first": 2},
    *({"pattern": name, "stride": 3} for name in PATTERNS[1:]),
    {"pattern": "dilated", "window": 9, "stride": 2},
    {"pattern": "fixed", "stride": 6, "summary": 2},
]


def model(*kinds: dict[str, Any], context: int | None = 64) -> Graph:
    blocks = [Block(Attention(4, 2, rope=RoPE(), **kind), GatedMLP(48), RMSNorm()) for kind in kinds]
    graph: Graph = load_source(Decoder(50, 32, blocks, context=context)).graph
    return graph


def told(graph: Graph) -> dict[str, Any]:
    return panels.build_panels(build_network(graph))


def seen(graph: Graph, n: int) -> list[Any]:
    """Return the visible keys of each query by the attention's reference: values are unit vectors."""
    masks = []
    for node in graph.nodes:
        if node.op is op:
            attrs = {**node.attrs, "heads": 1, "kv_heads": 1, "value_dim": None}
            weights = op.reference(np.zeros((1, n, 2)), np.zeros((1, n, 2)), np.eye(n)[None], **attrs)
            masks.append(np.asarray(weights)[0] > 0)
    return masks


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masks_are_what_the_op_lets_through(kind: dict[str, Any]) -> None:
    graph = model(kind)
    (found,) = told(graph)["attention"]["kinds"]
    assert not found["scaled"]
    shown = np.array([[c == "1" for c in row] for row in found["mask"]])
    assert (shown == seen(graph, attention.TOKENS)[0]).all()


def test_large_windows_are_drawn_small_and_told_true() -> None:
    (found,) = told(model_of("mistral-7b").graph)["attention"]["kinds"]
    assert found["scaled"] and found["title"] == "Causal, window 4,096" and found["where"] == "layers 0–31"
    assert found["mask"][20] == "0" * 13 + "1" * 8 + "0" * 3
    assert any("less than 4,096 positions away; 8 in the picture" in text for text in found["sentences"])


def test_encoders_sources_and_sinks() -> None:
    both, causal, cross = told(model_of("t5-base").graph)["attention"]["kinds"]
    assert [k["where"] for k in (both, causal, cross)] == ["encoder layers 0–11", *["decoder layers 0–11"] * 2]
    assert set(both["mask"]) == {"1" * 24} and set(cross["mask"]) == {"1" * 16} and cross["cross"]
    (sinks,) = told(model({"sinks": True}))["attention"]["kinds"]
    assert sinks["sinks"] and any("extra logit" in text for text in sinks["sentences"])


@pytest.mark.parametrize(
    ("sparse", "scaled"), [(BlockSparse(2), False), (BlockSparse(64, sides=3, first_weight=4, dense=704), True)]
)
def test_blocks(sparse: BlockSparse, scaled: bool) -> None:
    graph = load_source(Encoder(50, 32, 2, Block(Attention(4, mask=sparse), MLP(48)))).graph
    (found,) = told(graph)["attention"]["kinds"]
    n, block = attention.TOKENS, np.arange(attention.TOKENS) // 2
    sides, last = min(sparse.sides, 2), (n - 1) // 2
    near = abs(block[:, None] - block) <= sides
    ends = (block == 0) | (block == last)
    assert found["mask"] == ["".join("01"[int(x)] for x in row) for row in near | ends | ends[:, None]]
    assert (found["scaled"], found["title"]) == (scaled, f"Bidirectional, blocks of {sparse.block}")
    texts = " ".join(found["sentences"])
    assert ("count 4 times" in texts) == ("at most 704 tokens" in texts) == ("(2 in the picture)" in texts) == scaled
    assert told(graph)["attention"]["reach"] is None


def test_attention_in_parts_of_texts_has_no_picture_of_a_mask() -> None:
    layers = Block(TransientGlobalAttention(4), MLP(48)), Block(Attention(4), MLP(48))
    relative = TransientGlobals(4, window=4, block=2)
    for chosen, wheres in ((layers, ["layer 1"]), (layers[:1], [])):
        graph = load_source(Encoder(50, 32, [*chosen], relative=relative)).graph
        found = told(graph).get("attention", {"kinds": []})
        assert [kind["where"] for kind in found["kinds"]] == wheres


def test_a_rolling_cache_holds_what_writing_puts_there() -> None:
    (found,) = told(model({"window": 5, "keep_first": 2}))["attention"]["kinds"]
    steps, cache = found["rolling"]["held"], np.full((1, 7, 1), -1.0)
    assert (found["rolling"]["slots"], found["rolling"]["first"]) == (7, 2) and len(steps) > 14
    for t, held in enumerate(steps):
        cache = caches.write_rolling_cache(cache, np.full((1, 1, 1), float(t)), np.array([t]), t, 2)
        assert held == cache[0, :, 0].tolist()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_reach_of_a_pattern_without_window_is_that_of_its_mask(pattern: str) -> None:
    graph, n = model({"pattern": pattern, "stride": 5} if pattern != "dense" else {}), 64
    reach, (mask,) = told(graph)["attention"]["reach"], seen(graph, n)
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
def test_the_reach_of_layers_is_that_of_their_masks_one_after_the_other(kinds: list[dict[str, Any]]) -> None:
    graph, n = model(*kinds), 64
    path, steps = np.eye(n, dtype=bool), told(graph)["attention"]["reach"]["steps"]
    for mask, (_, back, _) in zip(seen(graph, n), steps, strict=True):
        path = mask.astype(int) @ path.astype(int) > 0
        assert back == n - 1 - np.flatnonzero(path[-1])[0]


def test_one_layer_that_sees_all_ends_the_count() -> None:
    reach = told(model({"window": 4}, {"window": 4}, {}, {"window": 4}))["attention"]["reach"]
    assert [back for _, back, _ in reach["steps"]] == [3, 6, None, None]
    assert told(model({}))["attention"]["reach"] is None
    mistral = told(model_of("mistral-7b").graph)["attention"]["reach"]
    assert mistral["steps"][-1][1] == 32 * 4095 and mistral["context"] == 32_768


# -- positions


@pytest.mark.parametrize(
    ("scaling", "config"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("llama3", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}),
    ],
)
def test_wavelengths_before_and_after_scaling(scaling: str, config: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = RoPE(10_000, scaling=scaling, factor=config["factor"], original=2048)
    block = Block(Attention(2, head_dim=64, rope=rope), GatedMLP(48), RMSNorm())
    (found,) = told(load_source(Decoder(50, 128, block=block, layers=1, context=8192)).graph)["positions"]
    parameters = {**config, "rope_theta": 10_000.0, "original_max_position_embeddings": 2048}
    known = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=8192, rope_parameters=parameters
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[scaling](known, "cpu")
    np.testing.assert_allclose(found["after"], 2 * math.pi / theirs.double().numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["before"], 2 * math.pi * 10_000 ** (np.arange(32) / 32), rtol=1e-5)
    assert (found["original"], found["context"], found["scaling"]) == (2048, 8192, scaling)


def test_plain_rotary_positions_have_one_curve() -> None:
    (found,) = told(model_of("smollm2-135m").graph)["positions"]
    assert found["after"] is None and found["before"][0] == pytest.approx(2 * math.pi, rel=1e-5)
    assert "positions" not in told(model_of("gpt2").graph)


# -- caches


def kept(panel: dict[str, Any], name: str, tokens: int) -> int:
    variant = next(v for v in panel["variants"] if v["name"] == name)
    return sum(width * min(window or tokens, tokens) for width, window in variant["kept"])


def test_caches_by_heads() -> None:
    found = told(model_of("llama3.1-8b").graph)["caches"]
    assert kept(found, "this model", 1000) == 32 * 1000 * 2 * 8 * 128
    assert kept(found, "multi-head", 1000) == 32 * 1000 * 2 * 32 * 128
    assert kept(found, "multi-query", 1000) == 32 * 1000 * 2 * 128
    assert kept(found, "latent", 1000) == 32 * 1000 * (4 * 128 + 64)
    assert kept(found, "window", 100_000) == 32 * 4096 * 2 * 8 * 128
    assert found["same"] == "grouped-query" and "grouped-query" not in [v["name"] for v in found["variants"]]
    latent = told(model_of("deepseek-v3").graph)["caches"]
    assert kept(latent, "this model", 7) == 61 * 7 * 576
    assert kept(latent, "multi-head", 7) == 61 * 7 * 128 * (192 + 128)  # DeepSeek-V3: keys of 192, values of 128
    banded = told(model_of("gpt3-175b").graph)["caches"]
    assert kept(banded, "no window", 2048) == 96 * 2048 * 2 * 12_288 and banded["same"] == "multi-head"


LATENT = MLA(4, 24, 8, 8, 8, RoPE(10_000))
CHOOSING = replace(LATENT, index=LightningIndex(2, 10, top_k=5))


MIXERS = {
    "full": Attention(4, 2, rope=RoPE()),
    "window": Attention(4, 2, window=16),
    "latent": LATENT,
    "chosen": CHOOSING,
}


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_this_model_keeps_what_the_runtime_allocates(tmp_path: Path, mixer: Any) -> None:
    made = Decoder(vocab=64, dim=64, layers=2, block=Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6)), context=128)
    weft.compile(made, tmp_path / "out")
    allocated = weft.load(tmp_path / "out").decoder.cache_bytes(1, 128)
    assert 4 * kept(told(load_source(made).graph)["caches"], "this model", 128) == allocated


def test_an_index_is_told_with_what_it_keeps() -> None:
    made = load_source(Decoder(64, 32, 2, Block(CHOOSING, GatedMLP(48)), context=128))
    found = told(made.graph)
    (kind,) = found["attention"]["kinds"]
    assert (
        "Of these, each token chooses the 5 with the largest scores of an index (DeepSeek-V3.2)." in kind["sentences"]
    )
    assert kept(found["caches"], "this model", 100) == 2 * 100 * (24 + 8 + 10)
    assert kept(found["caches"], "multi-query", 100) == 2 * 100 * (8 + 8 + 8 + 10)
    assert inspect(made).cache_per_token == 2 * (24 + 8 + 10)


def test_states_are_told_with_caches() -> None:
    found = told(model_of("mamba-130m").graph)
    state = inspect(model_of("mamba-130m")).state_bytes
    numbers, rest = found["caches"]["state"]
    assert state == {"f32": 4 * numbers + rest, "f16": 2 * numbers + rest}
    assert set(found) == {"caches"}


# -- experts


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "switch-base-8"])
def test_experts_and_what_is_idle(preset: str) -> None:
    source = model_of(preset)
    found, counted = told(source.graph)["experts"], inspect(source)
    assert sum(rule["idle"] for rule in found) == counted.parameters - counted.active_parameters
    for rule in found:
        for example in rule["examples"]:
            assert len(example) == rule["k"] and all(0 <= e < rule["experts"] for e, _ in example)
    if preset == "deepseek-v3":
        groups = [{e // 32 for e, _ in example} for example in found[0]["examples"]]
        assert found[0]["shared"] and max(map(len, groups)) <= 4 and len(groups) > 9
    assert not any(rule["shared"] for rule in found) or preset == "deepseek-v3"


def test_scopes_are_told_short() -> None:
    assert abbreviate_layers([f"layers.{i}.attn" for i in range(8)]) == "layers 0–7"
    assert abbreviate_layers([f"layers.{i}.attn" for i in range(0, 8, 2)]) == "layers 0, 2 … 6"
    assert abbreviate_layers(["layers.3.attn"]) == "layer 3"
    assert abbreviate_layers([f"layers.{i}.attn" for i in (0, 1, 2, 4, 5, 6)]) == "layers 0–2, 4–6"


def test_hybrids_have_every_kind() -> None:
    blocks = [Block(Mamba(48, state=5, conv=4), norm=RMSNorm()), Block(Attention(4, 2, window=8), GatedMLP(48))]
    graph = load_source(Decoder(50, 32, blocks * 2, context=64)).graph
    assert [len(found) for found in group_by_kind(build_network(graph)).values()] == [2]
    reach = told(graph)["attention"]["reach"]
    assert [back for _, back, _ in reach["steps"]] == [None] * 4
