"""Quantized experts in standard operators: the meaning of their numbers, and codes in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.backends.onnx import export
from weft.backends.onnx.lowerings import kept
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Quantize
from weft.ir.types import dtypes, sizes
from weft.passes import run_passes

from .test_block_matmul import LAYOUTS, relative
from .test_dequantized import by_onnxruntime, by_the_standard, written

# Experts, how many a token asks for: weights of those in use are gathered where they are few.
CHOICES = {"few of many": (16, 2), "most": (4, 2)}


def layer(
    bits: int, zeros: bool, group: int, choice: str, dim: int = 128, hidden: int = 128, gated: bool = True
) -> tuple[Graph, dict[str, np.ndarray]]:
    """Return a router and experts with biases over x [batch, seq, dim], and values of x."""
    experts, k = CHOICES[choice]
    rng = np.random.default_rng(bits)
    stacks = {"up": (experts, hidden, dim), "down": (experts, dim, hidden), "gate": (experts, hidden, dim)}
    others = {"router": (experts, dim), "up_bias": (experts, hidden), "down_bias": (experts, dim)}
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for name, shape in {**stacks, **others}.items()
    }
    graph = Graph("experts", MemoryReader(weights))
    x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), dim)))
    params = {
        name: graph.add_param(
            name,
            TensorType(dtypes.f32, shape),
            Quantize(Source(name), bits, group, zeros) if name in stacks else Source(name),
        )
        for name, shape in {**stacks, **others}.items()
        if gated or name != "gate"
    }
    combine = ops.route(ops.linear(x, params["router"]), k=k)
    given = (params.get(name) for name in ("up", "down", "gate", "up_bias", "down_bias"))
    graph.add_output("y", ops.moe(x, combine, *given, active=k))
    return graph, {"x": rng.standard_normal((2, 5, dim)).astype(np.float32)}


@pytest.mark.parametrize(("bits", "zeros", "group"), LAYOUTS)
@pytest.mark.parametrize("choice", CHOICES)
def test_dequantized_experts_equal_the_interpreter(
    bits: int, zeros: bool, group: int, choice: str, tmp_path: Path
) -> None:
    graph, feeds = layer(bits, zeros, group, choice)
    model, exact = written(graph, tmp_path), interpret(graph, feeds)["y"]
    assert relative(by_the_standard(model, feeds), exact) < 2e-5
    found, nodes = by_onnxruntime(model, feeds, "0")
    assert relative(found, exact) < 2e-5
    assert nodes.count("DequantizeLinear") == 3
    # Codes and scales of f16, of what would be 4 bytes each.
    numbers, width = 3 * CHOICES[choice][0] * 128 * 128, 1 if bits == 8 else 0.5
    size = (tmp_path / export.DATA).stat().st_size
    assert numbers * width < size < numbers * (width + (2 + zeros) / group) + 12 * export.PAGE
    assert kept.count_layouts(graph, TARGETS["onnx"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("choice", CHOICES)
def test_dequantized_experts_accept_rows_of_partial_groups(bits: int, choice: str, tmp_path: Path) -> None:
    """Without gates, too; neither would QMoE take such rows."""
    graph, feeds = layer(bits, True, 32, choice, dim=40, hidden=72, gated=False)
    model, exact = written(graph, tmp_path), interpret(graph, feeds)["y"]
    found, nodes = by_onnxruntime(model, feeds, "0")
    assert relative(by_the_standard(model, feeds), exact) < 2e-5
    assert relative(found, exact) < 2e-5
    assert nodes.count("DequantizeLinear") == 2


@pytest.mark.parametrize("choice", CHOICES)
def test_dequantized_experts_run_in_f16(choice: str, tmp_path: Path) -> None:
    graph, feeds = layer(4, True, 32, choice)
    graph = run_passes(graph, "cast{dtype=f16}")
    feeds = {name: x.astype(np.float16) for name, x in feeds.items()}
    exact = interpret(graph, feeds)["y"]
    found, nodes = by_onnxruntime(written(graph, tmp_path), feeds, "0")
    assert nodes.count("DequantizeLinear") == 3
    assert relative(found.astype(np.float64), exact) < 64 * float(dtypes.f16.eps)
