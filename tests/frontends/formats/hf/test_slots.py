"""Slots of switchable adapters: a second path per updated layer, padded to the highest rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends.formats.hf.slots import add_slots
from weft.ir import Graph, MemoryReader, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Source
from weft.ir.types import dtypes

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((3, 4)).astype(np.float32)


def layer() -> Graph:
    """Return a graph of one linear layer, whose weight has the name of a module in transformers."""
    graph = Graph("layer", MemoryReader({"model.proj.weight": WEIGHT}))
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 4)))
    weight = graph.add_param("w", TensorType(dtypes.f32, (3, 4)), Source("model.proj.weight"))
    graph.add_output("y", ops.linear(x, weight))
    return graph


def adapter(folder: Path, rank: int, width: int = 4, **config: object) -> tuple[np.ndarray, np.ndarray]:
    """Write an adapter of the layer; return its factors."""
    folder.mkdir()
    a, b = RNG.standard_normal((rank, width)).astype(np.float32), RNG.standard_normal((3, rank)).astype(np.float32)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 6, **config}))
    at = "base_model.model.model.proj"
    save_file({f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    return a, b


def test_chosen_factors_have_the_highest_rank_and_the_scale(tmp_path: Path) -> None:
    a, b = adapter(tmp_path / "one", 2)
    adapter(tmp_path / "two", 3)
    graph = layer()
    add_slots(graph, "model", [tmp_path / "one", tmp_path / "two"])
    slots = graph.reader.choices["one"]
    assert {key: array.shape for key, array in slots.items()} == {
        "model.proj.lora_A": (3, 4), "model.proj.lora_B": (3, 3),
    }  # fmt: skip
    np.testing.assert_allclose(slots["model.proj.lora_B"] @ slots["model.proj.lora_A"], 3.0 * b @ a, rtol=1e-5)
    np.testing.assert_array_equal(slots["model.proj.lora_A"][2], np.zeros(4))


def test_without_a_choice_the_layer_is_unchanged(tmp_path: Path) -> None:
    adapter(tmp_path / "one", 2)
    graph, x = layer(), RNG.standard_normal((2, 4)).astype(np.float32)
    add_slots(graph, "model", [tmp_path / "one"])
    np.testing.assert_allclose(interpret(graph, {"x": x})["y"], x @ WEIGHT.T, rtol=1e-5)
    assert sum(node.op is ops.linear for node in graph.nodes) == 3


def test_refusals_name_the_adapter(tmp_path: Path) -> None:
    adapter(tmp_path / "wide", 2, width=5)
    with pytest.raises(WeftError, match=r"the adapter .*wide: .* do not fit model.proj.weight \[3, 4\]"):
        add_slots(layer(), "model", [tmp_path / "wide"])
    (tmp_path / "b").mkdir()
    adapter(tmp_path / "b" / "wide", 2)
    with pytest.raises(WeftError, match="two adapter folders have the name wide: rename one of them"):
        add_slots(layer(), "model", [tmp_path / "wide", tmp_path / "b" / "wide"])
