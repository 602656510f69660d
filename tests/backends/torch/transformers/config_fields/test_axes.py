"""Classes of axes with equal sizes: how ops merge them, and names that follow from others."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.transformers.config_fields.axes import AxisClasses, get_axis, list_read_params
from weft.ir import Graph, TensorType, Value, ops
from weft.ir.recipes import Normal
from weft.ir.types import dtypes
from weft.ir.types.sizes import floordiv, sym

A, B = sym("a"), sym("b")


@pytest.fixture
def graph() -> Graph:
    return Graph("axes")


def add(graph: Graph, name: str, *dims: int) -> Value:
    return graph.add_param(name, TensorType(dtypes.f32, dims), Normal(dims, 0.5, name))


def named(graph: Graph, *axes: tuple[Value, int, Any], **values: int) -> AxisClasses:
    """Return the axis classes of `graph` with names for some axes and those deduced from them."""
    classes = AxisClasses(graph)
    for value, axis, name in axes:
        assert classes.set_name(get_axis(value, axis), name)
    classes.deduce_names(values)
    return classes


def test_linear_maps_connect_input_weight_bias_and_output(graph: Graph) -> None:
    x, w, b = (add(graph, *arguments) for arguments in (("x", 3, 4), ("w", 6, 4), ("b", 6)))
    y = ops.exp(ops.linear(x, w, b))
    classes = named(graph, (x, -1, A), (y, -1, B))
    assert (classes.get_name((w, 1)), classes.get_name((w, 0)), classes.get_name((b, 0))) == (A, B, B)
    assert classes.get_name((x, 0)) is None


def test_axes_of_size_one_and_different_sizes_are_not_merged(graph: Graph) -> None:
    x, y = add(graph, "x", 3, 1), add(graph, "y", 1, 4)
    z = ops.add(x, y)
    classes = named(graph, (z, -1, A))
    assert classes.get_name(get_axis(y)) == A and classes.get_name(get_axis(x)) is None
    assert not classes.set_name(get_axis(x), A) and not classes.set_name(None, A)
    assert not classes.set_name(get_axis(y), B)  # it has a name


def test_moves_keep_axes(graph: Graph) -> None:
    x = add(graph, "x", 3, 4, 5)
    moved = ops.squeeze(ops.unsqueeze(ops.transpose(x, axes=(2, 0, 1)), axes=(1,)), axes=(1,))
    classes = named(graph, (x, -3, A), (x, -1, B))
    assert [classes.get_name((moved, i)) for i in range(3)] == [B, A, None]


def test_split_and_concat_are_sums(graph: Graph) -> None:
    x = add(graph, "x", 3, 10)
    first, second = ops.split(x, sizes=(6, 4), axis=-1)
    joined = ops.concat(second, second, axis=-1)
    classes = named(graph, (x, -1, A), (first, -1, B))
    assert classes.get_name(get_axis(second)) == A + B * -1
    assert classes.get_name(get_axis(joined)) == (A + B * -1) * 2


def test_reshapes_are_products_and_quotients(graph: Graph) -> None:
    x = add(graph, "x", 3, 12)
    heads = ops.reshape(x, shape=(3, 4, 3))
    classes = named(graph, (x, -1, A), (heads, -2, B))
    assert classes.get_name(get_axis(heads)) == floordiv(A, B)
    other = named(graph, (heads, -1, A), (heads, -2, B))
    assert other.get_name(get_axis(x)) == A * B
    factors = named(graph, (x, -1, A * B), a=4, b=3)  # the only field with the value 3
    assert factors.get_name(get_axis(heads)) == B


def test_parameters_are_listed_in_order_of_their_first_reader(graph: Graph) -> None:
    x, w, b, _ = (add(graph, name, 4, 4) for name in ("x", "w", "b", "unread"))
    ops.add(ops.add(ops.linear(x, b), w), b)
    assert [p.name for p in list_read_params(graph)] == ["x", "b", "w"]
