"""Shapes of parts and repeats: titles, contents, and the values that enter and leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import load_source
from weft.backends.viz.layout.scene import Shape, build_scene, list_default_open, select_open, unroll_repeat
from weft.backends.viz.layout.wiring import END
from weft.backends.viz.model.network import build_network
from weft.ir.errors import WeftError
from weft.passes import run_passes

from ..pages import drawn, model_of

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_only_the_last_layer_of_a_period_feeds_the_next_round() -> None:
    """Five local layers and a global one, four times: what the local ones make is read by the global one alone."""
    root = build_scene(build_network(load_source(str(EXAMPLES / "local_global.py")).graph))
    (repeat,) = (shape for shape in root.inner if shape.part.count == 4)
    for i, once in enumerate(unroll_repeat(repeat).inner):
        assert once.arrangement is not None
        leaving = [(line.source, line.values) for line in once.arrangement.lines if line.target == END]
        assert leaving == [(1, (f"layers.{6 * i + 5}.ffn_residual",))]


def test_titles_state_local_and_global_layers_if_both_exist() -> None:
    def titles(source: str) -> list[str]:
        root = build_scene(build_network(load_source(source).graph))
        return [shape.label.title for shape in root.all() if shape.part.has_layers and shape.part.path]

    mixed = ["layers 0-23", "layers 0-4 · local · window 512", "layer 5 · global"]
    assert titles(str(EXAMPLES / "local_global.py")) == mixed
    assert titles("mistral-7b") == ["layers 0-31 · window 4,096"]
    assert titles("llama3.1-8b") == ["layers 0-31"]


def build_picture(preset: str, pipeline: str = "") -> Shape:
    graph = model_of(preset).graph
    return build_scene(build_network(run_passes(graph, pipeline) if pipeline else graph))


@pytest.mark.parametrize("preset", ["smollm2-135m", "deepseek-v3", "mamba-130m"])
def test_caches_add_no_boxes(preset: str) -> None:
    with_caches, without = build_picture(preset, "kv-cache"), build_picture(preset)
    assert {s.key for s in with_caches.inner} - {s.key for s in without.inner} <= {"attention_mask", "position_ids"}
    assert {s.key for s in with_caches.inner if s.part.has_layers} == {
        s.key for s in without.inner if s.part.has_layers
    }


ROOT, REPEAT = "", "layers.0-29"


def test_depth_counts_containers() -> None:
    root = drawn("smollm2-135m")
    assert select_open(root, 0) == {ROOT}
    assert select_open(root, 1) == {ROOT, REPEAT}
    assert select_open(root, 2) == {ROOT, REPEAT, "layers.0.attn", "layers.0.ffn"}
    assert select_open(root) == list_default_open(root) == {ROOT, REPEAT}


def test_named_part_opens_with_its_containers() -> None:
    root = drawn("smollm2-135m")
    assert select_open(root, 0, ["layers.0.ffn"]) == {ROOT, REPEAT, "layers.0.ffn"}
    assert select_open(root, 0, ["attn"]) == {ROOT, REPEAT, "layers.0.attn"}
    both = {"encoder.layers.0.attn", "decoder.layers.0.attn", "encoder", "decoder"}
    assert select_open(drawn("t5-base"), 0, ["attn"]) > both  # every part with that end


@pytest.mark.parametrize("name", ["tn", "layers.1.attn", "embed", ""])
def test_name_of_no_part_that_opens_is_refused(name: str) -> None:
    with pytest.raises(WeftError, match=f"unknown part '{name}'"):
        select_open(drawn("smollm2-135m"), 0, [name])
