"""Use lists, editing while walking, replacing, cloning."""

from __future__ import annotations

import random

import pytest

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops, verify
from weft.ir.graph.graph import Outputs
from weft.ir.recipes import Full
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym

T = TensorType(dtypes.f32, (sym("batch"), 4))


def chain(length: int = 4) -> tuple[Graph, list[Node]]:
    """x → neg → neg → … → output y."""
    graph = Graph("chain")
    value = graph.add_input("x", T)
    for _ in range(length):
        value = ops.neg(value)
    graph.add_output("y", value)
    return graph, list(graph.nodes)


def test_uses_follow_set_input() -> None:
    graph = Graph()
    x, y = graph.add_input("x", T), graph.add_input("y", T)
    total = ops.add(x, x)
    node = total.producer
    assert node is not None
    assert x.uses == ((node, 0), (node, 1))
    assert x.users == (node,)
    node.set_input(1, y)
    assert (x.uses, y.uses) == (((node, 0),), ((node, 1),))
    node.set_input(1, y)
    verify(graph)


def test_operands_by_name() -> None:
    graph = Graph()
    x = graph.add_input("x", T)
    w = graph.add_param("w", TensorType(dtypes.f32, (4,)), Full(1.0, (4,)))
    node = ops.rms_norm(x, w).producer
    assert node is not None
    assert node.operand("weight") is w
    bare = ops.rms_norm(x).producer
    assert bare is not None
    assert bare.operand("weight") is None
    assert bare.inputs == (x,)


def test_replace_uses_reaches_outputs_and_keeps() -> None:
    graph, nodes = chain(3)
    first = nodes[0].output
    with graph.inserting(after=nodes[0]):
        doubled = ops.add(first, first)
    assert doubled.producer is not None
    first.replace_uses(doubled, keep=[doubled.producer])
    assert nodes[1].inputs == (doubled,)
    assert first.users == (doubled.producer,)
    last = graph.outputs["y"]
    last.replace_uses(doubled)
    assert graph.outputs["y"] is doubled
    verify(graph)


def test_replace_hands_over_names() -> None:
    graph, nodes = chain(2)
    name = nodes[0].output.name
    with graph.inserting(before=nodes[0]):
        new = ops.square(graph.inputs["x"])
    graph.replace(nodes[0], new)
    assert new.name == name
    assert nodes[0].erased
    assert [n.op.name for n in graph.nodes] == ["square", "neg"]
    verify(graph)


def test_replace_by_an_input_keeps_its_name() -> None:
    graph, nodes = chain(2)
    graph.replace(nodes[0], graph.inputs["x"])
    assert graph.inputs["x"].name == "x"
    assert len(graph) == 1
    verify(graph)


def test_erase_refuses_nodes_with_users() -> None:
    graph, nodes = chain(2)
    for node in nodes:
        with pytest.raises(ValueError, match="still in use"):
            graph.erase(node)
    w = graph.add_param("w", T, Full(0.0, (1, 4)))
    ops.add(w, w)
    with pytest.raises(ValueError, match="still in use"):
        graph.erase_param(w)


def test_foreign_and_erased_values_are_refused() -> None:
    graph, nodes = chain(2)
    other, _ = chain(1)
    with pytest.raises(ValueError, match="another graph"):
        nodes[0].set_input(0, other.inputs["x"])
    gone = ops.square(graph.inputs["x"])
    assert gone.producer is not None
    graph.erase(gone.producer)
    with pytest.raises(ValueError, match="was erased"):
        ops.neg(gone)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_insertion(where: str) -> None:
    graph, nodes = chain(3)
    node = nodes[{"first": 0, "middle": 1, "last": 2}[where]]
    with graph.inserting(before=node):
        ops.exp(graph.inputs["x"])
    with graph.inserting(after=node):
        ops.log(graph.inputs["x"])
        ops.sin(graph.inputs["x"])
    names = [n.op.name for n in graph.nodes]
    at = names.index("exp")
    assert names[at : at + 4] == ["exp", "neg", "log", "sin"]
    assert len(graph) == 6
    assert [n.op.name for n in reversed(graph.nodes)] == names[::-1]
    verify(graph)


def test_insertion_takes_over_the_scope() -> None:
    graph = Graph()
    x = graph.add_input("x", T)
    with graph.scope("layers.0"), graph.scope("attn"):
        y = ops.neg(x, name="q")
    assert (y.name, y.producer and y.producer.scope) == ("layers.0.attn.q", "layers.0.attn")
    with graph.inserting(before=y.producer):
        z = ops.exp(x)
    assert z.name == "layers.0.attn.exp"
    assert graph.insertion_scope == ""


def test_names_of_outputs_follow_every_edit() -> None:
    graph, (first, last) = chain(2)
    graph.add_output("z", last.output)
    graph.outputs["y"] = first.output  # keeps its place
    assert list(graph.outputs.items()) == [("y", first.output), ("z", last.output)]
    assert (first.output.is_output, graph.outputs.names_of(last.output)) == (True, ("z",))
    graph.outputs["w"] = graph.outputs.pop("z")
    graph.replace(last, first.output)
    assert graph.outputs.names_of(first.output) == ("y", "w") and not last.output.is_output
    del graph.outputs["y"]
    assert first.output.is_output
    graph.outputs.clear()
    assert not first.output.is_output and not graph.outputs
    graph.erase(first)


def test_iteration_visits_nodes_inserted_after_the_current_one() -> None:
    graph, _ = chain(3)
    seen = []
    for node in graph.nodes:
        seen.append(node.op.name)
        if node.op is ops.neg:
            with graph.inserting(before=node):
                ops.exp(graph.inputs["x"])
            with graph.inserting(after=node):
                ops.log(graph.inputs["x"])
    assert seen == ["neg", "log"] * 3
    verify(graph)


