"""Arrangement of any graph: nothing overlaps, every value read is a line or a note, twice the same picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.backends.viz.layout.arrange import (
    END,
    START,
    Box,
    Branches,
    Column,
    PartRows,
    find_exits,
    link_parts,
    wire_parts,
)
from weft.backends.viz.layout.coordinates import PORT, place_shapes
from weft.backends.viz.layout.scene import ALL, Shape, build_scene, list_default_open
from weft.backends.viz.model.network import Network, Vertex, Weight, build_network
from weft.backends.viz.model.outline import PicturePart
from weft.passes import run_passes

from ....sampling import ALL as FULL
from ..geometry import faults
from ..pages import model_of

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
def test_any_graph_is_arranged_without_overlap_and_with_all_values(network: Network) -> None:
    """One test, as networks take longer to draw than to check."""
    root = build_scene(network)
    check_overlaps(root)
    for shape in root.all():
        for told in list_missing_reads(shape):
            pytest.fail(told)
        check_leaving_values(network, shape)


def check_overlaps(root: Shape) -> None:
    """Check this, but for lines that pass rows: in one column, two may share the gap between rows."""
    every = {s.key for s in root.all() if s.arrangement is not None}
    rows = {s.key for s in root.all() if s.arrangement is not None and has_rows(s.arrangement.box)}
    for opened in ({root.key}, every, every | {s.key + ALL for s in root.all() if s.part.count > 1}):
        found = [
            f for f in faults(place_shapes(root, opened)) if " lies on " not in f or f.rpartition(" in ")[2] not in rows
        ]
        assert found == []


def has_rows(box: Box) -> bool:
    """Check that some parts are arranged in rows, where columns and branches do not suffice."""
    return isinstance(box, PartRows) or (isinstance(box, (Column, Branches)) and any(map(has_rows, box.boxes)))


def list_missing_reads(shape: Shape) -> list[str]:
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


def check_leaving_values(network: Network, shape: Shape) -> None:
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
def test_picture_is_deterministic_and_has_every_operation_once(network: Network) -> None:
    def points(root: Shape) -> list[object]:
        every = {s.key for s in root.all() if s.arrangement is not None}
        return [(p.shape.key, p.x, p.y, [w.points for w in p.wires]) for p in place_shapes(root, every).all()]

    first, again = build_scene(network), build_scene(network)
    assert points(first) == points(again)
    names = [v.name for v in first.part.all_vertices() if v.op not in ("input", "output")]
    assert sorted(names) == sorted(v.name for v in network.vertices)


def build_picture(preset: str, pipeline: str = "") -> Shape:
    graph = model_of(preset).graph
    return build_scene(build_network(run_passes(graph, pipeline) if pipeline else graph))


@pytest.mark.parametrize("preset", ["t5-base", "transformer-base"])
def test_encoder_result_enters_every_cross_attention_on_a_rail(preset: str) -> None:
    root = build_picture(preset)
    at = {p.shape.key: p for p in place_shapes(root, list_default_open(root)).all()}
    result = next(
        w.values for w in place_shapes(root, list_default_open(root)).wires if w.source and w.source.key == "encoder"
    )
    (layers,) = [p for key, p in at.items() if key.startswith("decoder.layers.") and p.shape.part.count > 1]
    for around, target in ((at["decoder"], layers), (layers, at["decoder.layers.0.cross"])):
        (line,) = [w for w in around.wires if w.target is target.shape and w.values == result]
        assert line.source is None and line.points[0][0] > target.x + target.width
        x, y = line.points[-1]
        assert x == pytest.approx(target.x + target.width) and target.y < y < target.y + 2 * PORT
    assert "encoder output" in at["decoder.layers.0.cross"].shape.captions[0]


def part(name: str, *reads: str, op: str = "relu", weight: int = 0) -> PicturePart:
    weights = (Weight(f"{name}.weight", "[1]", "f32", weight, ""),) if weight else ()
    return PicturePart(name, name, (Vertex(name, op, "", reads, (name,), weights=weights),))


def test_first_entering_value_has_a_line_from_the_top_and_results_leave() -> None:
    wiring = wire_parts([part("a", "x"), part("b", "a", "x")], ["x"], ["b"])
    assert wiring.links == {(0, 1): ["a"], (START, 0): ["x"], (START, 1): ["x"], (1, END): ["b"]}
    assert not (wiring.notes or wiring.side or wiring.unwired_results)


def test_other_computed_values_enter_at_the_side() -> None:
    wiring = wire_parts([part("a", "x"), part("b", "a", "memory")], ["x", "memory", "unread"], ["b"])
    assert wiring.side == {"memory": [1]} and wiring.notes == {1: ["memory"]}
    assert (START, 1) not in wiring.links


def test_model_inputs_are_notes_and_never_at_the_side() -> None:
    second = part("b", "a", "mask")
    second.vertices = (replace(second.vertices[0], model_inputs=("mask",)),)
    wiring = wire_parts([part("a", "x"), second], ["x", "mask"], ["b"])
    assert wiring.notes == {1: ["mask"]} and wiring.side == {}


def test_model_input_has_a_line_to_the_first_reader_that_uses_its_elements() -> None:
    parts = [part("ids", op="input"), part("p", "ids", op="iota"), part("e", "ids", "p"), part("f", "ids", "e")]
    wiring = wire_parts(parts, [], ["f"])
    assert {pair for pair in wiring.links if pair[0] == 0} == {(0, 2)}
    assert wiring.notes == {1: ["ids"], 3: ["ids"]}


def test_exits_next_to_the_stream_can_become_unwired_results() -> None:
    parts = [part("table"), part("a", "x", weight=9), part("b", "a", "table"), part("c", "b", "table")]
    wiring = wire_parts(parts, ["x"], ["c", "table"])
    assert find_exits(parts, wiring) == [0]
    again = wire_parts(parts, ["x"], ["c", "table"], within=[0])
    assert again.unwired_results == {0: ["table"]} and (0, END) not in again.links
    assert again.notes == {3: ["table"]} and again.links[0, 2] == ["table"]  # only the first reader has a line


def test_link_parts_has_a_node_for_parts_without_links() -> None:
    graph = link_parts([part("a"), part("b"), part("c")], [(0, 2)])
    assert sorted(graph.nodes) == [0, 1, 2] and list(graph.edges) == [(0, 2)]
