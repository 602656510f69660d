"""fold-scale: every factor of every kind goes, and what it must not pass is refused, for a reason that is measured."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, GatedMLP, MoE, RMSNorm, RoPE, Router
from weft.ir import Graph, TensorType, ops
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from ...models import BATCH, SEQ, Tiny, applied, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

ATTENTION = Attention(4, 2, rope=RoPE(), scale=0.3)


SCALED = {"residual_scale": 0.22}


def left(graph: Graph) -> list[str]:
    """The factors that are still there."""
    found = [f"{n.output.name}" for n in graph.nodes if n.op is ops.affine and n.attrs["plus"] == 0]
    found += [n.output.name for n in graph.nodes if n.op is ops.attention and n.attrs["scale"] != 1]
    return found + [n.output.name for n in graph.nodes if n.op is ops.route and n.attrs["scale"] != 1]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "name",
    [
        "family/granite",
        "family/granitemoe",
        "family/cohere",
        "family/gemma",
        "family/deepseek-v3",
        "family/t5",
        "family/bart-scaled",
        "family/qwen3-gqa",
        "packed/family llama-mha-biases",
        "packed/variant latent queries",
        "packed/variant repeated",
        "cached/variant latent",
    ],
)
def test_no_factor_is_left(name: str) -> None:
    before, trace = ZOO[name](), Trace()
    after = applied("fold-scale", before, trace)
    assert left(before) and not left(after) and not trace.refusals
    assert worst(before, after) <= EXACT
    assert len(after) <= len(before)


def test_one_weight_for_all_repetitions() -> None:
    """Layers that share weights go on sharing them."""
    before = ZOO["variant/repeated"]()
    assert len(applied("fold-scale", before).params) == len(before.params)


def test_scores_take_their_scale_from_the_norm_of_queries() -> None:
    after = applied("fold-scale", Tiny(qk_norm=True).graph())
    changed = {name for name, p in after.params.items() if p.recipe.name == "scale"}
    assert changed == {f"layers.{i}.attn.q_norm.weight" for i in range(2)}


def test_of_a_packed_linear_only_the_rows_of_the_queries_change() -> None:
    before = applied("pack-qkv", Tiny(layers=1, bias="q k v").graph())
    after = applied("fold-scale", before)
    old, new = (g.params["layers.0.attn.qkv.bias"].recipe.evaluate(g.reader) for g in (before, after))
    np.testing.assert_allclose(new[:24], old[:24] / 2, rtol=1e-7)
    np.testing.assert_array_equal(new[24:], old[24:])
    assert np.any(old[:24])


def decoder(**settings: object) -> Graph:
    return Decoder(37, 18, 2, Block(Attention(3), GatedMLP(7), **SCALED), **settings).graph()


def test_a_tied_table_takes_the_factor_and_the_final_norm_its_inverse() -> None:
    before = decoder(tie_embeddings=True, embed_scale=4.0, logit_scale=0.25)
    after = applied("fold-scale", before)
    assert not left(after) and len(after.params) == len(before.params) and worst(before, after) <= EXACT
    table = np.float64(after.params["embed.weight"].recipe.evaluate(after.reader))
    np.testing.assert_array_equal(table, 4 * before.params["embed.weight"].recipe.evaluate(before.reader))


def test_without_a_final_norm_a_tied_table_is_copied_or_left() -> None:
    before, trace = decoder(tie_embeddings=True, embed_scale=4.0, final_norm=False), Trace()
    kept = applied("fold-scale", before, trace)
    (refused,) = trace.refusals
    assert "is also a weight of linear (%lm_head)" in refused.reason and left(kept) == ["embed_scaled"]
    copied = applied("fold-scale{untie=true}", before)
    assert not left(copied) and len(copied.params) == len(before.params) + 1 and worst(before, copied) <= EXACT
    wrong = before.clone()  # the table changed for both
    scaled = next(n for n in wrong.nodes if n.output.name == "embed_scaled")
    table = wrong.params["embed.weight"]
    table.recipe = copied.params["embed.weight_2"].recipe
    scaled.output.replace_uses(scaled.inputs[0])
    assert worst(before, wrong) > 0.5


def vectors(kind: str) -> Graph:
    """A residual branch times a vector (LayerScale) or a single number (ReZero), both parameters."""
    g = Graph(kind)
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    factor = weight(g, "factor", *{"vector": (6,), "number": (1,), "scalar": (), "wide": (1, 1, 1)}[kind])
    for i in range(2):
        with g.scope(f"layers.{i}"):
            hidden = ops.gelu(ops.linear(x, weight(g, "up", 9, 6)))
            y = ops.linear(hidden, weight(g, "down", 6, 9), weight(g, "bias", 6))
            x = ops.add(x, ops.mul(factor, y, name="scaled"))
    g.add_output("y", x)
    return g


@pytest.mark.parametrize("kind", ["vector", "number", "scalar", "wide"])
def test_factors_that_are_parameters(kind: str) -> None:
    before = vectors(kind)
    after = applied("fold-scale", before)
    assert not [n for n in after.nodes if n.op is ops.mul] and "factor" not in after.params
    assert worst(before, after) <= EXACT


def test_experts_take_vectors_into_their_downs() -> None:
    g = Graph("experts")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    combine = ops.route(ops.linear(x, weight(g, "router", 4, 6)), k=2, scale=2.5)
    experts = [weight(g, n, 4, *s) for n, s in (("up", (5, 6)), ("down", (6, 5)), ("gate", (5, 6)))]
    y = ops.moe(x, combine, *experts, weight(g, "up_bias", 4, 5), weight(g, "down_bias", 4, 6))
    g.add_output("y", ops.mul(y, weight(g, "factor", 6)))
    after = applied("fold-scale", g)
    assert [n.op.name for n in after.nodes] == ["linear", "route", "moe"] and not left(after)
    assert worst(g, after) <= EXACT


def test_a_factor_after_an_activation_goes_into_the_columns_of_its_reader() -> None:
    """Not into up: GELU and SiLU do not let a factor through. A gated unit takes it in its ungated half, though."""
    for name, op in (("gelu", ops.gelu), ("silu", ops.swish)):
        g = Graph(name)
        x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
        up = ops.linear(x, weight(g, "up", 9, 6), name="up")
        scaled = ops.affine(op(up, name="act"), by=3.0, name="scaled")
        g.add_output("y", ops.linear(scaled, weight(g, "down", 6, 9)))
        after = applied("fold-scale", g)
        assert after.params["up"].recipe == g.params["up"].recipe and not left(after) and worst(g, after) <= EXACT
        g.add_output("seen", scaled)
        trace = Trace()
        assert left(applied("fold-scale", g, trace)) and "is between" in trace.refusals[0].reason
        wrong = Graph(name)
        x = wrong.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
        through = op(ops.affine(ops.linear(x, weight(wrong, "up", 9, 6)), by=3.0))
        wrong.add_output("y", ops.linear(through, weight(wrong, "down", 6, 9)))
        del g.outputs["seen"]
        assert worst(g, wrong) > 0.05
    after = applied("fold-scale", gated := Tiny(layers=1, kv_heads=6).graph())
    assert worst(gated, after) <= EXACT


def test_factor_after_a_soft_cap_stays() -> None:
    """The scores' own cap and that of the logits let a factor before them through; one behind a cap stays."""
    model = Decoder(37, 18, 1, Block(Attention(3, softcap=1.5), GatedMLP(7)), logit_scale=3.0, logit_softcap=2.0)
    before, trace = model.graph(), Trace()
    after = applied("fold-scale", before, trace)
    assert left(after) == ["logits_capped"] and worst(before, after) <= EXACT
    assert [r.reason for r in trace.refusals] == ["tanh (%tanh) is between the scale and the weights"]
    wrong = after.clone()
    head = next(n for n in wrong.nodes if n.output.name == "lm_head")
    with wrong.inserting(after=head):
        twice = ops.affine(head.output, by=2.0)
    head.output.replace_uses(twice, keep=[twice.producer])
    capped = next(n for n in wrong.nodes if n.output.name == "logits_capped")
    capped.output.replace_uses(capped.inputs[0])
    assert worst(before, wrong) > 0.02


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("variant/clipped", "clip (%layers.0.attn.q_clipped) is between"),
        ("variant/norms of q and k, no weights", "rms_norm (%layers.0.attn.q_norm) has no weight"),
    ],
)
def test_queries_that_are_clipped_or_normed_do_not_take_the_scale(name: str, reason: str) -> None:
    before, trace = ZOO[name](), Trace()
    after = applied("fold-scale", before, trace)
    assert str(after) == str(before) and reason in str(trace.refusals[0])
    wrong = before.clone()  # as if nothing stood between
    for node in list(wrong.nodes):
        if node.op is ops.attention:
            scale = 1 / np.sqrt(node.inputs[0].width // node.attrs["heads"])
            node.attrs["scale"] = 1.0
            q = next(n for n in wrong.nodes if n.output.name == node.scope + ".q")
            with wrong.inserting(after=q):
                less = ops.affine(q.output, by=float(scale))
            q.output.replace_uses(less, keep=[less.producer])
    assert worst(before, wrong) > 1e-4


def test_a_router_that_others_read_keeps_its_scale() -> None:
    g = MoE(4, 7, 2, router=Router(scale=2.5))
    before = Decoder(37, 18, 1, Block(Attention(3), g)).graph()
    combine = next(n for n in before.nodes if n.op is ops.route).output
    before.add_output("routed", combine)
    trace = Trace()
    after = applied("fold-scale", before, trace)
    assert left(after) == [combine.name] and "is an output" in trace.refusals[0].reason


def test_a_weight_that_others_need_as_it_is() -> None:
    g = Graph("shared")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    w = weight(g, "w", 6, 6)
    y = ops.relu(ops.linear(x, w, name="plain"))
    g.add_output("y", ops.affine(ops.linear(y, w, name="other"), by=0.3, name="scaled"))
    trace = Trace()
    assert left(applied("fold-scale", g, trace)) == ["scaled"] and "is also a weight of linear" in str(
        trace.refusals[0]
    )
    after = applied("fold-scale{untie=true}", g)
    assert len(after.params) == 2 and worst(g, after) <= EXACT


def test_powers_of_two_change_no_bit() -> None:
    before = Decoder(37, 16, 2, Block(Attention(4), MLP(9), RMSNorm())).graph()  # 1/sqrt(4) = 1/2
    trace = Trace()
    after = applied("fold-scale", before, trace)
    assert any("0.5 is a power of two" in line for line in trace.lines)
    inputs = EquivalenceCheck().make_inputs(before)
    a, b = (EquivalenceCheck().run(g, inputs)["logits"] for g in (before, after))
    np.testing.assert_array_equal(a, b)


def test_after_other_passes() -> None:
    before = ZOO["family/granite"]()
    after = run_passes(before, "default, fold-scale", verify=True)
    assert not left(after)
