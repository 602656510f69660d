"""Products of a decode step: fused with activations, gates and additions, or packed."""

from __future__ import annotations

import pytest

from weft.ir import ops
from weft.passes import Trace
from weft.passes.library.decode.products import reorder_sums

from ...models import applied, weight
from ...rewrites import Rewrite, rewrites
from .layers import stream


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_sums_begin_with_values_in_memory() -> None:
    """Whatever their brackets: first values, then products, one after the other."""
    graph, (x, y) = stream("x", "y")
    a, b = (ops.linear(v, weight(graph, n, 6, 6)) for v, n in ((x, "a"), (y, "b")))
    graph.add_output("total", ops.add(ops.add(a, b), ops.add(x, y)))
    after = applied("fuse-norm-linear{fold=false}, fuse-linear-residual", graph)
    assert [n.op.name for n in after.nodes] == ["add", "linear_residual", "linear_residual"]
    plain, (x, y) = stream("x", "y")
    plain.add_output("total", ops.add(x, ops.add(x, y)))
    before = str(plain)
    reorder_sums(plain, Trace())
    assert str(plain) == before  # no products, nothing to order


def test_broadcast_and_shared_products_are_not_fused() -> None:
    graph, (x,) = stream("x")
    product = ops.linear(x, weight(graph, "a", 6, 6))
    graph.add_output("bias", ops.add(product, weight(graph, "b", 6)))
    graph.add_output("twice", ops.add(x, product))
    after = applied("fuse-norm-linear{fold=false}, fuse-linear-residual", graph)
    assert [n.op.name for n in after.nodes] == ["norm_linear", "add", "add"]


def test_weights_of_norms_that_are_computed_stay_operands_of_norms() -> None:
    """Kernels take them from a module, where there are none."""
    graph, (x,) = stream("x")
    g = ops.exp(weight(graph, "g", 6))
    graph.add_output("y", ops.add(x, ops.rms_norm(ops.linear(x, weight(graph, "a", 6, 6)), g)))
    after = applied("fuse-norm-linear{fold=false}, fuse-linear-residual", graph)
    assert [n.op.name for n in after.nodes] == ["exp", "norm_linear", "rms_norm", "add"]
