"""rotate-residual and scale-residual-stream: the stream changes, the outputs do not."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Node, Param, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Literal, Scale
from weft.ir.recipes.matrices import MatMul, RandomOrthogonal
from weft.ir.types import dtypes, sizes
from weft.passes import Trace
from weft.passes.analysis.residual import find_streams
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.edits.absorb import absorb_output_map, make_matrix_map
from weft.passes.edits.edit import rebuild_node

from ...models import Tiny, applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

FOLD = "fold-norm-scale{untie=true}"


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "family/llama-gqa-tied",
            "family/mixtral",
            "family/gpt-oss",
            "family/mamba",
            "family/jamba",
            "family/t5-v1.1",
        ),
        *("packed/family llama-mha-biases", "cached/family mistral-gqa", "variant/repeated", "quantized/gguf"),
    ],
)
def test_rotated_models_compute_the_same(name: str) -> None:
    graph = ZOO[name]()
    after = applied(f"{FOLD}, rotate-residual{{seed=5}}", graph)
    assert worst(graph, after) <= EXACT
    trace = Trace()
    assert applied("rotate-residual", after, trace) == after
    assert [refused.reason for refused in trace.refusals] == ["the residual stream is rotated already"]


def test_layer_norms_rotate_once_they_are_rms() -> None:
    graph = ZOO["family/gpt2-untied"]()
    after = applied(f"fuse-norm-linear, layernorm-to-rmsnorm, {FOLD}, rotate-residual", graph)
    assert worst(graph, after) <= EXACT and count(after, "norm_linear") == 13


def test_a_tied_table_without_norm_weights_stays_tied() -> None:
    graph = applied("layernorm-to-rmsnorm", ZOO["family/olmo-clipped"]())
    after = applied("rotate-residual", graph)
    table = after.params["embed.weight"]
    assert isinstance(table.recipe, MatMul) and len(table.users) == 2 and worst(graph, after) <= EXACT


def test_outliers_are_spread() -> None:
    """One place of the stream with large numbers, as trained models have: the largest of a row comes near the rest."""
    graph = applied(FOLD, Tiny(dim=16).graph())
    spike = [50.0 if i == 3 else 1.0 for i in range(16)]
    for stream in find_streams(graph):
        for writer in stream.writers:
            assert isinstance(writer, Node)
            absorb_output_map(writer, lambda r, axis, rank: Scale(r, Literal.from_array(spike), axis))
    after = applied("rotate-residual", graph)

    def peak(g: Graph) -> float:
        rows = g.params["embed.weight"].recipe.evaluate(g.reader)
        return float(np.mean(np.abs(rows).max(1) / np.sqrt(np.square(rows).mean(1))))

    assert peak(graph) > 3.5 and peak(after) < 1.5 and worst(graph, after) <= EXACT


def test_weights_of_norms_do_not_commute_with_it() -> None:
    before = Tiny().graph()
    with pytest.raises(WeftError, match=r"%layers.0.mlp_norm has a weight; run fold-norm-scale\{untie=true\} before"):
        applied("rotate-residual", before)
    wrong = before.clone()
    (stream,) = find_streams(wrong)
    turn = make_matrix_map(RandomOrthogonal(18))
    for writer in stream.writers:
        assert isinstance(writer, Node)
        absorb_output_map(writer, turn)
    for norm in stream.norms:
        for reader, _ in norm.output.uses:
            w = reader.inputs[1]
            assert isinstance(w, Param)
            w.recipe = turn(w.recipe, 1, 2)
    assert worst(before, wrong) > 1e-2


@pytest.mark.parametrize(
    ("name", "before", "reason"),
    [
        ("family/olmo", "dce", "%layers.0.ffn_norm subtracts the mean; run layernorm-to-rmsnorm before"),
        (
            "family/gemma2",
            FOLD,
            "%layers.0.attn_post_norm is made by rms_norm, a norm whose result is part of the residual",
        ),
        ("variant/encoder, pre-norm", f"{FOLD}, layernorm-to-rmsnorm", "%final_norm has a weight; run fold-norm-scale"),
        ("variant/encoder, ALiBi", FOLD, "is an output of the graph"),
    ],
)
def test_norms_that_do_not_commute_are_refused(name: str, before: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(f"{before}, rotate-residual", ZOO[name]())


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
