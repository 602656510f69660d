"""Calls as source with placeholders and operands."""

from __future__ import annotations

from weft.backends.torch.ops.calls import FunctionCall
from weft.backends.torch.program.statements import Var

X, Y = Var("x"), Var("y")


def test_equal_operands_share_a_placeholder() -> None:
    call = FunctionCall("f").add(X, Y, X, "{0}.shape", None)
    assert str(call) == "f({0}, {1}, {0}, {0}.shape, None)"
    assert call.operands == [X, Y]


def test_named_operands_that_are_none_are_left_out() -> None:
    assert str(FunctionCall("f").add_named(mask=None, bias=Y)) == "f(bias={0})"


def test_constants_are_set_unless_they_are_the_default() -> None:
    call = FunctionCall("f").set("scale", 768**-0.5).set("k", 2, default=2).set("name", "max").set("limit", None)
    assert str(call) == "f(scale=768**-0.5, name='max')"


def test_a_call_within_a_call_shares_its_operands() -> None:
    inner = FunctionCall("g").add(X)
    outer = FunctionCall("f", inner.operands).add(Y, f"*{inner}")
    assert str(outer) == "f({1}, *g({0}))"
    assert outer.operands == [X, Y]
