"""Costs of parts: their sums equal those of `weft inspect`, and the published parameter counts."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest

from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.model.part_costs import convert_costs, convert_polynomial, sum_costs
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.models.presets import PRESETS
from weft.ir.types import sizes

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
