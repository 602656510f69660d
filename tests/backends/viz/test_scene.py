"""Shapes of repeats: what comes into one time of it, and what leaves it."""

from __future__ import annotations

from pathlib import Path

from weft import load_source
from weft.backends.viz.layout.arrange import END
from weft.backends.viz.layout.scene import build_scene, unroll_repeat
from weft.backends.viz.model.network import build_network

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_only_the_last_layer_of_a_period_goes_on_to_the_next() -> None:
    """Five local layers and a global one, four times: what the local ones make is read by the global one alone."""
    root = build_scene(build_network(load_source(str(EXAMPLES / "local_global.py")).graph))
    (repeat,) = (shape for shape in root.inner if shape.part.count == 4)
    for i, once in enumerate(unroll_repeat(repeat).inner):
        assert once.arrangement is not None
        leaving = [(line.source, line.values) for line in once.arrangement.lines if line.target == END]
        assert leaving == [(1, (f"layers.{6 * i + 5}.ffn_residual",))]


def test_layers_are_local_or_global_where_there_are_both() -> None:
    def titles(source: str) -> list[str]:
        root = build_scene(build_network(load_source(source).graph))
        return [shape.label.title for shape in root.all() if shape.part.has_layers and shape.part.path]

    mixed = ["layers 0-23", "layers 0-4 · local · window 512", "layer 5 · global"]
    assert titles(str(EXAMPLES / "local_global.py")) == mixed
    assert titles("mistral-7b") == ["layers 0-31 · window 4,096"]
    assert titles("llama3.1-8b") == ["layers 0-31"]
