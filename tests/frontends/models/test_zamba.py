"""Blocks of Zamba2 take turns, and each layer adds its own adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import weft

from ...e2e.families import ROWS


def test_blocks_take_turns(tmp_path: Path) -> None:
    row = ROWS["zamba2-adapters"]
    more = {"num_mem_blocks": 2, "layers_block_type": ["linear_attention", *["hybrid"] * 3], "num_hidden_layers": 4}
    theirs = type(row)(row.model, row.config | more).save(tmp_path)
    model = weft.load_source(str(tmp_path))
    assert model.unread == []
    weights, found = theirs.state_dict(), model.graph.params
    for layer, block, turn in ((1, 1, 0), (2, 2, 1), (3, 1, 2)):
        at = f"model.layers.{block}.shared_transformer.self_attn"
        low, high = (weights[f"{at}.linear_k_adapter_list.{turn}.{i}.weight"].double() for i in (0, 1))
        want = weights[f"{at}.k_proj.weight"].double() + high @ low
        ours = found[f"layers.{layer}.attn.k.weight"].recipe.evaluate(model.graph.reader)
        np.testing.assert_allclose(ours, want.numpy(), atol=1e-6)
        assert set(found[f"layers.{layer}.attn.o.weight"].recipe.sources()) == {f"{at}.o_proj.weight"}
