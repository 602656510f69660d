"""Patterns match what they say, in any order of commutative operands, and tell why they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.ir import Graph, Node, Param, TensorType, Value, ops
from weft.ir.types import dtypes
from weft.passes import ANY, Pattern
from weft.passes.core.trace import Miss, Trace
from weft.passes.edits.driver import Rule, apply_rules
from weft.passes.edits.pattern import Match, bind_name, capture, either, maybe, param, value

from ..models import weight


def graph() -> tuple[Graph, Value, Value]:
    g = Graph("g")
    return g, g.add_input("x", TensorType(dtypes.f32, (3, 8))), g.add_input("y", TensorType(dtypes.f32, (3, 8)))


def made(value: Value) -> Node:
    assert value.producer is not None
    return value.producer


def matched(fn: Callable[..., Any], value: Value) -> Match:
    found = Pattern(fn).match(made(value))
    assert isinstance(found, Match), str(found)
    return found


def missed(fn: Callable[..., Any], value: Value) -> Miss:
    found = Pattern(fn).match(made(value))
    assert isinstance(found, Miss)
    return found


def normed_sum(x: Value, y: Value, w: Param | None) -> Value:
    return ops.rms_norm(ops.add(x, y), w, eps=ANY("eps"))


def test_bindings_and_captures() -> None:
    g, x, y = graph()
    w = weight(g, "w", 8)
    found = matched(normed_sum, ops.rms_norm(ops.add(x, y), w, eps=0.25))
    assert found.bindings == {"x": x, "y": y, "w": w, "eps": 0.25}
    assert {n.op.name for n in found.nodes.values()} == {"add", "rms_norm"}


def test_an_optional_operand_may_be_absent_and_another_may_not() -> None:
    _, x, y = graph()
    out = ops.rms_norm(ops.add(x, y))
    assert matched(normed_sum, out).bindings["w"] is None

    def with_weight(x: Value, w: Param) -> Value:
        return ops.rms_norm(x, w)

    assert "operand weight is absent" in missed(with_weight, out).reason


def test_operand_missing_in_the_pattern_must_be_absent() -> None:
    g, x, _ = graph()

    def unbiased(x: Value, w: Param) -> Value:
        return ops.linear(x, w)

    out = ops.linear(x, weight(g, "w", 5, 8), weight(g, "b", 5))
    assert "operand bias is %b, and the pattern has none" in missed(unbiased, out).reason


def test_parameter_variable_rejects_other_values() -> None:
    _, x, y = graph()

    def pattern(x: Value, w: Param) -> Value:
        return ops.mul(ops.neg(x), w)

    assert "operand y, %y, is not a parameter" in missed(pattern, ops.mul(ops.neg(x), y)).reason


def test_commutative_operands_match_in_both_orders_with_backtracking() -> None:
    _, x, y = graph()

    def pattern(a: Value, b: Value) -> Value:
        return ops.mul(ops.add(a, b), ops.neg(a))

    for out in (
        ops.mul(ops.add(x, y), ops.neg(x)),
        ops.mul(ops.add(y, x), ops.neg(x)),
        ops.mul(ops.neg(x), ops.add(y, x)),
    ):
        assert matched(pattern, out).bindings == {"a": x, "b": y}
    assert "a is both" in missed(pattern, ops.mul(ops.add(y, y), ops.neg(x))).reason


def test_operands_of_other_ops_do_not_swap() -> None:
    _, x, y = graph()

    def pattern(a: Value, b: Value) -> Value:
        return ops.sub(ops.neg(a), b)

    assert isinstance(Pattern(pattern).match(made(ops.sub(y, ops.neg(x)))), Miss)


def test_outputs_of_one_node_belong_together() -> None:
    _, x, y = graph()

    def pattern(x: Value) -> Value:
        a, b = ops.split.emit(x, sizes=ANY("sizes", length=2))
        return ops.mul(a, b)

    a, b = ops.split.emit(x, sizes=(4, 4))
    c, _ = ops.split.emit(y, sizes=(4, 4))
    assert matched(pattern, ops.mul(b, a)).bindings == {"x": x, "sizes": (4, 4)}

    def ordered(x: Value) -> Value:
        a, b = ops.split.emit(x, sizes=(4, 4))
        return ops.sub(a, b)

    assert "another output of split" in missed(ordered, ops.sub(b, a)).reason
    assert "a second split" in missed(pattern, ops.mul(c, b)).reason


def test_attributes_not_mentioned_have_their_default() -> None:
    _, x, _ = graph()

    def silu(x: Value) -> Value:
        return ops.swish(x)

    matched(silu, ops.swish(x))
    assert missed(silu, ops.swish(x, beta=2.0)).reason == "beta=2.0, not 1.0"


def test_a_capture_may_be_limited_and_must_agree() -> None:
    _, x, _ = graph()

    def pattern(x: Value) -> Value:
        return ops.affine(ops.affine(x, by=ANY("k", where=lambda k: k > 0)), by=ANY("k"))

    assert matched(pattern, ops.affine(ops.affine(x, by=2.0), by=2.0)).bindings["k"] == 2.0
    assert "by=2.0 differs from 3.0" in missed(pattern, ops.affine(ops.affine(x, by=2.0), by=3.0)).reason
    assert "by=-1.0 does not satisfy the pattern" in missed(pattern, ops.affine(ops.affine(x, by=-1.0), by=-1.0)).reason


def test_a_capture_without_a_name_is_not_bound() -> None:
    _, x, _ = graph()

    def pattern(x: Value) -> Value:
        return ops.affine(ops.affine(x, by=ANY(where=lambda k: k > 0)), by=ANY())

    assert matched(pattern, ops.affine(ops.affine(x, by=2.0), by=-3.0)).bindings == {"x": x}
    assert "by=-2.0 does not satisfy the pattern" in missed(pattern, ops.affine(ops.affine(x, by=-2.0), by=1.0)).reason


def scaled_or_not() -> Value:
    inner = ops.exp(value("x"))
    return ops.neg(either(ops.affine(inner, by=ANY("scale")), inner))


def test_alternatives_are_tried_in_order() -> None:
    """Of those that do not match variables are absent; a way is passed over whose values others read."""
    g, x, _ = graph()
    plain, scaled = ops.neg(ops.exp(x)), ops.neg(ops.affine(ops.exp(x), by=3.0))
    assert matched(scaled_or_not, plain).bindings == {"x": x}
    assert matched(scaled_or_not, scaled).bindings == {"x": x, "scale": 3.0}

    def deepest() -> Value:
        return ops.neg(either(ops.affine(value("inner"), by=ANY("scale")), value("y")))

    shared = ops.affine(x, by=2.0)
    g.add_output("shared", shared)
    assert matched(deepest, ops.neg(shared)).bindings == {"y": shared}
    assert "is made by abs, not by" in missed(scaled_or_not, ops.neg(ops.abs_(x))).reason


def test_bindings_of_named_values_and_captured_attributes() -> None:
    """They are those of a pattern's own parameters; capture attributes go by their names, a matched value by one."""
    g, x, y = graph()
    w = weight(g, "w", 8)

    def pattern() -> Value:
        return bind_name("sum", ops.add(value("x"), value("x")))

    assert matched(lambda: ops.neg(pattern()), ops.neg(doubled := ops.add(x, x))).bindings == {"sum": doubled, "x": x}
    assert "x is both" in missed(lambda: ops.neg(pattern()), ops.neg(ops.add(x, y))).reason
    norm = Pattern(lambda: ops.rms_norm(value("x"), maybe("w"), **capture("eps")))
    for given in (w, None):
        found = norm.match(made(ops.rms_norm(x, given, eps=0.5)))
        assert isinstance(found, Match) and found.bindings == {"x": x, "w": given, "eps": 0.5}
    strict = Pattern(lambda: ops.rms_norm(value("x"), param("w")))
    assert isinstance(strict.match(made(ops.rms_norm(x, w))), Match)
    assert isinstance(strict.match(made(ops.rms_norm(x, ops.neg(w)))), Miss)


