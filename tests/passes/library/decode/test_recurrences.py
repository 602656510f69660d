"""fuse-recurrence: recurrences with their step sizes, gates and norms."""

from __future__ import annotations

import pytest

from weft.ir import Graph, TensorType, ops
from weft.ir.types import dtypes
from weft.passes import Report, run_passes

from ...models import weight
from ...rewrites import Rewrite, rewrites
from .layers import STREAM


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_rate_along_another_axis_than_heads_is_not_fused(axes: tuple[int, ...]) -> None:
    graph = Graph("decay")
    q, k, v, step = (
        graph.add_input(n, TensorType(dtypes.f32, (*STREAM.shape[:2], 4))) for n in ("q", "k", "v", "step")
    )
    rate = ops.neg(ops.exp(weight(graph, "a", 2)))
    apart = ops.reshape(ops.softplus(step), shape=(*STREAM.shape[:2], 2, 2))
    decay = ops.reshape(ops.mul(apart, ops.unsqueeze(rate, axes=axes)), shape=step.shape)
    graph.add_output("y", ops.gated_linear_attention(q, k, v, decay, heads=2, groups=2))
    after = run_passes(graph, "fuse-recurrence", verify=True)
    assert ("softplus" in [n.op.name for n in after.nodes]) == (axes == (0,))


def test_biases_of_a_step_size_have_one_element_for_each_feature() -> None:
    graph = Graph("step")
    x, b = (graph.add_input(n, TensorType(dtypes.f32, (*STREAM.shape[:2], 4))) for n in ("x", "b"))
    delta = ops.softplus(ops.add(x, weight(graph, "bias", 1)))
    graph.add_output("y", ops.selective_scan(x, delta, weight(graph, "a", 4, 4), b, b))
    report = Report()
    after = run_passes(graph, "fuse-recurrence", report=report)
    assert [n.op.name for n in after.nodes] == ["add", "softplus", "selective_scan"]
    assert any("%bias is not a bias per feature" in line for line in report.records[0].trace.lines)
