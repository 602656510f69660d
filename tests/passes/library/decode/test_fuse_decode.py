"""The pipeline of a decode step: exact on every graph, and a node for each kernel."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.ir import Graph, TensorType, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.types import dtypes, sizes
from weft.passes import Report, Trace, run_passes
from weft.passes.core.pipeline import PIPELINES
from weft.passes.core.text import parse_pipeline
from weft.passes.default import FUSE_DECODE
from weft.passes.library.decode.products import in_order

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
    made = {n.op.name for name in TRIED for n in run_passes(ZOO[name](), "decode-torch").nodes if fused(n.op)}
    assert made | {"rotary_angles", "choose_experts"} == {name for name in dir_of_ops() if fused(getattr(ops, name))}


def fused(op: object) -> bool:
    return Trait.FUSED in getattr(op, "traits", ())


def dir_of_ops() -> list[str]:
    from weft.ir.op import OPS

    return [*OPS]


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
    in_order(plain, Trace())
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


def test_passes_that_do_not_look_into_fused_ops_refuse() -> None:
    with pytest.raises(
        WeftError, match=r"pass mha-to-gqa does not look into fused ops, such as embed_tokens \(%embed\)"
    ):
        run_passes(ZOO["variant/grouped"](), "decode-torch, mha-to-gqa{kv_heads=1}")
