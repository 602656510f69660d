"""scale-residual-stream: writers and ε of the residual stream take a factor."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Node, TensorType, WeftError, interpret, ops
from weft.ir.types import dtypes, sizes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.edits.edit import rebuild_node

from ...models import Tiny, applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("factor", ["0.125", "0.3", "1e-4"])
@pytest.mark.parametrize(
    "name",
    [
        *("family/t5-v1.1", "family/gemma2", "family/gpt2-tied", "family/bert", "family/albert", "family/qwen2-moe"),
        *("packed/family t5-v1.1", "cached/variant hybrid", "variant/norms without weights", "variant/repeated"),
    ],
)
def test_scaled_streams_compute_the_same(name: str, factor: str) -> None:
    graph = ZOO[name]()
    after = applied(f"scale-residual-stream{{factor={factor}}}", graph)
    assert worst(graph, after) <= EXACT
    again = applied(f"scale-residual-stream{{factor={factor}}}", after)
    assert again == after and after.meta["residual_scale"] == float(factor)


def largest(graph: Graph, op: str = "add") -> float:
    """The largest number of the sums that `graph` makes."""
    found = [0.0]
    equivalence = EquivalenceCheck()

    def watch(node: Node, arrays: tuple[np.ndarray, ...]) -> None:
        if node.op.name == op:
            found.append(float(np.abs(arrays[0]).max()))

    interpret(equivalence.randomize_weights(graph), equivalence.make_inputs(graph), watch=watch)
    return max(found)


def test_scaled_stream_fits_half_precision() -> None:
    g = applied("scale-residual-stream{factor=131072}", Tiny().graph())  # a stream as T5's, at the border of f16
    del g.meta["residual_scale"]
    assert largest(g) > 65504
    after = applied("scale-residual-stream{factor=0.0009765625}", g)
    assert largest(after) == pytest.approx(largest(g) / 1024) and worst(g, after) <= EXACT


def test_eps_must_be_scaled_too() -> None:
    before = Tiny().graph()
    wrong = applied("scale-residual-stream{factor=0.01}", before)
    for node in wrong.nodes:
        if node.op is ops.rms_norm:
            rebuild_node(node, eps=1e-5)
    assert worst(before, wrong) > 1e-4


def test_second_factor_replaces_the_first() -> None:
    before = Tiny(norm="layer").graph()
    after = applied("scale-residual-stream{factor=4.0}, scale-residual-stream{factor=0.5}", before)
    once = applied("scale-residual-stream{factor=0.5}", before)
    for name, param in after.params.items():
        same = param.recipe.evaluate(after.reader), once.params[name].recipe.evaluate(once.reader)
        np.testing.assert_array_equal(*same)
    assert worst(before, after) <= EXACT


def test_scaling_refuses() -> None:
    for factor in ("0", "-1.0"):
        with pytest.raises(WeftError, match=r"scale-residual-stream: factor=.* must be from 1e-06 to 1e\+06"):
            applied(f"scale-residual-stream{{factor={factor}}}", Tiny().graph())
    with pytest.raises(WeftError, match="is an output of the graph"):
        applied("scale-residual-stream{factor=2.0}", ZOO["variant/encoder, ALiBi"]())
    g = Graph("flat")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    g.add_output("y", ops.rms_norm(x))
    with pytest.raises(WeftError, match="graph flat has no residual stream: no norm reads a sum of two values"):
        applied("scale-residual-stream{factor=2.0}", g)
