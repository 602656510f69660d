"""Layouts within a budget of bits: the best of all plans, by what is measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import weft
from weft.ir import Graph, MemoryReader, WeftError
from weft.ir.recipes.blocks import find_block_layout
from weft.ir.types.block_layouts import BlockLayout, build_integer_layout
from weft.passes import Report, run_passes
from weft.passes.fitting.budget import LayoutChoice, choose_layouts, solve_knapsack
from weft.passes.fitting.calibration import read_tokens
from weft.passes.fitting.matrices import Matrix, find_matrices, group_matrices

from ..library.quantize.checkpoints import VOCAB, in_memory, mixture
from ..library.quantize.test_quantize import error, text

__all__ = ["text"]  # a fixture
LAYOUTS = [build_integer_layout(bits, group, bits < 8) for bits in (2, 4, 8) for group in (32, 64)]
LINEAR = ("linear", "experts")


def model() -> Graph:
    """A small decoder with rows of whole groups."""
    block = weft.Block(weft.Attention(4, kv_heads=2, rope=weft.RoPE()), weft.GatedMLP(128), weft.RMSNorm())
    graph = in_memory(weft.Decoder(VOCAB, 64, 2, block, context=64).graph())
    assert isinstance(graph.reader, MemoryReader)
    # A layer that hardly writes to the stream: its weights may be anything.
    for name in ("layers.0.attn.o.weight", "layers.0.ffn.down.weight"):
        graph.reader.arrays[name] *= np.float32(1e-4)
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_the_same_bits_costs_much_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(5):
        size, weight = rng.integers(1, 9), rng.exponential()
        bits = [2, 4, 8]
        tables.append([LayoutChoice(LAYOUTS[0], b * size, weight * 4.0**-b * rng.uniform(0.5, 2)) for b in bits])
    capacity = float(rng.uniform(1.01, 2.5)) * sum(table[0].bits for table in tables)
    chosen = solve_knapsack(tables, capacity)
    assert sum(c.bits for c in chosen) <= capacity
    feasible = [plan for plan in itertools.product(*tables) if sum(c.bits for c in plan) <= capacity]
    best = min(sum(c.cost for c in plan) for plan in feasible)
    # The relaxation may miss the best plan by what one matrix costs more for want of a few bits.
    assert sum(c.cost for c in chosen) <= best + max(table[0].cost for table in tables)


def test_sensitive_matrices_get_more_bits(text: object) -> None:
    graph = model()
    found = [m for m in find_matrices(graph).values() if isinstance(m, Matrix) and m.kind in LINEAR]
    plan = choose_layouts(graph, read_tokens(graph, str(text), 256), group_matrices(found), LAYOUTS, 4.5)
    total = sum(m.elements for m in found)
    # Rows are filled up to whole groups.
    groups = {m: -(-int(m.param.shape[-1]) // layout.group) for m, layout in plan.items()}
    rows = {m: m.elements // int(m.param.shape[-1]) for m in plan}
    spent = sum(rows[m] * groups[m] * layout.group * layout.bits_per_weight for m, layout in plan.items()) / total
    assert 4.0 < spent <= 4.5

    def bits(layer: str) -> float:
        mine = [m for m in plan if m.param.name.startswith(layer)]
        return sum(m.elements * plan[m].bits for m in mine) / sum(m.elements for m in mine)

    assert bits("layers.0.") < bits("layers.1.")
    q, k, v = (plan[next(m for m in plan if m.param.name == f"layers.1.attn.{n}.weight")] for n in "qkv")
    assert q == k == v


def test_a_budget_loses_less_than_one_layout_of_as_many_bits(text: object) -> None:
    graph = model()
    even = run_passes(graph, "quantize{bits=4, group=32, method=rtn}")
    report = Report()
    mixed = run_passes(graph, f"quantize{{budget=4.7, method=rtn, calibration={text}}}", report=report)
    assert error(graph, mixed) < error(graph, even)
    (record,) = report.records
    assert any(line.endswith("bits a weight on average") for line in record.trace.lines)


def test_experts_have_layouts_too(text: object) -> None:
    graph = run_passes(mixture(), f'quantize{{budget=3.5, choices="2,4", method=kquant, calibration={text}}}')
    layouts = [find_block_layout(p.recipe, graph.reader) for n, p in graph.params.items() if ".experts." in n]
    assert layouts and all(isinstance(layout, BlockLayout) and layout.bits in (2, 4) for layout in layouts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("budget=2", "budget=2 is below 2.25 bits, the least possible: raise budget="),
        ("budget=0", "budget=0 (bits per weight on average"),
        ('budget=4, choices="5"', "choices='5': each number must be one of 2, 3, 4, 8"),
        ('budget=4, choices=""', "choices=''"),
    ],
)
def test_impossible_budgets_are_refused(arguments: str, said: str, text: object) -> None:
    with pytest.raises(WeftError, match=said.replace("(", r"\(")):
        run_passes(model(), f"quantize{{{arguments}, calibration={text}}}")


def test_a_budget_needs_a_text() -> None:
    with pytest.raises(WeftError, match="needs a text to weigh errors, but the model has no"):
        run_passes(model(), "quantize{budget=4.5, method=rtn}")
