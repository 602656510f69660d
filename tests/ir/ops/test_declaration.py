"""Ops that are declared by their bodies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from weft.ir import OPS, Graph, TensorType, Value, interpret, ops, parse
from weft.ir.op import Trait, case, normal
from weft.ir.ops.declaration import composed_op, fused_op
from weft.ir.testing import expand_bodies
from weft.ir.types import dtypes


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Remove the ops that a test declares."""
    before = {*OPS}
    yield
    for name in {*OPS} - before:
        OPS.remove(name)


def test_the_reference_of_a_composed_op_interprets_its_body() -> None:
    @composed_op(outputs="total rest", cases=[case(normal(2, 3), normal(2, 3))])
    def add_and_scale(x: Value, *others: Value, by: float = 2.0) -> tuple[Value, Value]:
        """x · by + Σ others, and x."""
        total = ops.affine(x, by=by)
        for other in others:
            total = ops.add(total, other)
        return total, x

    assert add_and_scale.operands[1].variadic and add_and_scale.attrs["by"].default == 2.0
    x, y = np.ones(3), np.arange(3.0)
    total, rest = add_and_scale.run_reference([x, y, y], {"by": 3.0})
    assert (total.tolist(), rest.tolist()) == ([3, 5, 7], [1, 1, 1])
    assert Trait.FUSED not in add_and_scale.traits


def test_fused_ops_have_types_and_cost_of_their_bodies() -> None:
    @fused_op(traits=[Trait.ROWWISE], cases=[case(normal(2, 3), normal(4, 3))])
    def relu_linear(x: Value, weight: Value, bias: Value | None = None) -> Value:
        """max(x Wᵀ + b, 0)."""
        return ops.relu(ops.linear(x, weight, bias))

    graph = Graph("g")
    x, w = (graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in (("x", (2, 3)), ("w", (4, 3))))
    y = relu_linear(x, w)
    graph.add_output("y", y)
    assert Trait.FUSED in relu_linear.traits and str(y.type) == "f32[2, 4]"
    (node,) = graph.nodes
    cost = node.op.node_cost(node)
    # 2·2·3·4 for the product and one per element of relu; the product itself is never written.
    assert (cost.flops, cost.read, cost.written) == (48 + 8, 4 * (6 + 12), 4 * 8)
    assert parse(str(graph)) == graph
    expanded = expand_bodies(graph)
    assert [n.op.name for n in expanded.nodes] == ["linear", "relu"]
    feeds = {"x": np.array([[1.0, -2, 3], [0, 1, 0]]), "w": np.eye(4, 3)}
    np.testing.assert_array_equal(interpret(graph, feeds)["y"], np.maximum(feeds["x"] @ feeds["w"].T, 0))


def test_fused_recurrences_have_the_states_of_their_bodies() -> None:
    x = TensorType(dtypes.f32, (2, 5, 4))
    op = OPS["gated_selective_scan"]
    operands = [x, x, x.with_shape(4, 3), x.with_shape(2, 5, 3), x.with_shape(2, 5, 3)]
    (spec,) = op.states_of(operands, op.check_attrs({}))
    (inner,) = OPS["selective_scan"].states_of(operands, OPS["selective_scan"].check_attrs({}))
    assert spec == inner and str(spec.type) == "f32[2, 3, 4]"
