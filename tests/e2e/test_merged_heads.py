"""Merged heads against transformers: pooled weights are those of a model whose config has fewer KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.ir import interpret
from weft.passes import run_passes

from .families import COMMON, LENGTH, MHA, UNTIED, VOCAB, Row, error, reference

TOLERANCE = 1e-4


@pytest.mark.parametrize("packing", ["", "pack-qkv, "])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(
    ("name", "config"),
    [("LlamaForCausalLM", {"attention_bias": True}), ("Qwen2ForCausalLM", {}), ("Qwen3ForCausalLM", {"head_dim": 16})],
)
def test_mean_pooled_heads_equal_a_config_with_fewer_heads(
    tmp_path: Path, name: str, config: dict[str, Any], kv_heads: int, packing: str
) -> None:
    many = Row(name, COMMON | MHA | UNTIED | config)
    model = many.save(tmp_path / "many")
    few = Row(name, many.config | {"num_key_value_heads": kv_heads}).save(tmp_path / "few")

    def pooled(weight: torch.Tensor) -> torch.Tensor:
        return weight.reshape(kv_heads, 4 // kv_heads, -1, *weight.shape[1:]).mean(1).flatten(0, 1)

    weights = model.state_dict()
    few.load_state_dict({k: pooled(w) if "k_proj" in k or "v_proj" in k else w for k, w in weights.items()})
    graph = run_passes(weft.load_source(tmp_path / "many").graph, f"{packing}mha-to-gqa{{kv_heads={kv_heads}}}")
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, LENGTH))
    at = np.broadcast_to(np.arange(LENGTH), ids.shape)
    got = interpret(graph, {"input_ids": ids, "position_ids": at})["logits"]
    assert error(got, reference(few, ids)) < TOLERANCE
    assert error(got, reference(model, ids)) > 100 * TOLERANCE
