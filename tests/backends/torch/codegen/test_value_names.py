"""Names of values in generated methods, and their source."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from weft.backends.torch.codegen.value_names import SourceLine, ValueNames, unparse
from weft.backends.torch.program.statements import Var
from weft.ir import ops
from weft.ir.graph import Value

from ..small_graphs import check, small_graph, weight


@pytest.mark.parametrize("text", ["768 ** -0.5", "x ** -y", "-x ** 2", "2 ** (-0.5 * x)"])
def test_unparse_keeps_the_value_of_powers(text: str) -> None:
    names = {"x": 3.0, "y": 0.5}
    assert eval(unparse(ast.parse(text)), dict(names)) == eval(text, dict(names))


ROWS = np.array([[1.5, -2.0, 0.25, 3.0], [0.5, 4.0, -1.0, 2.0]])


@pytest.mark.parametrize("name", ["expert", "self", "cache", "torch", "range", "len", "zip", "math", "F", "lambda"])
def test_values_may_have_reserved_names(name: str) -> None:
    def make(x: Value) -> Value:
        with x.graph.scope("ffn"):
            mine = ops.exp(x, name=name)
            combine = ops.softmax(ops.linear(mine, weight(x.graph, "ffn.router", 3, 4)))
            stacks = (weight(x.graph, f"ffn.{n}", *dims) for n, dims in {"up": (3, 5, 4), "down": (3, 4, 5)}.items())
            return ops.add(ops.moe(mine, combine, *stacks), mine)

    check(small_graph(make), ROWS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x if y is None else f(y)", "if y is not None:\n    x = f(y)"),
        ("x if n == 0 else f(y)", "if n != 0:\n    x = f(y)"),
        ("x if fits(y) else f(y)", "if not fits(y):\n    x = f(y)"),
        ("f(y) if n == 0 else x", "if n == 0:\n    x = f(y)"),
        ("f(y) if n == 0 else y", "x = f(y) if n == 0 else y"),
    ],
)
def test_conditional_reassignment_becomes_an_if_statement(text: str, wanted: str) -> None:
    line = SourceLine([Var("x")], ast.parse(text, mode="eval").body)
    assert "\n".join(ValueNames([line], {}).text()) == wanted
