"""Shapes of repeats: what comes into one time of it, and what leaves it."""

from __future__ import annotations

from pathlib import Path

from weft import load_source
from weft.backends.viz.arrange import END
from weft.backends.viz.network import network
from weft.backends.viz.scene import scene, times

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_only_the_last_layer_of_a_period_goes_on_to_the_next() -> None:
    """Five local layers and a global one, four times: what the local ones make is read by the global one alone."""
    root = scene(network(load_source(str(EXAMPLES / "local_global.py")).graph))
    (repeat,) = (shape for shape in root.inner if shape.part.count == 4)
    for i, once in enumerate(times(repeat).inner):
        assert once.arrangement is not None
        leaving = [(line.source, line.values) for line in once.arrangement.lines if line.target == END]
        assert leaving == [(1, (f"layers.{6 * i + 5}.ffn_residual",))]
