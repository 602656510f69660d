"""The pipeline of a decode step: exact on every graph, and a node for each kernel."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.ir import Graph, TensorType, Value, WeftError, ops
from weft.ir.op import OPS, Trait
from weft.ir.types import dtypes, sizes
from weft.passes import Report, Trace, run_passes
from weft.passes.core.pipeline import PIPELINES
from weft.passes.core.text import parse_pipeline
from weft.passes.default import FUSE_DECODE, default_pipeline
from weft.passes.edits.legalization import is_fused
from weft.passes.library.decode.products import reorder_sums

from ....sampling import each
from ...models import applied, weight
from ...zoo import TRIED, ZOO

STREAM = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), 6))


@pytest.mark.parametrize("name", each(6, TRIED))
def test_every_step_is_exact(name: str) -> None:
    """In float64, pass by pass; what is fused can be told from what it was made of, and done only once."""
    after = run_passes(ZOO[name](), "decode-torch", verify=True)
    again = run_passes(after, FUSED)
    assert again == after


FUSED = "fuse-norm-linear{fold=false}, fuse-activation, fuse-qkv, fuse-latent, fuse-linear-residual, pack-linears"


def launches(name: str) -> list[str]:
    graph = run_passes(ZOO[name](), "decode-torch")
    return [n.op.name for n in graph.nodes if n.scope.startswith("layers.0") and n.op is not ops.pack]


LAYERS = {
    "variant/grouped": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/norms of q and k": "norm_qkv attention linear_residual norm_glu linear_residual",
    "packed/family qwen3-gqa": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/parallel": "norm_qkv attention linear_residual norm_glu linear_residual",
    "variant/experts": "norm_qkv attention linear_residual norm_route mixture",
    "family/nemotron": "norm_qkv attention linear_residual norm_linear linear_residual",
    "family/mamba": "norm_linear split causal_conv norm_linear split gated_selective_scan linear_residual",
    "family/mamba2": "norm_linear split causal_conv split gated_ssd linear_residual",
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_node_for_each_kernel(name: str) -> None:
    assert launches(name) == LAYERS[name].split()


def test_the_beginning_makes_the_angles_of_all_layers() -> None:
    graph = run_passes(ZOO["variant/grouped"](), "decode-torch")
    first = next(iter(graph.nodes))
    assert first.op is ops.embed_tokens and len(first.outputs) == 3
    counts = Counter(n.op for n in graph.nodes)
    assert counts[ops.rotary_angles] == counts[ops.rope] == 0
    assert all(n.operand("cosines") is first.outputs[1] for n in graph.nodes if n.op is ops.norm_qkv)


def test_the_pipeline_has_a_name() -> None:
    simplify, fuse = str(PIPELINES["decode-torch"]).split("; ")
    assert simplify == "simplify: unfuse-residual-norm, dce, cse, fold-constants" and fuse.startswith("fuse-decode: ")
    assert parse_pipeline("decode-torch, -pack-linears").passes[-1] == FUSE_DECODE.passes[-1]
    assert "pack-linears" not in str(parse_pipeline("decode-torch, -pack-linears"))


def test_caches_come_after_fusing() -> None:
    """The states of recurrences go through fused ops; prefill and steps equal one pass over the text."""
    for name in ("variant/grouped", "family/mamba", "variant/Mamba-2", "variant/delta rule"):
        graph = run_passes(ZOO[name](), "decode-torch, kv-cache", verify=True)
        assert [o for o in graph.outputs if o.startswith("present")]


def test_every_fused_op_is_made_by_a_pass() -> None:
    graphs = [*(run_passes(ZOO[name](), "decode-torch") for name in MODELS)]
    graphs.append(run_passes(ZOO["variant/experts"](), "fuse-mixture"))  # whose choice the router is fused with later
    made = {n.op for graph in graphs for n in graph.nodes}
    assert {op for op in OPS.values() if Trait.FUSED in op.traits} <= made


MODELS = [*LAYERS, "variant/latent", "variant/delta rule", "variant/depths by rank"]


def stream(*shapes: str) -> tuple[Graph, list[Value]]:
    """A graph with inputs x, y and z like a stream of tokens."""
    graph = Graph("sums")
    return graph, [graph.add_input(name, STREAM) for name in shapes]


def test_sums_begin_with_what_is_there() -> None:
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


def test_what_is_too_small_or_shared_is_not_added_in_place() -> None:
    graph, (x,) = stream("x")
    product = ops.linear(x, weight(graph, "a", 6, 6))
    graph.add_output("bias", ops.add(product, weight(graph, "b", 6)))
    graph.add_output("twice", ops.add(x, product))
    after = applied("fuse-norm-linear{fold=false}, fuse-linear-residual", graph)
    assert [n.op.name for n in after.nodes] == ["norm_linear", "add", "add"]


def test_refusals_say_what_stands_in_the_way() -> None:
    report = Report()
    run_passes(ZOO["variant/T5 bias, per layer"](), "decode-torch", report=report)
    (qkv,) = (r for r in report.records if r.applied.name == "fuse-qkv")
    assert any("it has a bias that is not ALiBi's" in line for line in qkv.trace.lines)


@pytest.mark.parametrize("name", LAYERS)
def test_unfuse_leaves_simple_ops(name: str) -> None:
    """That any pass and any target takes: the default pipeline begins with it."""
    after = run_passes(ZOO[name](), "decode-torch, unfuse, fold-constants", verify=True)
    assert not any(map(is_fused, after.nodes)) and all(Trait.FUSED not in n.op.traits for n in after.nodes)
    step = run_passes(ZOO[name](), "decode-torch")
    assert str(default_pipeline(step)).startswith("simplify: unfuse, ")
    assert not any(map(is_fused, run_passes(step, "default").nodes))


def test_weights_of_norms_that_are_computed_stay_operands_of_norms() -> None:
    """Kernels take them from a module, where there are none."""
    graph, (x,) = stream("x")
    g = ops.exp(weight(graph, "g", 6))
    graph.add_output("y", ops.add(x, ops.rms_norm(ops.linear(x, weight(graph, "a", 6, 6)), g)))
    after = applied("fuse-norm-linear{fold=false}, fuse-linear-residual", graph)
    assert [n.op.name for n in after.nodes] == ["exp", "norm_linear", "rms_norm", "add"]


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_a_rate_for_something_else_than_a_head_is_not_taken_for_one(axes: tuple[int, ...]) -> None:
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


def test_norms_without_weights_are_fused_ops_too_if_they_are_none() -> None:
    """A linear map as norm_linear of the kind none is not taken for a norm by passes that know norm_linear."""
    graph, (x,) = stream("x")
    graph.add_output("y", ops.linear(x, weight(graph, "a", 6, 6)))
    with pytest.raises(WeftError, match=r"pass rotate-residual does not support fused ops, such as norm_linear"):
        run_passes(graph, "fuse-norm-linear{fold=false}, rotate-residual")


def test_passes_that_do_not_look_into_fused_ops_refuse() -> None:
    with pytest.raises(WeftError, match=r"pass mha-to-gqa does not support fused ops, such as embed_tokens \(%embed\)"):
        run_passes(ZOO["variant/grouped"](), "decode-torch, mha-to-gqa{kv_heads=1}")
