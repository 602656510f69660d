"""Weights in quantized blocks: those of a pass, those that --keep-blocks marks, and plain ones."""

from __future__ import annotations

import pytest

from weft.backends.block_weights import (
    NOT_ASKED,
    count_packed_bytes,
    find_quantized_layout,
    find_stored_layout,
    is_exact,
    is_quantized,
    list_read_params,
    tally_layouts,
)
from weft.ir import Graph, Param, TensorType, ops
from weft.ir.recipes import Normal, Recipe
from weft.ir.recipes.blocks import Kept, Quantize
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout

SHAPE = (6, 40)
PLAIN = Normal(SHAPE, 0.5, "w")
CODES = Quantize(PLAIN, 4, 32, zeros=False)


@pytest.fixture
def graph() -> Graph:
    graph = Graph("weights")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 40)))
    recipes: dict[str, Recipe] = {"plain": PLAIN, "codes": CODES, "exact": Kept(CODES), "drawn": Kept(PLAIN)}
    for name, recipe in recipes.items():
        weight = graph.add_param(name, TensorType(dtypes.f32, SHAPE), recipe)
        graph.add_output(f"{name}.y", ops.linear(x, weight))
    graph.add_param("unread", TensorType(dtypes.f32, SHAPE), PLAIN)
    return graph


def layout_of(weight: Param) -> BlockLayout:
    layout = find_stored_layout(weight)
    assert isinstance(layout, BlockLayout)
    return layout


def test_only_weights_of_a_pass_are_quantized_and_round_activations(graph: Graph) -> None:
    facts = {name: (is_quantized(weight), is_exact(weight)) for name, weight in graph.params.items()}
    assert facts["codes"] == (True, False) and facts["exact"] == (True, True)
    assert facts["plain"] == facts["drawn"] == (False, True)


def test_stored_layout_is_found_for_marked_and_quantized_weights(graph: Graph) -> None:
    assert layout_of(graph.params["codes"]).group == layout_of(graph.params["exact"]).group == 32
    assert find_stored_layout(graph.params["plain"]) == NOT_ASKED
    assert find_stored_layout(None) == find_stored_layout(graph.inputs["x"]) == NOT_ASKED
    assert find_stored_layout(graph.params["drawn"]) == "it is not read from a file"


def test_quantized_layout_is_none_for_other_weights(graph: Graph) -> None:
    assert find_quantized_layout(graph.params["codes"]) == layout_of(graph.params["codes"])
    assert find_quantized_layout(graph.params["drawn"]) is find_quantized_layout(graph.inputs["x"]) is None
    assert find_quantized_layout(None) is None


def test_packed_bytes_pad_rows_to_full_groups(graph: Graph) -> None:
    weight = graph.params["codes"]
    # 6 rows of 40 elements have 2 groups of 32 codes of 4 bits, each with a scale of 16 bits.
    assert count_packed_bytes(weight, layout_of(weight)) == 6 * 2 * (32 * 4 + 16) // 8


def test_parameters_without_readers_are_left_out(graph: Graph) -> None:
    assert [weight.name for weight in list_read_params(graph)] == ["plain", "codes", "exact", "drawn"]


def test_layouts_are_counted_by_name(graph: Graph) -> None:
    four, eight = layout_of(graph.params["codes"]), Quantize(PLAIN, 8, 32).layout
    assert tally_layouts([four, eight, four]) == {str(four): 2, str(eight): 1}
    assert tally_layouts([]) == {}
