"""Linear maps, embeddings, norms and gated units in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weft.ir import Graph, TensorType, Value, dtypes, interpret, ops
from weft.ir.recipes import Normal
from weft.ir.types.sizes import sym
from weft.passes import run_passes

from ....lowered import build_module
from .op_cases import build_graph, check, examples, write_class, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("dense"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


@pytest.mark.parametrize(
    ("make", "width", "weight", "module", "call"),
    [
        (lambda x, w: ops.linear(x, w), 4, (3, 4), "nn.Linear(4, 3, bias=False)", "self.w(x)"),
        (lambda x, w: ops.rms_norm(x, w), 4, (4,), "nn.RMSNorm(4, eps=1e-06)", "self.w(x)"),
        (lambda x, w: ops.layer_norm(x, w), 4, (4,), "nn.LayerNorm(4, eps=1e-05, bias=False)", "self.w(x)"),
        (
            lambda x, w: ops.conv1d(x, w, padding=(1, 1)),
            *(4, (5, 4, 3), "nn.Conv1d(4, 5, 3, padding=1, bias=False)", "self.w(x.mT).mT"),
        ),
        (
            lambda x, w: ops.conv1d(x, w, padding=(2, 0)),  # nn.Conv1d pads both ends alike
            *(4, (5, 4, 3), "nn.Conv1d(4, 5, 3, bias=False)", "self.w(F.pad(x.mT, (2, 0))).mT"),
        ),
        (
            lambda x, w: ops.embedding(ops.cast(x, to=dtypes.i64), w),
            *(4, (9, 3), "nn.Embedding(9, 3)", "self.w(x.to(torch.int64))"),
        ),
    ],
)
def test_weights_belong_to_modules_of_torch(
    make: Callable[..., Value], width: int, weight: tuple[int, ...], module: str, call: str
) -> None:
    text = write_class(build_graph(make, (B, S, width), w=weight))
    assert f"self.w = {module}\n" in text
    assert text.endswith(f"return {call}")


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda x, y: ops.rms_norm(x), "F.rms_norm(x, (4,), None, 1e-06)"),
        (lambda x, y: ops.rms_norm(x, y), "F.rms_norm(x, (4,), y, 1e-06)"),
        (lambda x, y: ops.matmul(x, ops.unsqueeze(y, axes=(1,))), "x @ y[:, None]"),
        (lambda x, y: ops.glu(x, x, activation="relu"), "F.relu(x) * x"),
        (
            lambda x, y: ops.glu(x, x, activation="silu", limit=7.0, shift=1.0),
            "F.silu(x.clamp(max=7.0)) * (x.clamp(-7.0, 7.0) + 1.0)",
        ),
    ],
)
def test_ops_without_weights_call_functions(make: Callable[..., Value], source: str) -> None:
    assert write_forward(build_graph(make, (B, 4), (4,))) == f"return {source}"


def test_head_linear_names_the_number_of_heads() -> None:
    graph = build_graph(lambda x, w: ops.head_linear(x, w, heads=2), (B, S, 4), w=(6, 2))
    assert write_forward(graph) == "return head_linear(x, self.w.weight, 2)"
    graph = build_graph(lambda x, w: ops.head_linear(x, w, heads=2, inverse=True), (B, S, 6), w=(6, 2))
    assert write_forward(graph) == "return head_linear_inverse(x, self.w.weight, 2)"


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
