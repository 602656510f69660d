"""Weights that stay in quantized blocks: reasons to dequantize, the stored tensors, and their counts."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.program.block_params import (
    count_block_weights,
    count_parameters,
    describe_widened_weights,
    explain_no_blocks,
    find_layout,
    find_plain_vector,
    make_block_params,
)
from weft.ir import Graph, Param, TensorType, ops
from weft.ir.recipes import Normal
from weft.ir.recipes.blocks import Quantize
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout
from weft.ir.types.sizes import sym


def graph_with(name: str = "map.weight", width: int = 64, **options: Any) -> tuple[Graph, Param]:
    """Return a graph of one linear map from `width` to 6 values, and its 4-bit weight."""
    graph = Graph("blocks")
    x = graph.add_input("x", TensorType(dtypes.f32, (sym("batch"), width)))
    recipe = Quantize(Normal((6, width), 0.5, "w"), 4, options.get("group", 32), zeros=options.get("zeros", False))
    weight = graph.add_param(name, TensorType(dtypes.f32, (6, width)), recipe)
    graph.add_output("y", ops.linear(x, weight))
    return graph, weight


def test_linear_weight_in_its_module_stays_in_blocks() -> None:
    graph, weight = graph_with()
    layout = find_layout(weight)
    assert isinstance(layout, BlockLayout) and (layout.bits, layout.group) == (4, 32)
    assert describe_widened_weights(graph) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "w"}, "other ops than linear maps read it, or ops outside of its module"),
        ({"width": 40}, "its rows of 40 values end within a group of 32"),
    ],
)
def test_dequantized_weights_have_a_reason(options: dict[str, Any], reason: str) -> None:
    graph, weight = graph_with(**options)
    assert find_layout(weight) == reason
    assert describe_widened_weights(graph) == [f"{weight.name} is dequantized: {reason}"]
    assert explain_no_blocks(graph) == f"no weights keep their blocks: {weight.name} is dequantized: {reason}"


def test_weights_that_are_not_quantized_need_no_reason() -> None:
    graph = Graph("plain")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 64)))
    weight = graph.add_param("map.weight", TensorType(dtypes.f32, (6, 64)), Normal((6, 64), 0.5, "w"))
    graph.add_output("y", ops.linear(x, weight))
    assert find_layout(weight) == find_layout(None) == ""
    assert explain_no_blocks(graph) == "no weights keep their blocks: no linear map has blocks of a checkpoint"


@pytest.mark.parametrize("zeros", [False, True])
def test_stored_tensors_are_codes_scales_and_offsets(zeros: bool) -> None:
    _, weight = graph_with(zeros=zeros)
    layout = find_layout(weight)
    assert isinstance(layout, BlockLayout)
    params = make_block_params(weight, layout)
    shapes = {name: p.type.concrete({}) for name, p in params.items()}
    # 64 codes of 4 bits are padded to a chunk of 128, 16 words of 32 bits; groups of 32 values have one scale each.
    assert shapes == {"codes": (6, 16), "scales": (2, 6)} | ({"offsets": (2, 6)} if zeros else {})
    assert [p.name for p in params.values()] == [f"map.{name}" for name in params]
    assert params["codes"].type.dtype == dtypes.i32
    assert sum(map(count_parameters, params.values())) == 6 * 64  # codes alone count
    assert list(count_block_weights(params.values()).values()) == [1]


def test_parameters_are_counted_without_integer_tables() -> None:
    graph = Graph("counts")
    for name, dtype, count in (("w", dtypes.f32, 12), ("table", dtypes.i64, 0)):
        param = graph.add_param(name, TensorType(dtype, (3, 4)), Normal((3, 4), 0.5, name))
        assert count_parameters(param) == count


def test_plain_vector_is_the_one_with_the_shortest_path() -> None:
    graph, _ = graph_with()
    assert find_plain_vector(graph) is None
    y = graph.outputs["y"]
    for name in ("layers.0.norm.weight", "norm.weight"):
        y = ops.mul(y, graph.add_param(name, TensorType(dtypes.f32, (6,)), Normal((6,), 0.5, name)))
    vector = find_plain_vector(graph)
    assert vector is not None and vector.name == "norm.weight"
