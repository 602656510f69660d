"""Values drawn as lines between parts, and those written as notes."""

from __future__ import annotations

from dataclasses import replace

from weft.backends.viz.layout.wiring import END, START, find_exits, link_parts, wire_parts
from weft.backends.viz.model.network import Vertex, Weight
from weft.backends.viz.model.outline import PicturePart


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
