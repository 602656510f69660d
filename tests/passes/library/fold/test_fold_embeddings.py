"""fold-embedding-norm and fold-token-types: tables take in norms and token types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, Encoder, LayerNorm
from weft.ir import Param, WeftError, ops
from weft.ir.recipes.matrices import RowNorm
from weft.passes import Trace, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.edits.edit import replace_uses

from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..decoders import ATTENTION
from ..norms import reasons


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", ["family/bloom", "variant/embedding norm"])
def test_the_norm_of_an_embedding_goes_into_the_table(name: str) -> None:
    before = ZOO[name]()
    after = applied("fold-embedding-norm{untie=true}", before)
    kinds = ("rms_norm", "layer_norm")
    assert sum(count(after, k) for k in kinds) == sum(count(before, k) for k in kinds) - 1
    table = next(n for n in after.nodes if n.op is ops.embedding).inputs[1]
    assert isinstance(table, Param) and isinstance(table.recipe, RowNorm)
    assert worst(before, after) <= EXACT


def test_bloom_becomes_rms_once_its_embedding_norm_is_folded() -> None:
    before = ZOO["family/bloom"]()
    after = applied("fold-embedding-norm{untie=true}, layernorm-to-rmsnorm", before)
    assert count(after, "layer_norm") == 0 and worst(before, after) <= EXACT


def test_embedding_norms_that_stay() -> None:
    for name, reason in {
        "family/bloom": "%embed.weight is shared with linear (%lm_head); untie=true copies it",
        "family/bert": "%positions_added is not a looked-up row: add is between",
        "family/llama-gqa-tied": "%embed is also read by add (%layers.0.attn_residual)",
    }.items():
        trace = Trace()
        assert applied("fold-embedding-norm", ZOO[name](), trace) == ZOO[name]()
        assert reasons(trace) == [reason]


def test_norm_of_tokens_plus_positions_does_not_fold() -> None:
    """norm(E[i] + P[j]) is not norm(E)[i] + norm(P)[j]."""
    graph = ZOO["family/bert"]()
    wrong = graph.clone()
    norm = next(n for n in wrong.nodes if n.output.name == "embed_norm")
    for node in [n for n in wrong.nodes if n.op is ops.embedding]:
        table, gain, bias = node.inputs[1], *norm.inputs[1:]
        assert isinstance(table, Param) and isinstance(gain, Param) and isinstance(bias, Param)
        table.recipe = RowNorm(table.recipe, "layer", norm.attrs["eps"], gain.recipe, bias.recipe)
    assert norm.inputs[0] is not None
    replace_uses(norm.output, norm.inputs[0], rename=False)
    assert worst(graph, wrong) > 1e-2


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
    with pytest.raises(WeftError, match=r"token_type_ids is read by .*, but only an embedding"):
        applied("fold-token-types", scaled)
    run_passes(scaled, "fold-scale, fold-token-types", verify=True)
    with pytest.raises(WeftError, match="has no input token_type_ids"):
        applied("fold-token-types", after)
