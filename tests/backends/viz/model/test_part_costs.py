"""Costs of parts: their sums equal those of `weft inspect`, and the published parameter counts."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import replace
from typing import Any

import pytest

from weft import run_passes
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.model.part_costs import compute_totals, convert_costs, convert_polynomial, sum_costs
from weft.frontends.app.api.inspect.counting import choose_tokens, inspect
from weft.frontends.model import Model
from weft.frontends.models.presets import PRESETS
from weft.ir import Graph, parse
from weft.ir.recipes.blocks import InBytes, Quantize, ToFloat4
from weft.ir.types import sizes
from weft.passes import all_passes
from weft.passes.analysis import costs
from weft.passes.analysis.costs import count_parameters, count_state_bytes, find_cache_sizes

from ....sampling import each
from ..pages import model_of, network_of

PUBLISHED = {
    "gpt2": 124_439_808,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "mamba-130m": 129_135_360,
    "smollm2-135m": 134_515_008,
}


def outline_preset(preset: str) -> PicturePart:
    return build_outline(network_of(preset))


@pytest.mark.parametrize("preset", [*PUBLISHED, *each(6, (name for name in PRESETS if name not in PUBLISHED), 1)])
def test_costs_of_the_root_equal_weft_inspect(preset: str) -> None:
    told, found = inspect(model_of(preset), 64), sum_costs(outline_preset(preset))
    binding = {"batch": 1, "seq": 64, "past": 0, "total": 64, "source": 64}
    assert found.complete
    assert found.parameters == told.parameters == PUBLISHED.get(preset, told.parameters)
    assert sizes.evaluate(found.work.flops, binding) == told.flops_prefill
    if told.cache_per_token is not None and told.state_bytes is not None:
        assert sum(found.cache.values()) == told.cache_per_token
        numbers, rest = found.state
        assert {"f32": 4 * numbers + rest, "f16": 2 * numbers + rest} == told.state_bytes


@pytest.mark.parametrize("preset", ["smollm2-135m", "deepseek-v3", "t5-base"])
def test_costs_of_a_part_are_the_sum_of_its_children(preset: str) -> None:
    parts = [part for part in outline_preset(preset).parts() if part.children]
    for part in parts:
        whole, inner = sum_costs(part), [sum_costs(child) for child in part.children]
        assert whole.work.flops == functools.reduce(operator.add, (part.count * f.work.flops for f in inner))
        if part.count == 1:
            assert whole.parameters == sum(f.parameters for f in inner)
    assert any(part.count > 1 for part in parts)


def evaluate_polynomial(found: Any, binding: dict[str, int]) -> int:
    """A polynomial as plain data, as the page evaluates it."""
    if isinstance(found, int):
        return found
    total = 0
    for coefficient, *factors in found:
        for atom, power in factors:
            value = binding[atom] if isinstance(atom, str) else evaluate_call(atom, binding)
            coefficient *= value**power
        total += coefficient
    return total


def evaluate_call(atom: list[Any], binding: dict[str, int]) -> int:
    name, *args = atom
    values = [evaluate_polynomial(a, binding) for a in args]
    return {"min": min, "max": max, "floordiv": lambda a, b: a // b}[name](*values)


@pytest.mark.parametrize("preset", ["mistral-7b", "deepseek-v3", "switch-base-8"])
def test_converted_polynomials_evaluate_to_the_same_number(preset: str) -> None:
    found = sum_costs(outline_preset(preset))
    for seq in (1, 7, 5000):
        binding = {"batch": 2, "seq": seq, "past": 0, "total": seq, "source": 3}
        for work in (found.work, found.step):
            for size in (work.flops, work.read, work.written):
                assert evaluate_polynomial(convert_polynomial(size), binding) == sizes.evaluate(size, binding)
    assert convert_costs(found)["parameters"] == found.parameters


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
