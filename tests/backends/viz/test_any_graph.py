"""Any graph can be drawn: nothing overlaps, every value read is a line or a note, twice the same picture."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.backends.viz.layout.arrange import END, START, Box, Branches, Column, PartRows
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, Shape, build_scene
from weft.backends.viz.model.network import Network, Vertex

from ...sampling import ALL as FULL
from .geometry import faults

SCOPES = ["", "", "a", "a.b", "a.0", "a.1", "b.0", "b.0.c", "b.1", "b.1.c", "c"]
MOST = 16  # operations


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Operations that read up to three of the values before them, in scopes that may well be tangled."""
    values = [f"in{'xyz'[i]}" for i in range(draw(st.integers(1, 3)))]
    inputs, vertices = dict.fromkeys(values, "f32[4]"), []
    for i in range(draw(st.integers(1, MOST))):
        scope = draw(st.sampled_from(SCOPES))
        name = f"{scope}.v{i}" if scope else f"v{i}"
        reads = tuple(draw(st.lists(st.sampled_from(values), max_size=3, unique=True)))
        makes = (name, f"{name}_out")[: draw(st.integers(1, 2))]
        op = draw(st.sampled_from(["add", "linear", "mul", "split"]))
        vertices.append(Vertex(name, op, scope, reads, makes, ("x",) * len(reads), ("f32[4]",) * len(makes)))
        values += makes
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    return Network("any", tuple(vertices), inputs, {f"out{i}": (x, "f32[4]") for i, x in enumerate(outputs)})


@settings(derandomize=True, max_examples=300 if FULL else 60, deadline=None)
@given(networks())
def test_any_graph_is_drawn_and_told(network: Network) -> None:
    """One test, as networks take longer to draw than to check."""
    root = build_scene(network)
    nothing_overlaps(root)
    for shape in root.all():
        for told in untold(shape):
            pytest.fail(told)
        what_leaves_is_told(network, shape)


def nothing_overlaps(root: Shape) -> None:
    """Check this, but for lines that pass rows: in one column, two may share the gap between rows."""
    every = {s.key for s in root.all() if s.arrangement is not None}
    rows = {s.key for s in root.all() if s.arrangement is not None and in_rows(s.arrangement.box)}
    for opened in ({root.key}, every, every | {s.key + ALL for s in root.all() if s.part.count > 1}):
        found = [
            f for f in faults(place_shapes(root, opened)) if " lies on " not in f or f.rpartition(" in ")[2] not in rows
        ]
        assert found == []


def in_rows(box: Box) -> bool:
    """Check that some parts are arranged in rows, where columns and branches do not suffice."""
    return isinstance(box, PartRows) or (isinstance(box, (Column, Branches)) and any(map(in_rows, box.boxes)))


def untold(shape: Shape) -> list[str]:
    """List inputs of operations in a shape that have neither a line nor a note."""
    around = shape.arrangement
    if around is None:
        return []
    made = {x: i for i, part in enumerate(around.parts) for v in part.all_vertices() for x in v.makes}
    lines = {(line.source, line.target, x) for line in around.lines for x in line.values}
    missing = []
    for i, part in enumerate(around.parts):
        own = {x for v in part.all_vertices() for x in v.makes}
        for x in {x for v in part.all_vertices() for x in v.reads} - own:
            if (made.get(x, START), i, x) not in lines and x not in around.notes.get(i, ()):
                missing.append(f"{part.path} reads {x} in {shape.key!r}")
    return missing


def what_leaves_is_told(network: Network, shape: Shape) -> None:
    """Check that values read outside a part leave it by a line, or that the part inside that makes them has a note."""
    around = shape.arrangement
    if around is None or not shape.part.path or shape.part.count > 1:
        return
    inside = {v.name for v in shape.part.all_vertices()}
    wanted = {x for v in network.vertices if v.name not in inside for x in v.reads}
    wanted |= {value for value, _ in network.outputs.values()}
    out = {x for line in around.lines if line.target == END for x in line.values}
    out |= {x for values in around.unwired_results.values() for x in values}
    made = {x for v in shape.part.all_vertices() for x in v.makes}
    assert made & wanted == out, (shape.key, {x: v.name for v in network.vertices for x in v.reads})


@settings(derandomize=True, max_examples=100 if FULL else 30, deadline=None)
@given(networks())
def test_twice_the_same_picture_with_every_operation_once(network: Network) -> None:
    def points(root: Shape) -> list[object]:
        every = {s.key for s in root.all() if s.arrangement is not None}
        return [(p.shape.key, p.x, p.y, [w.points for w in p.wires]) for p in place_shapes(root, every).all()]

    first, again = build_scene(network), build_scene(network)
    assert points(first) == points(again)
    names = [v.name for v in first.part.all_vertices() if v.op not in ("input", "output")]
    assert sorted(names) == sorted(v.name for v in network.vertices)
