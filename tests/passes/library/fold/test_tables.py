"""Passes on tables of tokens: pad-vocab, fold-token-types, precompute-first-layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.frontends.dsl import (
    MLP,
    Attention,
    Block,
    Decoder,
    Encoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    RoPE,
)
from weft.ir import Graph, WeftError, interpret, ops
from weft.passes import Trace, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import applied, count, worst
from ...zoo import ZOO

ATTENTION = Attention(4, 2, rope=RoPE(), qkv_bias=True)
BLOCK = Block(ATTENTION, GatedMLP(9))


def decoder(**settings: object) -> Graph:
    return Decoder(37, 16, 2, BLOCK, **settings).graph()


# -- pad-vocab


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [{}, {"head_bias": True}, {"logit_scale": 0.3, "logit_softcap": 2.0}], ids=str)
def test_padded_tables_give_the_same_logits(tied: bool, settings: dict[str, object]) -> None:
    before = decoder(tie_embeddings=tied, **settings)
    after = applied("pad-vocab{multiple=8}", before)
    assert worst(before, after) <= EXACT
    rows = {n: p.shape[0] for n, p in after.params.items() if p.shape[0] in (37, 40)}
    names = (
        {"embed.weight"}
        | (set() if tied else {"lm_head.weight"})
        | ({"lm_head.bias"} if "head_bias" in settings else set())
    )
    assert rows == dict.fromkeys(names, 40)
    assert str(applied("pad-vocab{multiple=8}", after)) == str(after)
    assert str(applied("pad-vocab{multiple=37}", before)) == str(before)


def test_without_the_slice_there_would_be_logits_of_tokens_that_do_not_exist() -> None:
    before = decoder()
    after = applied("pad-vocab{multiple=8}", before)
    cut = next(n for n in after.nodes if n.op is ops.slice_)
    after.outputs["logits"] = cut.inputs[0]
    inputs = EquivalenceCheck().make_inputs(before)
    logits = EquivalenceCheck().run(after, inputs)["logits"]
    assert logits.shape[-1] == 40 and not logits[..., 37:].any()
    power = np.exp(logits)
    assert (power[..., 37:].sum(-1) / power.sum(-1) > 0.02).all()  # the probability they would take


def test_after_the_logits_of_the_last_token_only() -> None:
    run_passes(decoder(tie_embeddings=True), "default, pad-vocab{multiple=16}", verify=True)


def test_heads_that_cannot_be_padded() -> None:
    with pytest.raises(WeftError, match="has no output logits computed by a linear"):
        applied("pad-vocab", ZOO["family/bert"]())
    with pytest.raises(WeftError, match="multiple=0 must be from 1 to 65536"):
        applied("pad-vocab{multiple=0}", decoder())
    g = decoder()
    other = next(n for n in g.nodes if n.output.name == "final_norm").output
    g.add_output("other", ops.linear(other, g.params["lm_head.weight"], name="other"))
    trace = Trace()
    assert str(applied("pad-vocab", g, trace)) == str(g)
    assert trace.refusals[0].reason == "%lm_head.weight is also read by linear (%other)"


# -- fold-token-types


@pytest.mark.parametrize("name", ["family/bert", "packed/family bert", "family/albert", "preset/bert-base"])
def test_texts_of_one_segment_need_no_types(name: str) -> None:
    before = ZOO[name]()
    after = run_passes(before, "fold-token-types", verify=True)
    assert "token_type_ids" not in after.inputs and not any("token_types" in n for n in after.params)
    assert count(after, "embedding") == count(before, "embedding") - 1
    changed = [n for n in after.params if after.params[n].recipe != before.params[n].recipe]
    assert changed == ["positions.weight"] and compute_cost(after).flops < compute_cost(before).flops
    inputs = EquivalenceCheck().make_inputs(before)
    inputs["token_type_ids"] = np.ones_like(inputs["token_type_ids"])
    plain = {n: x for n, x in inputs.items() if n != "token_type_ids"}
    a, b = EquivalenceCheck().run(before, inputs), EquivalenceCheck().run(after, plain)
    assert measure_difference(a["last_hidden_state"], b["last_hidden_state"]) > 0.01  # the condition is one


def test_without_positions_the_table_of_tokens_takes_the_row() -> None:
    encoder = Encoder(37, 16, 1, Block(ATTENTION, MLP(9), LayerNorm(), "post"), token_types=2)
    after = run_passes(encoder.graph(), "fold-token-types", verify=True)
    assert after.params["embed.weight"].recipe.name == "add"
    scaled = replace(encoder, embed_scale=2.0).graph()
    with pytest.raises(WeftError, match="reads token_type_ids, not only an embedding"):
        applied("fold-token-types", scaled)
    run_passes(scaled, "fold-scale, fold-token-types", verify=True)
    with pytest.raises(WeftError, match="has no input token_type_ids"):
        applied("fold-token-types", after)


# -- precompute-first-layer


@pytest.mark.parametrize(
    "name",
    [
        "family/llama-gqa-tied",
        "packed/family llama-mha-biases",
        "family/gemma2",
        "family/olmo2-gqa",
        "family/bloom",
        "family/deepseek-v3",
        "packed/variant latent queries",
        "cached/family mistral-gqa",
    ],
)
def test_first_projections_are_looked_up(name: str) -> None:
    before = ZOO[name]()
    after = applied("precompute-first-layer", before)
    assert worst(before, after) <= EXACT
    assert count(after, "linear") < count(before, "linear") and count(after, "embedding") > count(before, "embedding")
    assert compute_cost(after).flops < compute_cost(before).flops and len(after) < len(before)
    assert not any(n.startswith("layers.0.attn.q.") for n in after.params)


def test_parallel_blocks_look_up_their_feed_forward_too() -> None:
    model = Decoder(37, 16, 2, replace(BLOCK, arrangement="parallel"))
    after = run_passes(model.graph(), "precompute-first-layer", verify=True)
    table = after.params["layers.0.attn.by_token.weight"]
    assert table.shape == (37, 16 + 8 + 8 + 9 + 9) and count(after, "linear") == 2 + 7 + 1
    inputs = EquivalenceCheck().make_inputs(after)  # and in a model as it is, from float32 weights
    a, b = (interpret(g, inputs)["logits"] for g in (model.graph(), after))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("settings", [{"positions": LearnedPositions(19)}, {}], ids=["learned", "none"])
def test_positions_that_are_added_are_in_the_way(settings: dict[str, LearnedPositions]) -> None:
    block = Block(Attention(4), MLP(9), LayerNorm())
    before, trace = Decoder(37, 16, 2, block, **settings).graph(), Trace()
    after = applied("precompute-first-layer", before, trace)
    assert (str(after) == str(before)) == bool(settings)
    if settings:
        assert "add (%positions_added) combines it with more than the token" in trace.refusals[0].reason
        wrong = applied("precompute-first-layer", Decoder(37, 16, 2, block).graph())
        assert (
            measure_difference(
                *(
                    EquivalenceCheck().run(
                        g,
                        EquivalenceCheck().make_inputs(before)
                        if g is before
                        else EquivalenceCheck().make_inputs(wrong),
                    )["logits"]
                    for g in (before, wrong)
                )
            )
            > 0.1
        )


def test_the_second_layer_depends_on_more_than_the_token() -> None:
    before = decoder()
    after = applied("precompute-first-layer", before)
    assert {n for n in before.params if n not in after.params} == {
        "layers.0.attn_norm.weight",
        *(f"layers.0.attn.{p}.{kind}" for p in "qkv" for kind in ("weight", "bias")),
    }
    assert str(applied("precompute-first-layer", after)) == str(after)


def test_norms_alone_are_not_worth_a_table() -> None:
    model = Decoder(37, 16, 1, Block(None, MLP(9, "relu")), embed_norm=RMSNorm())
    after = run_passes(model.graph(), "precompute-first-layer", verify=True)
    assert [n.op.name for n in after.nodes].count("embedding") == 2  # up of tokens, and the embedding with its norm
    assert count(after, "rms_norm") == 2
