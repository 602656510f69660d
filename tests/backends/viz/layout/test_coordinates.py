"""Positions of shapes and lines: no overlapping boxes, no line through a box, a straight residual stream."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from weft.backends.viz.layout.coordinates import PlacedShape, place_shapes
from weft.backends.viz.layout.font import measure_text
from weft.backends.viz.layout.scene import ALL, Shape, list_default_open
from weft.frontends.models.presets import PRESETS

from ....sampling import each
from ..geometry import faults
from ..pages import drawn, model_of

LEAST = 11  # pixels of text


def list_open_states(root: Shape) -> Iterable[set[str]]:
    """Folded; as at first; everything open; every layer by itself."""
    everything = {s.key for s in root.all() if s.arrangement is not None}
    yield {root.key}
    yield list_default_open(root)
    yield everything
    yield everything | {s.key + ALL for s in root.all() if s.part.count > 1}


@pytest.mark.parametrize("preset", each(3, PRESETS, 1))
def test_nothing_overlaps(preset: str) -> None:
    root = drawn(preset)
    for opened in list_open_states(root):
        assert list(faults(place_shapes(root, opened))) == []


@pytest.mark.parametrize("preset", each(3, PRESETS, 1))
def test_text_fits_its_box(preset: str) -> None:
    for shape in drawn(preset).all():
        if not shape.label.symbol:
            widest = max(
                measure_text(shape.label.title, 13, bold=True),
                *(measure_text(line, LEAST) for line in shape.label.lines),
                0,
            )
            assert widest + 2 * 10 <= shape.closed.width


def test_residual_stream_is_straight() -> None:
    root = drawn("smollm2-135m")
    at = {p.shape.key: p for p in place_shapes(root, list_default_open(root)).all()}
    spine = [at[key].axis for key in ("layers.0.attn_residual", "layers.0.ffn_residual", "layers.0-29", "final_norm")]
    assert max(spine) - min(spine) < 0.01
    assert at["layers.0.attn"].x > spine[0]


def test_every_operation_is_drawn_once() -> None:
    graph, root = model_of("deepseek-v3").graph, drawn("deepseek-v3")
    opened = {s.key for s in root.all() if s.arrangement} | {s.key + ALL for s in root.all() if s.part.count > 1}
    for _ in range(3):  # what stands in opened layers is opened too
        opened |= {p.shape.key for p in place_shapes(root, opened).all() if p.shape.arrangement}
    names = [
        v.name
        for p in leaves(place_shapes(root, opened))
        for v in p.shape.part.vertices
        if v.op not in ("input", "output")
    ]
    assert sorted(names) == sorted(node.output.name for node in graph.nodes)


def leaves(placed: PlacedShape) -> Iterable[PlacedShape]:
    return (p for p in placed.all() if not p.open and p.shape.arrangement is None)
