"""Adapters merged into the graph of a model folder, whose head may be tied to the embedding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends.formats.weft.graph_adapters import merge_adapters
from weft.ir import Graph, MemoryReader, TensorType, WeftError, ops
from weft.ir.recipes import Source
from weft.ir.types import dtypes

RNG = np.random.default_rng(0)
EMBED = RNG.standard_normal((5, 4)).astype(np.float32)
A, B = RNG.standard_normal((2, 4)).astype(np.float32), RNG.standard_normal((5, 2)).astype(np.float32)
KEY = "model.embed_tokens.weight"


def tied(transform: bool = False) -> Graph:
    """Return a graph whose embedding is also its head; with `transform`, another op reads it too."""
    graph = Graph("tied", MemoryReader({KEY: EMBED}))
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (1, 3)))
    table = graph.add_param("embed", TensorType(dtypes.f32, (5, 4)), Source(KEY))
    x = ops.embedding(ids, table)
    if transform:
        graph.add_output("scaled", ops.mul(table, table))
    graph.add_output("logits", ops.linear(x, table))
    return graph


def adapter(folder: Path, module: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    at = f"base_model.model.{module}"
    save_file({f"{at}.lora_A.weight": A, f"{at}.lora_B.weight": B}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_of_the_head_unties_it(tmp_path: Path) -> None:
    graph = tied()
    merged = merge_adapters(graph, "model", [adapter(tmp_path / "a", "lm_head")])
    assert [adapter.path.name for adapter in merged] == ["a"]
    values = {name: param.recipe.evaluate(graph.reader) for name, param in graph.params.items()}
    np.testing.assert_array_equal(values["embed"], EMBED)
    np.testing.assert_allclose(values["lm_head.weight"], EMBED + 2 * B @ A, rtol=1e-5)


def test_other_readers_of_a_tied_embedding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WeftError, match="model: an adapter changes the embedding, which other ops than the head read too"
    ):
        merge_adapters(tied(transform=True), "model", [adapter(tmp_path / "a", "lm_head")])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"changes a weight that model does not read; is it for this model"):
        merge_adapters(tied(), "model", [adapter(tmp_path / "a", "model.layers.0.mlp")])
