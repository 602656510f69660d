"""fold-token-types: the row of segment 0 goes into another table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, Encoder, LayerNorm
from weft.ir import WeftError
from weft.passes import run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

from ...models import applied, count
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..decoders import ATTENTION


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


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
