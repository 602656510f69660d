"""Zamba and Zamba2: hybrid layers alternate the shared blocks, and each layer adds its own adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft

from .....e2e.families import ROWS
from ..tables import counting, names, read, refusal, weight

ZAMBA: dict[str, Any] = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4}


def test_zamba2_layers_alternate_shared_blocks_and_add_adapters(tmp_path: Path) -> None:
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


def test_only_hybrid_layers_have_attention() -> None:
    blocks = read("zamba2", **ZAMBA, n_mamba_heads=2, mamba_d_state=8).block
    assert [block.attn is not None for block in blocks] == [False, True, False, True]
    assert blocks[1].attn.scale == (16 / 2) ** -0.5  # heads of twice the width, scaled as if they were not
    assert blocks[1].ffn.hidden == 48


def test_zamba_defaults_repeat_hybrid_layers_by_a_period() -> None:
    blocks = read("zamba", num_hidden_layers=15, num_key_value_heads=4).block
    hybrid = [i for i, block in enumerate(blocks) if block.attn is not None]
    assert hybrid == [2, 7, 13]  # the third, then those at 4 of every 6 after the first three


def test_zamba_alternates_rows_of_input_and_gate() -> None:
    stored = counting(2 * 64, 32)
    found = weight("zamba", "layers.0.mamba.in.weight", {"model.layers.0.mamba.in_proj.weight": stored}, **ZAMBA)
    np.testing.assert_array_equal(found, np.concatenate([stored[::2], stored[1::2]]))


def test_state_spaces_of_hybrid_layers_are_nested() -> None:
    for layer, at in ((0, "mamba"), (1, "mamba_decoder.mamba")):
        assert names("zamba", f"layers.{layer}.mamba.out.weight", **ZAMBA) == [
            f"model.layers.{layer}.{at}.out_proj.weight"
        ]


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("zamba2", {"hybrid_layer_ids": [3, 1]}, "hybrid_layer_ids=[3, 1] must be the layers of type hybrid"),
        ("zamba", {"n_mamba_heads": 9}, "n_mamba_heads=9 exceeds the limit 8"),
        ("zamba", {"attention_hidden_size": 32}, "attention_hidden_size=32 must be 2 · hidden_size = "),
    ],
)
def test_refusals(family: str, config: dict[str, Any], message: str) -> None:
    assert message in refusal(family, **ZAMBA, **config)
