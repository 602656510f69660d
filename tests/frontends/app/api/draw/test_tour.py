"""The tour through a model: the steps that it has, with its own numbers, and the totals of a page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import build_network
from weft.frontends.app.api.draw.tour import STEPS, build_tour, write_totals
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.models.presets import PRESETS
from weft.ir.readable import format_bytes

WORDS = {  # in the steps of a model
    "mistral-7b": (
        "grouped-query attention",
        "4,096 tokens",
        "SwiGLU",
        "causal mask",
        "memory-bound",
        "14,336 × 4,096",
    ),
    "mixtral-8x7b": ("there are 8, called experts", "2 of them", "46.7 G parameters", "12.9 G"),
    "deepseek-v3": ("multi-head latent attention", "128 heads × 192", "256 experts"),
    "mamba-130m": ("keep a state", "h ← exp(Δ A) · h"),
    "gpt2": ("LayerNorm(x)", "Every head has its own keys", "1,024 positions", "gelu(W_1 x)"),
    "bert-base": ("the keys of all tokens", "512 positions"),
}


@functools.cache
def tour_of(source: str) -> tuple[Any, list[dict[str, Any]]]:
    model = weft.load_source(source)
    facts = inspect(model)
    return facts, build_tour(model, build_network(model.graph), facts)


def text_of(steps: list[dict[str, Any]]) -> str:
    return "\n".join(" ".join([s["title"], *s["paragraphs"], *s["formulas"], *s["papers"]]) for s in steps)


@pytest.mark.parametrize("preset", WORDS)
def test_steps_have_the_ideas_and_numbers_of_the_model(preset: str) -> None:
    facts, steps = tour_of(preset)
    text = text_of(steps)
    assert [word for word in WORDS[preset] if word not in text] == []
    assert 7 <= len(steps) <= 12
    assert f"{facts.vocab:,}" in text and f"{facts.dimensions.width[0]:,}" in text
    if facts.cache_at_context:
        assert format_bytes(2 * facts.cache_at_context) in text
        assert f"KV cache {format_bytes(2 * facts.cache_at_context)} when full" in write_totals(facts)


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=() if i % 8 == 0 else pytest.mark.long) for i, p in enumerate(PRESETS)]
)
def test_every_preset_has_a_tour_of_its_parts(preset: str) -> None:
    model = weft.load_source(preset)
    network = build_network(model.graph)
    facts, steps = tour_of(preset)
    known = {shape.key for shape in build_scene(network).all()} | {v.name for v in network.vertices} | {*network.inputs}
    scopes = {v.scope for v in network.vertices}
    assert {step["at"] for step in steps} <= known | scopes | {""}
    assert all(step["title"] and step["paragraphs"] for step in steps)
    assert "{" not in text_of(steps) and "None" not in text_of(steps)
    assert f"{facts.layers} layers" in write_totals(facts)


def test_every_step_belongs_to_a_preset_or_a_quantized_model(tmp_path: Path) -> None:
    titles = {step["title"] for preset in (*WORDS, "t5-base") for step in tour_of(preset)[1]}
    assert len(titles) == len(STEPS) - 1
    graph = weft.run_passes(weft.load_source("gpt2").graph, "quantize{bits=4, method=rtn}")
    model = weft.load_source(graph)
    (last,) = build_tour(model, build_network(model.graph), inspect(model))[-1:]
    assert last["title"].startswith("Quantization") and "bits each" in text_of([last])


def test_pieces_are_those_of_the_tokenizer(smollm2_gguf: Path) -> None:
    _, steps = tour_of(str(smollm2_gguf))
    pieces = steps[0]["widget"]["pieces"]
    assert "".join(text for text, _ in pieces) == "Unbelievable! The cat sat on the mat, then it sat on the sofa."
    assert [text for text, _ in pieces][:3] == ["Un", "belie", "vable"]
