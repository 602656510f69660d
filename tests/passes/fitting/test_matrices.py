"""Weight matrices: kinds, groups and shared scales."""

from __future__ import annotations

import numpy as np

from weft.ir.recipes.blocks import ToFloat4
from weft.passes import run_passes

from ..library.quantize.checkpoints import kinds, mixture, model


def test_kinds_of_matrices() -> None:
    tied = kinds(model(tied=True))
    assert tied["embed.weight"] == "head" and tied["layers.0.ffn.down.weight"] == "linear"
    apart = kinds(model())
    assert apart["embed.weight"] == "table" and apart["lm_head.weight"] == "head"
    experts = kinds(mixture())
    assert {experts[f"layers.0.ffn.experts.{name}"] for name in ("gate", "up", "down")} == {"experts"}
    assert sum(kind == "experts" for kind in experts.values()) == 6
    assert sum(kind == "it is the weight of a router" for kind in experts.values()) == 2


def test_matrices_that_multiply_the_same_value_share_the_scale_of_nvfp4() -> None:
    graph = model()
    quantized = run_passes(graph, "quantize{format=nvfp4}")
    stored = {name: param.recipe for name, param in quantized.params.items() if isinstance(param.recipe, ToFloat4)}
    for names in (["q", "k", "v"], ["o"]):
        keys = [f"layers.1.attn.{name}.weight" for name in names]
        largest = max(float(np.abs(graph.params[key].recipe.evaluate(graph.reader)).max()) for key in keys)
        assert {stored[key].tensor_scales for key in keys} == {(float(np.float32(largest) / np.float32(2688)),)}
    assert len({recipe.tensor_scales for recipe in stored.values()}) > 4
    experts = run_passes(mixture(), "quantize{format=nvfp4}").params
    gate, up, down = (experts[f"layers.1.ffn.experts.{name}"].recipe for name in ("gate", "up", "down"))
    assert isinstance(gate, ToFloat4) and isinstance(up, ToFloat4) and isinstance(down, ToFloat4)
    assert gate.tensor_scales == up.tensor_scales != down.tensor_scales
    assert len(set(gate.tensor_scales)) == 4  # one for each expert
