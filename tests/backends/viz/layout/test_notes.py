"""Captions for values without a line."""

from __future__ import annotations

from weft.backends.viz.layout.notes import abbreviate_value, drop_number, write_captions
from weft.backends.viz.layout.scene import Shape, build_scene
from weft.backends.viz.model.network import Network, Vertex, build_network
from weft.backends.viz.model.outline import build_outline
from weft.passes import run_passes

from ..pages import model_of


def build_picture(preset: str, pipeline: str = "") -> Shape:
    graph = model_of(preset).graph
    return build_scene(build_network(run_passes(graph, pipeline) if pipeline else graph))


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
