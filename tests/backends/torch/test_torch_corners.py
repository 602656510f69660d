"""Graphs that no model family has: modules of them compute what the interpreter does all the same."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft import MLP, Attention, Block, Decoder, RMSNorm
from weft.backends.torch.codegen.value_names import SourceLine, ValueNames
from weft.backends.torch.program.statements import Var
from weft.ir import interpret, ops
from weft.ir.graph import Graph, Value
from weft.ir.ops.elementwise import mask_fill
from weft.ir.recipes import Literal, Normal
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import sym

from ...lowered import build_module

ROWS = np.array([[1.5, -2.0, 0.25, 3.0], [0.5, 4.0, -1.0, 2.0]])
HIDDEN = np.array([[1.0, 2.0, -np.inf, 0.5], [-np.inf] * 4])
F32 = dtypes.f32


def graph_of(make: Callable[[Value], Value]) -> Graph:
    graph = Graph("corner")
    graph.add_output("y", make(graph.add_input("x", TensorType(F32, (sym("batch"), 4)))))
    return graph


def weight(graph: Graph, name: str, *dims: int) -> Value:
    return graph.add_param(name, TensorType(F32, dims), Normal(dims, 0.5, name))


def check(graph: Graph, x: np.ndarray) -> None:
    """The module of `graph` against the interpreter, within eight roundings of float32."""
    (want,) = interpret(graph, {"x": x}).values()
    module = build_module(graph)
    with torch.inference_mode():
        got = module(torch.tensor(x, dtype=torch.float32)).double().numpy()
    np.testing.assert_allclose(got, want, rtol=8 * 2.0**-23, atol=8 * 2.0**-23)


def repeated_reshape(x: Value) -> Value:
    whole = ops.reshape(ops.reshape(x, shape=(*x.shape[:1], 2, 2)), shape=x.shape)
    return ops.add(whole, ops.exp(x))


def chosen_rows(x: Value) -> Value:
    """Rows of a table, which keep its dtype, where a condition holds."""
    table = x.graph.add_param("t", TensorType(F32, (5, 1)), Literal((0.5, 1.5, 2.5, 3.5, 4.5), (5, 1)))
    rows = ops.embedding(ops.cast(ops.clip(x, low=0.0), to=dtypes.i64), table)
    return ops.squeeze(mask_fill(ops.unsqueeze(ops.less(x, 3.0), axes=(2,)), rows), axes=(2,))


CORNERS = {
    "a power of a number": lambda x: ops.pow(ops.affine(x, by=0.0, plus=24**-0.5), x),
    "a power of a negative number": lambda x: ops.pow(ops.affine(x, by=0.0, plus=-2.0), ops.floor(x)),
    "a number that is none": lambda x: ops.add(ops.affine(x, by=0.0, plus=math.nan), x),
    "plus a number that is none": lambda x: ops.affine(x, by=2.0, plus=math.nan),
    "a third": lambda x: ops.affine(x, by=1 / 3),
    "minus a third": lambda x: ops.affine(x, by=-1 / 3, plus=-0.1),
    "a tiny factor": lambda x: ops.affine(x, by=5e-324),
    "the root of a number": lambda x: ops.affine(x, by=768**-0.5),
    "a root under a sum": lambda x: ops.div(ops.affine(x, by=0.0, plus=7**0.5), x),
    "an endless factor": lambda x: ops.clip(ops.affine(x, by=math.inf), low=-1.0, high=1.0),
    "one of many": lambda x: ops.squeeze(ops.slice_(x, axis=1, start=2, stop=3), axes=(1,)),
    "the last of many": lambda x: ops.squeeze(ops.slice_(x, axis=-1, start=3, stop=4), axes=(-1,)),
    "there and back": repeated_reshape,
    "rows of a table under a condition": chosen_rows,
}


@pytest.mark.parametrize("name", CORNERS)
def test_numbers_and_shapes(name: str) -> None:
    check(graph_of(CORNERS[name]), ROWS)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: ops.affine(x, by=0.5),
        lambda x: ops.div(x, ops.affine(ops.sigmoid(x), by=0.0, plus=4.0)),
        lambda x: ops.affine(ops.affine(x, by=2.0), plus=1.0),
    ],
)
def test_rows_of_which_nothing_is_seen_are_zeros(change: Callable[[Value], Value]) -> None:
    """A softmax over −∞ alone is zero, however the scores came to be."""
    check(graph_of(lambda x: ops.softmax(change(x))), HIDDEN)


@pytest.mark.parametrize("name", ["expert", "self", "cache", "torch", "range", "len", "zip", "math", "F", "lambda"])
def test_values_may_be_called_anything(name: str) -> None:
    def make(x: Value) -> Value:
        with x.graph.scope("ffn"):
            mine = ops.exp(x, name=name)
            combine = ops.softmax(ops.linear(mine, weight(x.graph, "ffn.router", 3, 4)))
            stacks = (weight(x.graph, f"ffn.{n}", *dims) for n, dims in {"up": (3, 5, 4), "down": (3, 4, 5)}.items())
            return ops.add(ops.moe(mine, combine, *stacks), mine)

    check(graph_of(make), ROWS)


def test_layers_share_no_class_where_one_has_a_table_and_another_a_weight() -> None:
    """Tables stay in f32 when weights are cast; weights do not."""

    def make(x: Value) -> Value:
        table = x.graph.add_param("layers.0.scale.t", TensorType(F32, (4,)), Literal((1.1, 2.2, 3.3, 4.4), (4,)))
        for i, scale in enumerate((table, weight(x.graph, "layers.1.scale.t", 4))):
            with x.graph.scope(f"layers.{i}"), x.graph.scope("scale"):
                x = ops.mul(x, scale)
        return x

    module = build_module(graph_of(make), dtype=torch.bfloat16)
    kinds = {name: t.dtype for name, t in module.state_dict().items()}
    assert kinds == {"layers.0.scale.t": torch.float32, "layers.1.scale.t": torch.bfloat16}
    assert [name for name, _ in module.named_parameters()] == ["layers.1.scale.t"]


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
def test_a_branch_that_changes_nothing_is_left_out(text: str, wanted: str) -> None:
    line = SourceLine([Var("x")], ast.parse(text, mode="eval").body)
    assert "\n".join(ValueNames([line], {}).text()) == wanted


def test_weights_may_be_numbered() -> None:
    def make(x: Value) -> Value:
        for i in range(2):
            x = ops.linear(x, weight(x.graph, f"maps.{i}", 4, 4))
        return x

    graph = graph_of(make)
    check(graph, ROWS)
    assert [*build_module(graph).state_dict()] == ["maps.0", "maps.1"]


def test_a_table_in_one_layer_and_weights_in_another() -> None:
    """They have classes of their own, though their statements are the same: nobody trains the table."""
    graph = Decoder(61, 24, 2, Block(Attention(3, sinks=True), MLP(32), RMSNorm())).graph()
    graph.params["layers.1.attn.sinks"].recipe = Literal((0.5, 1.0, 2.0), (3,))
    module = build_module(graph)
    assert [name for name, _ in module.named_buffers()] == ["layers.1.attn.sinks"]
    assert "layers.0.attn.sinks" in dict(module.named_parameters())
