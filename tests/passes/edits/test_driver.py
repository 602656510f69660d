"""The driver: fixpoint, placement, names, refusals, near-misses."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, interpret, ops, verify
from weft.ir.types import dtypes
from weft.passes import ANY, Pattern, Refusal, Rule, Trace, apply_rules

X = TensorType(dtypes.f32, (3, 8))


def twice_negated(x: Value) -> Value:
    return ops.neg(ops.neg(x))


def scaled_twice(x: Value) -> Value:
    return ops.affine(ops.affine(x, by=ANY("a")), by=ANY("b"))


CANCEL = Rule("cancel", Pattern(twice_negated), lambda x: x)
SCALE = Rule("merge-scales", Pattern(scaled_twice), lambda x, a, b: ops.affine(x, by=a * b))


def test_rules_run_to_a_fixpoint() -> None:
    g = Graph("g")
    y = g.add_input("x", X)
    with g.scope("deep"):
        for i in range(5):
            y = ops.affine(y, by=2.0, name=f"s{i}")
    g.add_output("y", ops.neg(ops.neg(y)))
    trace = Trace()
    assert apply_rules(g, [CANCEL, SCALE], trace) == 5
    verify(g)
    (node,) = g.nodes
    assert node.attrs["by"] == 32.0 and node.scope == "deep" and node.output.name == "deep.s4"
    assert trace.rewrites == {"cancel": 1, "merge-scales": 4}


def test_a_value_that_stays_keeps_its_name() -> None:
    g = Graph("g")
    x = ops.exp(g.add_input("x", X), name="kept")
    g.add_output("y", ops.neg(ops.neg(x), name="gone"))
    apply_rules(g, [CANCEL], Trace())
    assert g.outputs["y"] is x and x.name == "kept"


def exposing(x: Value, y: Value) -> tuple[Value, ...]:
    s = ops.add(x, y)
    return ops.rms_norm(s, eps=ANY("eps")), s


FUSE = Rule("fuse", Pattern(exposing), lambda x, y, eps: ops.add_norm.emit(x, y, eps=eps))


def test_new_nodes_are_inserted_before_the_first_outside_reader() -> None:
    g = Graph("g")
    x = g.add_input("x", X)
    s = ops.add(x, ops.exp(x), name="s")
    early = ops.neg(s)
    with g.scope("norm"):
        n = ops.rms_norm(s, name="n")
    g.add_output("y", ops.mul(early, n))
    before = g.clone()
    apply_rules(g, [FUSE], Trace())
    verify(g)
    assert [n.op.name for n in g.nodes] == ["exp", "add_norm", "neg", "mul"]
    fused = list(g.nodes)[1]
    assert fused.scope == "norm" and [v.name for v in fused.outputs] == ["norm.n", "s"]
    feed = {"x": np.linspace(-1, 1, 24).reshape(3, 8)}
    assert (interpret(before, feed)["y"] == interpret(g, feed)["y"]).all()


def test_rewrite_without_a_valid_position_is_a_miss() -> None:
    def weighted(x: Value, y: Value, w: Value) -> tuple[Value, ...]:
        s = ops.add(x, y)
        return ops.rms_norm(s, w), s

    rule = Rule("fuse", Pattern(weighted), lambda x, y, w: ops.add_norm.emit(x, y, w))
    g = Graph("g")
    x = g.add_input("x", X)
    s = ops.add(x, x)
    late = ops.max(ops.neg(s), axes=(0,), name="late")
    g.add_output("y", ops.rms_norm(s, late))
    trace = Trace()
    assert apply_rules(g, [rule], trace) == 0
    assert "%late is computed after %neg reads the result" in trace.lines[-1]
    verify(g)


def test_a_refusal_is_a_near_miss() -> None:
    g = Graph("g")
    g.add_output("y", ops.neg(ops.neg(g.add_input("x", X)), name="n"))
    trace = Trace()
    rule = Rule("cancel", Pattern(twice_negated), lambda x: Refusal("it is Sunday"))
    assert apply_rules(g, [rule], trace) == 0 and len(g) == 2
    assert trace.lines == ["cancel: fired 0 times; nearest miss at neg (%n): it is Sunday"]


def test_rule_without_candidates_reports_it() -> None:
    g = Graph("g")
    g.add_output("y", ops.exp(g.add_input("x", X)))
    trace = Trace()
    apply_rules(g, [CANCEL], trace)
    assert trace.lines == ["cancel: fired 0 times; nothing resembles it"]


def test_invalid_rules_raise() -> None:
    g = Graph("g")
    x = g.add_input("x", X)
    g.add_output("y", ops.neg(ops.neg(x)))
    again = Rule("again", Pattern(twice_negated), lambda x: ops.neg(ops.neg(x)))
    with pytest.raises(RuntimeError, match="again keeps firing"):
        apply_rules(g.clone(), [again], Trace())
    retyped = Rule("retyped", Pattern(twice_negated), lambda x: ops.max(x, axes=(0,)))
    with pytest.raises(RuntimeError, match="retyped replaces"):
        apply_rules(g.clone(), [retyped], Trace())

    def messy(x: Value) -> Refusal:
        ops.neg(x)
        return Refusal("too late")

    with pytest.raises(RuntimeError, match="messy emitted nodes before it refused"):
        apply_rules(g.clone(), [Rule("messy", Pattern(twice_negated), messy)], Trace())
