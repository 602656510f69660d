"""Elementwise ops, activations and reductions in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft.backends.torch.ops.elementwise import format_number, write_activation
from weft.ir import TensorType, Value, dtypes, lookup, ops
from weft.ir.recipes import Literal
from weft.ir.types.sizes import sym

from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("elementwise"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda x: ops.affine(x, by=1 / 3), "x / 3.0"),
        (lambda x: ops.affine(x, by=768**-0.5), "x * 768 ** (-0.5)"),
        (lambda x: ops.affine(x, by=-1.0, plus=-2.0), "-x - 2.0"),
        (lambda x: ops.clip(x, low=-1.0, high=2.0), "x.clamp(min=-1.0, max=2.0)"),
        (lambda x: ops.max(x, axes=(0, 1)), "x.amax((0, 1))"),
        (lambda x: ops.sum(x, axes=(-1,), keepdims=True), "x.sum(-1, keepdim=True)"),
        (lambda x: ops.prod(x, axes=(0, 1)), "x.prod(1).prod(0)"),  # torch reduces one axis at a time
        (lambda x: ops.cumsum(x, axis=1, exclusive=True), "x.cumsum(1) - x"),
        (lambda x: ops.pow(ops.affine(x, by=0.0, plus=-2.0), x), "(-2.0) ** x"),
        (lambda x: ops.swish(x, beta=1.702), "x * (1.702 * x).sigmoid()"),
        (lambda x: ops.gelu(x, approximate="tanh"), "F.gelu(x, approximate='tanh')"),
        (lambda x: ops.softmax(x), "softmax_or_zeros(x, -1)"),  # all of a row may be masked
    ],
)
def test_elementwise_ops_are_written_as_torch_functions(make: Callable[[Value], Value], source: str) -> None:
    assert write_forward(build_graph(make, (B, 4))) == f"return {source}"


def test_softmax_of_scores_that_cannot_be_masked_is_that_of_torch() -> None:
    graph = build_graph(lambda x, w: ops.softmax(ops.linear(x, w)), (B, 4), w=(3, 4))
    assert write_forward(graph) == "return self.w(x).softmax(-1)"


def test_numbers_are_written_short_where_exact() -> None:
    assert [format_number(x) for x in (0.5, math.inf, 7**0.5, 768**-0.5, 1 / 3)] == [
        *("0.5", "math.inf", "7**0.5", "768**-0.5", "0.3333333333333333")
    ]
    index = build_graph(lambda x: x, (B, 4), dtype=dtypes.i64).inputs["x"]
    assert format_number(3.0, index) == "3"


def test_rows_of_constant_tables_are_cast_to_the_dtype_of_the_model() -> None:
    """Constant tables stay f32 when the model is cast; a parameter is cast with it."""

    def make(x: Value, y: Value) -> Value:
        table = x.graph.add_param("t", TensorType(dtypes.f32, (2, 4)), Literal((1.0,) * 8, (2, 4)))
        return ops.add(x, ops.embedding(ops.cast(y, to=dtypes.i64), table))

    forward = write_forward(build_graph(make, (B, 4), (B,)))
    assert forward == "return x + F.embedding(y.to(torch.int64), self.t).to(x.dtype)"


def test_write_activation_of_a_scaled_swish() -> None:
    assert write_activation("swish(2.0)") == "{0} * (2.0 * {0}).sigmoid()"
    assert write_activation("gelu_tanh") == 'F.gelu({0}, approximate="tanh")'
    with pytest.raises(KeyError):
        write_activation("snake")


def test_floordiv_and_mod_of_torch_round_down_below_zero() -> None:
    x, y = torch.tensor([-7, 7, -8, 0]), torch.tensor([[3], [-3]])
    np.testing.assert_array_equal((x // y).numpy(), lookup("floordiv").reference(x.numpy(), y.numpy()))
    np.testing.assert_array_equal((x % y).numpy(), lookup("mod").reference(x.numpy(), y.numpy()))