def test_rewrite_lacks_variables_of_other_alternatives() -> None:
    g, x, _ = graph()
    g.add_output("a", ops.neg(ops.exp(x)))
    g.add_output("b", ops.neg(ops.affine(ops.exp(x), by=3.0)))
    seen: list[dict[str, Any]] = []

    def rewrite(**match: Any) -> Value:
        seen.append(match)
        return ops.affine(match["x"], by=match.get("scale", 1.0))

    assert apply_rules(g, [Rule("fold", Pattern(scaled_or_not), rewrite)], trace := Trace()) == 2
    assert [sorted(match) for match in seen] == [["x"], ["scale", "x"]] and not trace.near


def test_values_inside_may_not_be_read_outside_unless_returned() -> None:
    g, x, y = graph()

    def exposed(x: Value, y: Value) -> tuple[Value, ...]:
        s = ops.add(x, y)
        return ops.neg(s), s

    def hidden(x: Value, y: Value) -> Value:
        return ops.neg(ops.add(x, y))

    s = ops.add(x, y, name="s")
    out = ops.neg(s)
    matched(hidden, out)
    reader = ops.exp(s, name="reader")
    assert missed(hidden, out).reason == "%s is also read by exp (%reader)"
    assert matched(exposed, out).exposed == (out, s)
    made(reader).set_input(0, x)
    matched(hidden, out)
    g.add_output("s", s)
    assert missed(hidden, out).reason == "%s, made by add, is an output of the graph"


def test_deepest_mismatch_is_reported() -> None:
    g, x, y = graph()
    w = weight(g, "w", 8)
    total = ops.div(ops.add(x, y), y, name="halved")
    miss = missed(normed_sum, ops.rms_norm(total, w, name="norm"))
    assert str(miss) == (
        "at rms_norm (%norm): operand x, %halved, is made by div, not by add (div is between it and add)"
    )
    assert miss.depth > missed(normed_sum, ops.rms_norm(ops.exp(x), w)).depth > missed(normed_sum, ops.exp(x)).depth


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: ops.reshape(x), "needs attribute shape, perhaps ANY"),
        (lambda x: ops.swish(x, gamma=1.0), "no attribute 'gamma'"),
        (lambda x: x, "must return results of ops"),
    ],
)
def test_invalid_patterns_are_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pattern(fn)
