"""Shapes of parts and repeats: titles, contents, and the values that enter and leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import load_source
from weft.backends.viz.layout.arrange import END
from weft.backends.viz.layout.scene import (
    Shape,
    abbreviate_value,
    build_scene,
    drop_number,
    list_default_open,
    select_open,
    unroll_repeat,
    write_captions,
)
from weft.backends.viz.model.network import Network, Vertex, build_network
from weft.backends.viz.model.outline import build_outline
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


def test_captions_name_caches_where_they_are_read_and_written() -> None:
    at = {s.key: s for s in build_picture("smollm2-135m", "kv-cache").all()}
    for key in ("layers.0.attn", "layers.0.attn.attention"):
        assert "past key, value" in at[key].captions[0] and at[key].captions[1] == "gives present key, value"
    assert at["layers.0-29"].captions == []


def test_value_names_are_abbreviated_for_captions() -> None:
    assert abbreviate_value("layers.0.attn.k", "layers.0.attn.attention") == "k"
    assert abbreviate_value("layers.0.attn.o", "layers.0.ffn") == "attn output"
    assert abbreviate_value("encoder.final_norm", "decoder.layers.3.cross") == "encoder output"
    assert abbreviate_value("layers.4.mlp.down", "layers.5.norm") == "mlp of the layer before"
    assert abbreviate_value("layers.0.attn.mask", "layers.5.attn") == "attn of layer 0"
    assert abbreviate_value("layers.0.attn.mask", "layers.1.attn", shared=True) == "attn of layer 0"
    assert abbreviate_value("attention_mask", "layers.5.attn") == "attention_mask"
    assert (
        abbreviate_value("past_key_values.12.key", "layers.12.attn")
        == drop_number("past_key_values.12.key")
        == "past key"
    )
    assert drop_number("present_states.3.ssm") == "present ssm"


def test_value_that_every_layer_reads_is_named_by_its_layer() -> None:
    """Layer 0 makes a mask that all later layers read; of the layer before they read its sum."""

    def layer(i: int) -> list[Vertex]:
        here, before = f"layers.{i}", f"layers.{i - 1}.out"
        return [
            Vertex(f"{here}.attn.a", "tanh", f"{here}.attn", (before, "layers.0.mask"), (f"{here}.attn.a",)),
            Vertex(f"{here}.attn.b", "tanh", f"{here}.attn", (f"{here}.attn.a",), (f"{here}.attn.b",)),
            Vertex(f"{here}.out", "tanh", here, (f"{here}.attn.b",), (f"{here}.out",)),
        ]

    first = [Vertex(f"layers.0.{name}", "exp", "layers.0", ("x",), (f"layers.0.{name}",)) for name in ("mask", "out")]
    made = build_outline(Network("net", (*first, *layer(1), *layer(2), *layer(3)), {"x": "f32[2]"}, {}))
    inner = [part for part in made.parts() if part.path == "layers.1.attn"]
    assert [list(write_captions(part, ("layers.0.mask",), (), ())) for part in inner] == [["with mask of layer 0"]]
    assert [list(write_captions(part, ("layers.0.out",), (), ())) for part in inner] == [
        ["with out of the layer before"]
    ]
