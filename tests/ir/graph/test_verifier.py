"""Every rule can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.ir import Graph, Op, TensorType, Value, WeftError, ops, verify
from weft.ir.graph.verifier import RULES, check_recipe_shapes
from weft.ir.recipes import Full
from weft.ir.types import dtypes

T = TensorType(dtypes.f32, (2, 4))


def sound() -> Graph:
    graph = Graph("g")
    x = graph.add_input("x", T)
    w = graph.add_param("w", TensorType(dtypes.f32, (4,)), Full(1.0, (4,)))
    graph.add_output("y", ops.neg(ops.rms_norm(x, w, name="h"), name="z"))
    return graph


def use_before_definition(g: Graph) -> None:
    first, second = g.nodes
    first.set_input(0, second.output)


def undefined_output(g: Graph) -> None:
    node = next(iter(g.nodes))
    gone = ops.exp(node.output)
    assert gone.producer is not None
    g.erase(gone.producer)
    g.outputs["y"] = gone


def stale_use(g: Graph) -> None:
    node = next(iter(g.nodes))
    node.inputs = (node.inputs[0], None)


def foreign_output(g: Graph) -> None:
    first, second = g.nodes
    second.outputs = (first.output,)


def same_name(g: Graph) -> None:
    first, second = g.nodes
    second.output.name = first.output.name


def renamed_param(g: Graph) -> None:
    g.params["v"] = g.params.pop("w")


def unregistered_op(g: Graph) -> None:
    node = next(iter(g.nodes))

    def rms_norm(x: object, weight: object = None, *, eps: float = 1e-6) -> None:
        """Not the real one."""

    node.op = Op(rms_norm, "", (), ())


def wrong_type(g: Graph) -> None:
    next(iter(g.nodes)).output.type = T.with_dtype(dtypes.f16)


def wrong_attribute(g: Graph) -> None:
    next(iter(g.nodes)).attrs["eps"] = "small"


def wrong_operand(g: Graph) -> None:
    g.params["w"].type = TensorType(dtypes.f32, (5,))


def missing_operand(g: Graph) -> None:
    next(iter(g.nodes)).set_input(0, None)


BREAKS: list[tuple[Callable[[Graph], None], str, str]] = [
    (use_before_definition, "check_definition_order", "which is defined later or"),
    (undefined_output, "check_definition_order", "which no node, input or parameter defines"),
    (stale_use, "check_use_lists", "%w: f32[4] records other uses than"),
    (foreign_output, "check_use_lists", "is an output of neg(%h) in the top scope, but records another"),
    (same_name, "check_unique_names", "two values are called %h"),
    (renamed_param, "check_unique_names", "parameter v has the name w"),
    (unregistered_op, "check_registered_ops", "applies an op that is not registered"),
    (wrong_type, "check_types", "makes f32[2, 4] but declares f16[2, 4]"),
    (wrong_attribute, "check_types", "rms_norm: attribute eps='small' is not of type float"),
    (wrong_operand, "check_types", "rms_norm: f32[5] does not fit the last axis of f32[2, 4]"),
    (missing_operand, "check_types", "op rms_norm needs operand x"),
]


def test_a_sound_graph_passes() -> None:
    verify(sound(), recipes=True)


@pytest.mark.parametrize(("break_it", "rule", "message"), BREAKS, ids=[b[0].__name__ for b in BREAKS])
def test_rule_fails(break_it: Callable[[Graph], None], rule: str, message: str) -> None:
    graph = sound()
    break_it(graph)
    (found,) = [r for r in RULES if r.__name__ == rule]
    assert any(message in complaint for complaint in found(graph))
    with pytest.raises(WeftError, match=r"^graph g: "):
        verify(graph)


def test_every_rule_is_broken_once() -> None:
    assert {rule for _, rule, _ in BREAKS} == {r.__name__ for r in RULES}


def test_recipes_are_checked_on_demand() -> None:
    graph = sound()
    graph.params["w"].recipe = Full(1.0, (5,))
    verify(graph)
    assert list(check_recipe_shapes(graph)) == [
        "parameter %w: f32[4] is computed in another shape: its recipe gives [5]"
    ]
    with pytest.raises(WeftError, match=r"its recipe gives \[5\]"):
        verify(graph, recipes=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.matmul(x, x), "matmul: inner sizes of f32[2, 4] and f32[2, 4] differ"),
        (lambda x: ops.linear(x), "op linear needs operand weight"),
        (lambda x: ops.neg(x, x), "op neg takes at most 1 operands, not 2"),
        (lambda x: ops.affine(x, by="2"), "affine: attribute by='2' is not of type float"),
        (lambda x: ops.reshape(x), "op reshape needs attribute shape"),
        (lambda x: ops.concat(x, None, x, axis=0), "op concat: an operand xs is None"),
        (lambda x: ops.concat(axis=0), "op concat got no operands"),
        (lambda x: ops.gelu(x, approximate="no"), "gelu: approximate='no' must be none, tanh or sigmoid"),
        (lambda x: ops.transpose(x, axes=(0, 0)), "transpose: axes [0, 0] are not a permutation"),
    ],
)
def test_calls_are_checked(call: Callable[[Value], object], message: str) -> None:
    graph = Graph()
    with pytest.raises(WeftError) as e:
        call(graph.add_input("x", T))
    assert str(e.value).startswith(message)
    assert len(graph) == 0
