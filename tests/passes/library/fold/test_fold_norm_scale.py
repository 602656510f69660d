"""fold-norm-scale."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Node, Param, TensorType, ops
from weft.ir.recipes import Scale
from weft.ir.types import dtypes, sizes
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import derive_param, rebuild_node

from ...models import Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

PACK = "pack-qkv, pack-gate-up, fuse-residual-norm"
NORMS = ("rms_norm", "layer_norm", "add_norm")


def weighted(graph: Graph) -> list[str]:
    """The names of the norms that have a weight or a bias."""
    return [n.output.name for n in graph.nodes if n.op.name in NORMS and isinstance(n.inputs[-1], Param)]


def reasons(trace: Trace) -> set[str]:
    return {refused.reason for refused in trace.refusals}


def norm(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.output.name == name)


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("before", ["dce", PACK], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "tiny",
    [Tiny(), Tiny(norm="layer", bias="q up"), Tiny(qk_norm=True, kv_heads=6), Tiny(norm="layer", window=3)],
    ids=str,
)
def test_norms_of_decoders_lose_their_parameters(tiny: Tiny, before: str) -> None:
    graph = applied(before, tiny.graph())
    after = applied("fold-norm-scale", graph)
    assert len(weighted(after)) == (2 * tiny.layers if tiny.qk_norm else 0)
    assert worst(graph, after) <= EXACT
    assert count(after, "linear") == count(graph, "linear")
    biases = [n.operand("bias") is not None for n in after.nodes if n.op is ops.linear and n.inputs[0] is not None]
    assert tiny.norm == "rms" or sum(biases) >= 2 * tiny.layers + 1


def test_the_recipes_are_the_formula() -> None:
    """W diag(g) and b + W β, by the names of the old parameters."""
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    normed = ops.layer_norm(x, weight(g, "norm.weight", 6), weight(g, "norm.bias", 6))
    g.add_output("y", ops.linear(normed, weight(g, "up.weight", 4, 6), weight(g, "up.bias", 4)))
    g.add_output("z", ops.linear(normed, weight(g, "down.weight", 5, 6)))
    gain, beta, up, bias = (g.params[f"{n}"].recipe for n in ("norm.weight", "norm.bias", "up.weight", "up.bias"))
    after = applied("fold-norm-scale", g)
    assert sorted(after.params) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    read = {name: p.recipe.evaluate(after.reader) for name, p in after.params.items()}
    w = up.evaluate(g.reader)
    assert read["up.weight"] == pytest.approx(w * gain.evaluate(g.reader))
    assert read["up.bias"] == pytest.approx(bias.evaluate(g.reader) + w @ beta.evaluate(g.reader), abs=1e-6)
    assert worst(g, after) <= EXACT


def test_rows_that_are_moved_are_followed() -> None:
    """A slice of the normed rows, as a pooler takes it, still reads them row by row."""
    g = Graph("pooled")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    normed = ops.layer_norm(x, weight(g, "norm.weight", 6), weight(g, "norm.bias", 6))
    first = ops.squeeze(ops.slice_(normed, axis=1, start=0, stop=1), axes=(1,))
    g.add_output("y", ops.linear(first, weight(g, "pooler.weight", 4, 6)))
    after = applied("fold-norm-scale", g)
    assert not weighted(after) and worst(g, after) <= EXACT


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("family/mixtral", 7),  # routers and experts read the norms too
        ("family/gpt-oss", 7),  # the experts have biases
        ("family/deepseek-v3", 10),  # the latent queries' norms as well
        ("variant/experts, shared and gated", 5),
        ("family/jamba", 11),  # with the norms of the steps of two state-space layers
        ("quantized/mxfp4", 7),
        ("cached/family mistral-gqa", 7),
    ],
)
def test_experts_and_routers_take_it(name: str, folded: int) -> None:
    graph, trace = ZOO[name](), Trace()
    after = applied("fold-norm-scale", graph, trace)
    assert trace.rewrites["fold-norm-scale"] == folded
    assert worst(graph, after) <= EXACT


def test_shared_layers_stay_shared() -> None:
    graph = ZOO["variant/repeated"]()
    after = applied("fold-norm-scale", graph)
    norms = {n for n in graph.params if "norm" in n}
    assert set(after.params) == set(graph.params) - norms and not weighted(after)


def test_a_tied_head_is_copied_only_if_asked() -> None:
    graph, trace = ZOO["family/gpt2-tied"](), Trace()
    after = applied("fold-norm-scale", graph, trace)
    assert weighted(after) == ["final_norm"]
    assert reasons(trace) == {"its reader's %embed.weight is shared with embedding (%embed); untie=true copies it"}
    untied = applied("fold-norm-scale{untie=true}", graph)
    assert not weighted(untied) and worst(graph, untied) <= EXACT
    table, head = (norm(untied, name).inputs[1] for name in ("embed", "lm_head"))
    assert isinstance(table, Param) and isinstance(head, Param)
    assert table.name == "embed.weight" and head is not table and isinstance(head.recipe, Scale)


def test_a_weight_with_two_norms_is_not_shared() -> None:
    """Two norms of their own weights before one matrix: it cannot take both, and is left alone, or copied."""
    g = Graph("both")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    shared = weight(g, "shared.weight", 6, 6)
    first = ops.linear(ops.rms_norm(x, weight(g, "a.weight", 6)), shared, name="first")
    second = ops.linear(ops.rms_norm(first, weight(g, "b.weight", 6)), shared, name="second")
    g.add_output("y", second)
    trace = Trace()
    assert len(weighted(applied("fold-norm-scale", g, trace))) == 2 and len(trace.refusals) == 2
    after = applied("fold-norm-scale{untie=true}", g)
    assert not weighted(after) and worst(g, after) <= EXACT


# -- what is refused, and what it would have done


def without_weight(graph: Graph, name: str) -> tuple[Graph, Param, Node]:
    """A copy where the norm called `name` has no weight, with that weight and the norm."""
    wrong = graph.clone()
    old = norm(wrong, name)
    gain = old.operand("weight")
    assert isinstance(gain, Param)
    return wrong, gain, rebuild_node(old, {"weight": None})


def scale_weight(linear: Node, gain: Param, axis: int) -> None:
    w = linear.inputs[1]
    assert isinstance(w, Param)
    linear.set_input(1, derive_param(w, Scale(w.recipe, gain.recipe, axis)))


def test_a_norm_that_is_the_residual_keeps_its_weight() -> None:
    graph, trace = ZOO["family/bert"](), Trace()
    after = applied("fold-norm-scale", graph, trace)
    assert after == graph
    assert "it is a summand of add (%layers.0.attn_residual)" in reasons(trace)
    wrong, gain, made = without_weight(graph, "layers.0.attn_norm")
    for node in made.output.users:
        if node.op is ops.linear:
            scale_weight(node, gain, 1)
    assert worst(graph, wrong) > 1e-2  # the residual was scaled too


@pytest.mark.parametrize("name", ["family/gemma2", "family/olmo2-gqa", "variant/sandwich"])
def test_a_norm_after_a_sublayer_keeps_its_weight(name: str) -> None:
    """It cannot go into the linear before the norm either, which would divide by it again."""
    graph, trace = ZOO[name](), Trace()
    after = applied("fold-norm-scale", graph, trace)
    assert "layers.0.attn_post_norm" in weighted(after)
    assert "it is a summand of add (%layers.0.attn_residual)" in reasons(trace)
    wrong, gain, made = without_weight(graph, "layers.0.attn_post_norm")
    before = made.inputs[0]
    assert before is not None and before.producer is not None and before.producer.op is ops.linear
    scale_weight(before.producer, gain, 0)
    assert worst(graph, wrong) > 1e-2


def test_norms_of_queries_and_outputs_keep_their_weights() -> None:
    trace = Trace()
    after = applied("fold-norm-scale", ZOO["variant/norms of q and k, full"](), trace)
    assert weighted(after) == [f"layers.{i}.attn.{n}_norm" for i in range(2) for n in "qk"]
    assert "it is read by rope (%layers.0.attn.q_rope)" in reasons(trace)
    trace = Trace()
    after = applied("fold-norm-scale", ZOO["variant/encoder, pre-norm"](), trace)
    assert weighted(after) == ["final_norm"] and reasons(trace) == {"%final_norm is an output of the graph"}


def test_computed_weights_are_left_alone() -> None:
    g = Graph("computed")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    matrix = g.add_input("matrix", TensorType(dtypes.f32, (4, 6)))
    g.add_output("y", ops.linear(ops.rms_norm(x, weight(g, "norm.weight", 6)), matrix, name="up"))
    trace = Trace()
    assert applied("fold-norm-scale", g, trace) == g
    assert reasons(trace) == {"the weight of linear (%up) is computed"}
