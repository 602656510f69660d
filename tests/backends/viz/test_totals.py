"""Totals of two models: the numbers of `weft inspect --json` before and after passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from weft import run_passes
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.totals import Totals, compute_totals
from weft.backends.viz.web.diff import build_sheet, convert_totals
from weft.frontends.app.api.inspect.counting import choose_tokens, inspect
from weft.frontends.model import Model
from weft.ir import Graph, parse
from weft.ir.recipes.blocks import InBytes, Quantize, ToFloat4
from weft.passes import all_passes
from weft.passes.analysis import costs
from weft.passes.analysis.costs import count_parameters, count_state_bytes, find_cache_sizes

from ...sampling import each
from .pages import model_of

PIPELINES = {
    "smollm2-135m": "mha-to-gqa{kv_heads=1}, fuse-norm-linear, kv-cache",
    "gpt2": "default",
    "mistral-7b": "default",
    "mamba-130m": "cast{dtype=f16}, dce",
    "switch-base-8": "pack-qkv",
    "deepseek-v3": "prune-layers{layers=[0, 30]}",
}


def after(preset: str) -> tuple[Model, Model]:
    model = model_of(preset)
    return model, replace(model, graph=run_passes(model.graph, PIPELINES[preset]))


def stored(model: Model) -> int:
    """Bytes of all parameters, one by one."""
    return sum(int(p.type.elements) * p.type.dtype.bits // 8 for p in model.graph.params.values())


@pytest.mark.parametrize("preset", each(2, PIPELINES, 1))
def test_totals_are_what_inspect_tells(preset: str) -> None:
    for model in after(preset):
        tokens = choose_tokens(model.graph)
        found, told = compute_totals(build_network(model.graph), tokens), inspect(model).json()
        assert told["tokens"] == tokens == found.tokens
        assert (found.parameters, found.flops) == (told["parameters"], told["flops_prefill"])
        assert found.operations == len(model.graph) and found.weights == stored(model)
        if told["kind"] == "decoder":
            assert found.cache == (told["cache_per_token_bytes"] or {"f16": 0})["f16"]
            assert found.state == told["state_bytes"]["f16"]


@pytest.mark.parametrize("name", [name for name, kind in all_passes().items() if kind.documentation().graph])
def test_totals_before_and_after_every_pass(name: str) -> None:
    told = all_passes()[name].documentation()
    before = parse(told.graph)
    for graph in (before, run_passes(before, told.pipeline)):
        found, cost = compute_totals(build_network(graph), 8), costs.compute_cost(graph, batch=1, seq=8, past=0)
        assert found.operations == len(graph) and found.parameters == count_parameters(graph)
        assert found.weights == costs.count_weight_bytes(graph) - _saved(graph) and found.flops == cost.flops
        assert found.cache == 2 * sum(width for width, _ in find_cache_sizes(graph.nodes))
        assert found.state == count_state_bytes(graph.nodes, 2)


def test_the_sheet_tells_what_was_and_is() -> None:
    model, smaller = after("smollm2-135m")
    networks = build_network(model.graph), build_network(smaller.graph)
    found = compare_networks(*networks)
    before, then = (compute_totals(n, 512) for n in networks)
    rows = dict(build_sheet(found, before, then).rows)
    was, now = len(model.graph), len(smaller.graph)
    assert rows["Operations"] == f"{was}, then {now} (−{was - now})"
    assert rows["KV cache per token"] == "22.5 KiB, then 7.5 KiB (−15.0 KiB)"
    assert "State per text" not in rows
    assert convert_totals(found, before, then)["operations"] == [was, now]
    counts = convert_totals(found, before, then)["counts"]
    assert counts["kept"] + counts["changed"] + counts["removed"] == was
    assert counts["kept"] + counts["changed"] + counts["new"] == now


def test_weights_are_told_with_their_dtype() -> None:
    model = model_of("smollm2-135m")
    networks = build_network(model.graph), build_network(run_passes(model.graph, "cast{dtype=f16}"))
    before, then = (compute_totals(n, 512) for n in networks)
    assert (before.dtypes, then.dtypes) == (("f32",), ("f16",)) and before.weights == 4 * before.open
    rows = dict(build_sheet(compare_networks(*networks), before, then).rows)
    assert rows["Weights"] == "513.1 MiB in f32, then 256.6 MiB in f16 (−256.6 MiB)"
    (wide, packed), (left, rest) = convert_totals(compare_networks(*networks), before, then)["weights"]
    assert (4 * wide, packed) == (before.weights, 0)
    assert left < 100 and rest == then.weights - 4 * left  # frequencies of rotary positions stay f32


def test_numbers_that_stay_are_told_once() -> None:
    same = Totals(3, 12, 99, 8, 0, 48, 512, 12, ("f32",))
    one = build_network(model_of("smollm2-135m").graph)
    rows = dict(build_sheet(compare_networks(one, one), same, same).rows)
    assert rows == {
        "Operations": "3",
        "Parameters": "12",
        "FLOPs, 512 tokens": "99",
        "KV cache per token": "8 B",
        "Weights": "48 B in f32",
    }


def _saved(graph: Graph) -> int:
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
