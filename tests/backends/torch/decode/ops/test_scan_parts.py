"""Analysis of the step of a recurrence: its axes, and the products by weights before its kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.backends.torch.decode.ops.scan_parts import StepAxes, find_reduced_dims, is_regrouping, split_products
from weft.frontends.dsl import building, linear, scan
from weft.ir import Graph, TensorType, Value, dtypes, interpret, ops
from weft.ir.graph.step import Step
from weft.ir.types import sizes

from ...kernels.scans import step_of

LEAD = sizes.sym("batch"), sizes.sym("seq")


def build_step(step: Callable[..., tuple[Value, Value]], state: tuple[int, ...], *rows: tuple[int, ...]) -> Step:
    """Build the step of a recurrence with tokens of these row shapes."""
    with building(Graph("own")) as graph:
        values = [graph.add_input(f"x{i}", TensorType(dtypes.f32, (*LEAD, *row))) for i, row in enumerate(rows)]
        scan(step, *values, state=state)
    return step_of(graph)


def test_products_by_weights_become_tokens_of_the_rest() -> None:
    def step(h: Value, x: Value) -> tuple[Value, Value]:
        h = ops.tanh(linear(h, 3, "w") + x)
        return h, h * x

    whole = build_step(step, (3,), (3,))
    parts = split_products(whole)
    assert parts is not None
    products, rest = parts
    assert [n.op for n in products.nodes if n.op is ops.linear] == [ops.linear]
    assert not [n for n in rest.graph.nodes if n.op is ops.linear]
    assert [rest.tokens[-1], *rest.constants] == ["product0"]
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(v.type.concrete({"batch": 2})) for name, v in whole.graph.inputs.items()}
    made = interpret(products, {name: feeds[name] for name in products.inputs})
    found = interpret(rest.graph, {name: {**feeds, **made}[name] for name in rest.graph.inputs})
    for name, wanted in interpret(whole.graph, feeds).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12)


def test_a_step_without_products_is_not_split() -> None:
    assert split_products(build_step(lambda h, x: (h + x, h * x), (3,), (3,))) is None


def test_a_product_that_is_an_output_is_not_split() -> None:
    assert split_products(build_step(lambda h, x: (h + x, linear(x, 3, "w")), (3,), (3,))) is None


def test_elementwise_ops_and_reductions_join_axes() -> None:
    """The keys of q are the rows of the state; its columns are those of the output."""

    def step(h: Value, q: Value) -> tuple[Value, Value]:
        return h * 0.5, ops.sum(h * q, axes=(1,))

    own = build_step(step, (3, 5), (3, 1))
    axes, inputs = StepAxes(own), [*own.graph.inputs.values()]
    state, q = (axes.axes_of(v) for v in inputs)
    (y,) = (axes.axes_of(own.graph.outputs[name]) for name in own.outputs)
    assert (q[1], q[2]) == (state[1], None)
    assert (y[0], y[1]) == (state[0], state[2])
    assert len({*state}) == 3


def test_a_matrix_product_joins_its_summed_axes() -> None:
    own = build_step(lambda h, q: (h * 0.5, q @ h), (2, 5, 6), (2, 4, 5))
    axes = StepAxes(own)
    state, q = (axes.axes_of(v) for v in own.graph.inputs.values())
    assert q[3] == state[2]
    assert q[2] not in state


def test_reduced_dims_count_from_the_first() -> None:
    graph = Graph("reduced")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3, 4)))
    node = ops.sum(x, axes=(-1, 0)).producer
    assert node is not None and find_reduced_dims(node) == {0, 2}


def test_reshapes_that_only_add_ones_do_not_regroup() -> None:
    graph = Graph("shapes")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 6)))
    nodes = [ops.reshape(x, shape=shape).producer for shape in ((2, 1, 6), (2, 2, 3), (12,))]
    assert [is_regrouping(n) for n in nodes if n is not None] == [False, True, True]
    other = ops.exp(x).producer
    assert other is not None and not is_regrouping(other)