def test_walk_survives_erasing_everything() -> None:
    graph, _ = chain(5)
    graph.outputs["y"] = graph.inputs["x"]
    for node in reversed(graph.nodes):
        graph.erase(node)
    assert len(graph) == 0
    graph, _ = chain(5)
    for node in graph.nodes:  # each is replaced by its operand
        assert isinstance(node.inputs[0], Value)
        graph.replace(node, node.inputs[0])
    assert list(graph.nodes) == []
    assert graph.outputs["y"] is graph.inputs["x"]


def test_walk_survives_erasing_the_next() -> None:
    graph, nodes = chain(5)
    seen = []
    for node in graph.nodes:
        seen.append(node)
        following = node.output.users
        if following:
            graph.replace(following[0], node.output)
    assert seen == nodes[::1][:1] + [n for n in nodes[1:] if not n.erased]
    assert len(graph) == 5 - sum(n.erased for n in nodes)
    verify(graph)


def test_building_goes_on_after_the_anchor_was_erased() -> None:
    graph, nodes = chain(3)
    with graph.inserting(before=nodes[1]):
        new = ops.exp(graph.inputs["x"])
        graph.replace(nodes[1], new)
        ops.log(graph.inputs["x"])
    assert [n.op.name for n in graph.nodes] == ["neg", "exp", "log", "neg"]
    verify(graph)


def test_random_editing_keeps_the_graph_sound() -> None:
    rng = random.Random(0)
    graph, _ = chain(20)
    for _round in range(300):
        nodes = list(graph.nodes)
        node = rng.choice(nodes)
        action = rng.randrange(4)
        known: list[Value] = [graph.inputs["x"]]
        for other in nodes:
            if other is node:
                break
            known.append(other.output)
        if action == 0:
            with graph.inserting(before=node):
                ops.add(rng.choice(known), rng.choice(known))
        elif action == 1:
            with graph.inserting(after=node):
                ops.mul(node.output, rng.choice(known))
        elif action == 2:
            node.set_input(0, rng.choice(known))
        elif len(graph) > 10:
            graph.replace(node, rng.choice(known))
        verify(graph)
        assert len(graph) == len(list(graph.nodes)) == len(list(reversed(graph.nodes)))
        assert list(reversed(graph.nodes)) == list(graph.nodes)[::-1]
    assert graph.clone() == graph


def test_clone_is_independent() -> None:
    graph, _ = chain(2)
    graph.meta["kind"] = "decoder"
    graph.inputs["x"].name = "renamed"
    graph.add_param("w", T, Full(0.0, (1, 4)))
    copy = graph.clone()
    assert copy == graph
    assert copy is not graph
    assert copy.reader is graph.reader
    before = str(graph)
    ops.exp(copy.inputs["x"])
    copy.meta["kind"] = "encoder"
    assert str(graph) == before != str(copy)
    verify(copy)


def test_names() -> None:
    graph = Graph()
    assert [graph.reserve_name("x") for _ in range(3)] == ["x", "x_2", "x_3"]
    assert graph.reserve_name("x_2") == "x_2_2"
    assert graph.add_param("x", T, Full(0.0, (1, 4))).name == "x_4"
    graph.add_input("in", T)
    for add in (lambda: graph.add_input("in", T), lambda: graph.add_output("out", graph.inputs["in"])):
        if "out" not in graph.outputs:
            graph.add_output("out", graph.inputs["in"])
        with pytest.raises(WeftError, match="already has an"):
            add()


def test_width() -> None:
    graph = Graph()
    assert graph.add_input("x", T).width == 4
    with pytest.raises(WeftError, match="no fixed width"):
        _ = graph.add_input("y", TensorType(dtypes.f32, (4, sym("n")))).width


def test_equality_is_of_the_text() -> None:
    assert chain(2)[0] == chain(2)[0]
    assert chain(2)[0] != chain(3)[0]
    assert chain(2)[0] != "graph"
    assert len({chain(2)[0], chain(2)[0]}) == 2


def test_find_first_returns_the_earliest_node() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtypes.f32, (2,)))
    for _ in range(6):
        x = ops.relu(x)
    nodes = list(graph.nodes)
    assert list(graph.nodes.items_before(nodes[3])) == nodes[2::-1]
    assert list(graph.nodes.items_after(nodes[3])) == nodes[4:]
    for chosen in ([3], [5, 0], [4, 2, 3], [1, 1, 5], [3, 5, 2, 4]):
        assert graph.nodes.find_first(nodes[i] for i in chosen) is nodes[min(chosen)]


def test_names_of_follows_every_change() -> None:
    outputs: Outputs[str] = Outputs()
    assert outputs.names_of("v") == ()
    outputs.update({"y": "v", "z": "w"})
    outputs["a"] = "v"
    assert outputs.names_of("v") == ("y", "a")
    outputs["y"] = "w"  # keeps its position
    assert list(outputs.items()) == [("y", "w"), ("z", "w"), ("a", "v")]
    assert (outputs.names_of("v"), outputs.names_of("w")) == (("a",), ("z", "y"))
    del outputs["a"]
    assert outputs.pop("z") == "w"
    assert (outputs.names_of("v"), outputs.names_of("w")) == ((), ("y",))
    outputs.clear()
    assert outputs.names_of("w") == () and not outputs


def test_an_unknown_name_cannot_be_deleted() -> None:
    outputs: Outputs[str] = Outputs()
    with pytest.raises(KeyError, match="y"):
        del outputs["y"]
