"""Small edits of graphs: names stay, parameters are shared, and what has readers stays."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Node, parse
from weft.ir.recipes import Full, Scale
from weft.passes.edits.edit import (
    add_common_prefix,
    are_params,
    backward_slice,
    derive_bias,
    derive_param,
    erase_unused,
    find_summands,
    find_sums,
    has_add_norm_reader,
    is_feature_split,
    rebuild_node,
    remove_summand,
    replace_param,
    replace_uses,
    replace_weights,
)

TEXT = """graph g {
  input %x: f32[n, 4]
  param %ffn.up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
  %up: f32[n, 6] = linear(%x, %ffn.up.weight)
  %act: f32[n, 6] = relu(%up)
  output y = %act
}"""


@pytest.fixture
def g() -> Graph:
    return parse(TEXT)


def node(g: Graph, name: str) -> Node:
    return next(n for n in g.nodes if n.output.name == name)


def test_replace_uses_gives_the_new_value_the_old_name(g: Graph) -> None:
    up, act = node(g, "up"), node(g, "act")
    replace_uses(act.output, up.output)
    assert g.outputs["y"] is up.output and up.output.name == "act"
    erase_unused(g, [act])
    assert [n.op.name for n in g.nodes] == ["linear"]


def test_erase_unused_takes_producers_and_their_parameters_but_no_read_value(g: Graph) -> None:
    nodes = list(g.nodes)
    erase_unused(g, nodes)
    assert len(g.nodes) == 2
    del g.outputs["y"]
    erase_unused(g, nodes)
    assert len(g.nodes) == 0 and not g.params and list(g.inputs) == ["x"]


def test_derived_parameters_are_shared_until_erased(g: Graph) -> None:
    weight = g.params["ffn.up.weight"]
    once = derive_param(weight, Scale(weight.recipe, 2.0))
    assert derive_param(weight, Scale(weight.recipe, 2.0)) is once
    assert derive_param(weight, Scale(weight.recipe, 3.0)) is not once
    g.erase_param(once)
    assert derive_param(weight, Scale(weight.recipe, 2.0)) is not once


def test_derived_bias_is_named_after_its_weight(g: Graph) -> None:
    bias = derive_bias(g.params["ffn.up.weight"], Full(0.0, (6,)))
    assert bias.name == "ffn.up.bias" and bias.shape == (6,)


def test_replace_param_takes_over_the_name_once_nothing_reads_the_old_one(g: Graph) -> None:
    weight = g.params["ffn.up.weight"]
    new = derive_param(weight, Scale(weight.recipe, 2.0))
    replace_param(weight, new)
    assert set(g.params) == {"ffn.up.weight", new.name} and new.name != "ffn.up.weight"
    node(g, "up").set_input(1, new)
    replace_param(weight, new)
    assert dict(g.params) == {"ffn.up.weight": new} and new.name == "ffn.up.weight"


def test_replace_weights_adds_keeps_or_removes_a_bias(g: Graph) -> None:
    linear = node(g, "up")
    weight = g.params["ffn.up.weight"].recipe
    linear = replace_weights(linear, Scale(weight, 2.0), Full(1.0, (6,)))
    assert list(g.params) == ["ffn.up.weight", "ffn.up.bias"] and linear.output.name == "up"
    linear = replace_weights(linear, weight)
    assert linear.operand("bias") is g.params["ffn.up.bias"]
    linear = replace_weights(linear, weight, None)
    assert linear.operand("bias") is None and list(g.params) == ["ffn.up.weight"]


def test_rebuilt_node_keeps_name_readers_and_other_operands(g: Graph) -> None:
    new = rebuild_node(node(g, "up"), {"bias": derive_bias(g.params["ffn.up.weight"], Full(1.0, (6,)))})
    assert [v.name for v in new.inputs if v is not None] == ["x", "ffn.up.weight", "ffn.up.bias"]
    assert new.output.name == "up" and list(new.output.users) == [node(g, "act")]


def test_common_prefix_ends_at_the_first_difference(g: Graph) -> None:
    down = g.add_param("ffn.down.weight", g.params["ffn.up.weight"].type, Full(0.0, (6, 4)))
    assert add_common_prefix([g.params["ffn.up.weight"], down], "both") == "ffn.both"
    other = g.add_param("head", down.type, Full(0.0, (6, 4)))
    assert add_common_prefix([down, other], "both") == "both"


def test_backward_slice_ends_at_its_stops(g: Graph) -> None:
    up, act = node(g, "up"), node(g, "act")
    assert set(backward_slice([act.output], [])) == {up, act}
    assert backward_slice([act.output], [up.output]) == [act]
    assert backward_slice([g.inputs["x"]], []) == []


def test_parameters_and_feature_splits(g: Graph) -> None:
    assert are_params([g.params["ffn.up.weight"], None]) and not are_params([g.inputs["x"]])
    splits = parse(
        "graph s { input %x: f32[2, 4] %a: f32[2, 2], %b: f32[2, 2] = split(%x, sizes=[2, 2], axis=-1) "
        "%c: f32[1, 4], %d: f32[1, 4] = split(%x, sizes=[1, 1], axis=0) "
        "output a = %a output b = %b output c = %c output d = %d }"
    )
    assert [is_feature_split(n) for n in splits.nodes] == [True, False]


HEAD = "graph g { input %x: f32[n, 4] input %y: f32[n, 4] input %z: f32[n, 4] param %b: f32[4] = full(1.0, dims=[4]) "


def graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}}}")


def names(g: Graph) -> list[list[str]]:
    return [[v.name for v in find_summands(node)] for node in find_sums(g)]


@pytest.mark.parametrize(
    ("body", "sums"),
    [
        ("%p: f32[n, 4] = add(%x, %y) %q: f32[n, 4] = add(%z, %p) output q = %q", [["z", "x", "y"]]),
        # Another reader of the inner sum: it is a sum of its own and one summand of the outer one.
        (
            "%p: f32[n, 4] = add(%x, %y) %q: f32[n, 4] = add(%z, %p) output p = %p output q = %q",
            [["x", "y"], ["z", "p"]],
        ),
        ("%p: f32[n, 4] = add(%x, %b) output p = %p", [["x"]]),  # a bias broadcasts
        (
            "%p: f32[n, 4] = add(%x, %y) %m: f32[n, 4], %s: f32[n, 4] = add_norm(%p, %z) output m = %m output s = %s",
            [["x", "y", "z"]],
        ),
        ("%p: f32[n, 4] = mul(%x, %y) output p = %p", []),
    ],
)
def test_sums_list_their_summands(body: str, sums: list[list[str]]) -> None:
    assert names(graph(body)) == sums


def test_removed_summand_leaves_the_other_operand() -> None:
    g = graph("%e: f32[n, 4] = exp(%x) %p: f32[n, 4] = add(%e, %y) %q: f32[n, 4] = add(%p, %z) output q = %q")
    e = next(n.output for n in g.nodes if n.output.name == "e")
    remove_summand(e)
    assert names(g) == [["y", "z"]] and not e.uses


def test_summand_of_add_norm_is_recognized() -> None:
    g = graph("%m: f32[n, 4], %s: f32[n, 4] = add_norm(%x, %y) %p: f32[n, 4] = add(%m, %z) output p = %p output s = %s")
    assert has_add_norm_reader(g.inputs["x"]) and not has_add_norm_reader(g.inputs["z"])
