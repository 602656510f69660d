"""Totals of networks equal those of `weft inspect --json`, before and after passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from weft import run_passes
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.totals import compute_totals
from weft.frontends.app.api.inspect.counting import choose_tokens, inspect
from weft.frontends.model import Model
from weft.ir import Graph, parse
from weft.ir.recipes.blocks import InBytes, Quantize, ToFloat4
from weft.passes import all_passes
from weft.passes.analysis import costs
from weft.passes.analysis.costs import count_parameters, count_state_bytes, find_cache_sizes

from ....sampling import each
from ..pages import model_of

PIPELINES = {
    "smollm2-135m": "mha-to-gqa{kv_heads=1}, fuse-norm-linear, kv-cache",
    "gpt2": "default",
    "mistral-7b": "default",
    "mamba-130m": "cast{dtype=f16}, dce",
    "switch-base-8": "pack-qkv",
    "deepseek-v3": "prune-layers{layers=[0, 30]}",
}


def run_pipeline(preset: str) -> tuple[Model, Model]:
    model = model_of(preset)
    return model, replace(model, graph=run_passes(model.graph, PIPELINES[preset]))


def count_stored_bytes(model: Model) -> int:
    """Bytes of all parameters, one by one."""
    return sum(int(p.type.elements) * p.type.dtype.bits // 8 for p in model.graph.params.values())


@pytest.mark.parametrize("preset", each(2, PIPELINES, 1))
def test_totals_equal_weft_inspect(preset: str) -> None:
    for model in run_pipeline(preset):
        tokens = choose_tokens(model.graph)
        found, told = compute_totals(build_network(model.graph), tokens), inspect(model).json()
        assert told["tokens"] == tokens == found.tokens
        assert (found.parameters, found.flops) == (told["parameters"], told["flops_prefill"])
        assert found.operations == len(model.graph) and found.weights == count_stored_bytes(model)
        if told["kind"] == "decoder":
            assert found.cache == (told["cache_per_token_bytes"] or {"f16": 0})["f16"]
            assert found.state == told["state_bytes"]["f16"]


@pytest.mark.parametrize("name", [name for name, kind in all_passes().items() if kind.documentation().graph])
def test_totals_equal_graph_costs_before_and_after_every_pass(name: str) -> None:
    told = all_passes()[name].documentation()
    before = parse(told.graph)
    for graph in (before, run_passes(before, told.pipeline)):
        found, cost = compute_totals(build_network(graph), 8), costs.compute_cost(graph, batch=1, seq=8, past=0)
        assert found.operations == len(graph) and found.parameters == count_parameters(graph)
        assert found.weights == costs.count_weight_bytes(graph) - count_saved_bytes(graph) and found.flops == cost.flops
        assert found.cache == 2 * sum(width for width, _ in find_cache_sizes(graph.nodes))
        assert found.state == count_state_bytes(graph.nodes, 2)


def count_saved_bytes(graph: Graph) -> int:
    """The bytes that packed weights take less than their numbers: codes of whole groups, a scale and a zero point."""
    saved = 0
    for param in graph.params.values():
        recipe = param.recipe
        if isinstance(recipe, (InBytes, ToFloat4)):  # bytes of 32 codes, and of their scale
            size, scale = (32, 4) if isinstance(recipe, InBytes) else (16, 1)
            saved += math.prod(param.type.concrete({})) // 32 * (32 * 4 - size - scale)
        elif isinstance(recipe, Quantize):
            rows, width = param.type.concrete({})
            group = recipe.bits * recipe.group + 16 + recipe.bits * (recipe.zeros and recipe.bits != 8)
            saved += rows * width * 4 - rows * (width // recipe.group) * group // 8
    return saved
