"""Linear maps and embeddings that keep their weights in quantized blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ir import Graph, TensorType, Value, dtypes, interpret, ops
from weft.ir.recipes import Normal
from weft.ir.types.sizes import sym
from weft.passes import run_passes

from ....lowered import build_module
from .op_cases import build_graph, write_class

B = sym("batch")


def quantized(bias: bool, layout: str) -> Graph:
    """Build a graph of one linear map of 64 to 32 features, with its weight in blocks."""

    def make(x: Value) -> Value:
        weight = x.graph.add_param("fc.weight", TensorType(dtypes.f32, (32, 64)), Normal((32, 64), 0.5, "w"))
        if not bias:
            return ops.linear(x, weight)
        return ops.linear(x, weight, x.graph.add_param("fc.bias", TensorType(dtypes.f32, (32,)), Normal((32,), 1, "b")))

    return run_passes(build_graph(make, (B, 64)), f"quantize{{{layout}, method=rtn}}")


@pytest.mark.parametrize(
    ("layout", "bias", "module"),
    [
        ("bits=4, group=32", False, "QuantizedLinear(64, 32, bits=4, group=32, offsets=True)"),
        ("bits=4, group=32", True, "QuantizedLinear(64, 32, bits=4, group=32, offsets=True, bias=True)"),
        ("bits=8, group=64", False, "QuantizedLinear(64, 32, bits=8, group=64)"),
    ],
)
def test_a_linear_map_in_blocks_is_a_quantized_linear(layout: str, bias: bool, module: str) -> None:
    text = write_class(quantized(bias, layout))
    assert f"self.fc = {module}\n" in text
    assert text.endswith("return self.fc(x)")


def test_a_bias_of_another_module_is_added() -> None:
    graph = build_graph(lambda x, w, b: ops.linear(x, w, b), (B, 64), w=(32, 64), b=(32,))
    text = write_class(run_passes(graph, "quantize{bits=8, group=32, method=rtn}"))
    assert text.endswith("return self.w(x) + self.b.weight")


def test_quantized_linear_computes_the_dequantized_weight() -> None:
    graph = quantized(True, "bits=4, group=32")
    x = np.random.default_rng(0).standard_normal((65, 64))  # too many rows for the kernels that multiply in bf16
    (wanted,) = interpret(graph, {"x": x}).values()
    with torch.inference_mode():
        y = build_module(graph)(torch.from_numpy(x).float()).numpy()
    np.testing.assert_allclose(y, wanted, atol=1e-5 * np.abs(wanted).max())
