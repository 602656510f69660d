"""Lowerings of linear layers, norms, activations and RoPE: operators that are used, and values by formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.backends.onnx.lowering import list_refusals
from weft.backends.onnx.lowerings.layers import find_swish_slope
from weft.backends.target import TARGETS
from weft.ir import ops

from ..lowered import Builder, op_types, run

BOTH = ("onnx", "ort-cpu")
Array = NDArray[Any]


def rms(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed


def sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


@pytest.mark.parametrize(("target", "operators"), [("onnx", ["MatMul", "Add"]), ("ort-cpu", ["FusedMatMul", "Add"])])
def test_linear_is_a_product_with_the_transposed_weight(
    target: str, operators: list[str], rng: np.random.Generator
) -> None:
    build, x, w, b = Builder(), *(rng.standard_normal(shape) for shape in ((2, 3, 4), (5, 4), (5,)))
    built = build.build(target, y=ops.linear(build.input("x", x), build.weight("w", w), build.weight("b", b)))
    assert op_types(built) == operators
    np.testing.assert_allclose(run(built, build.feeds)["y"], x @ w.T + b, rtol=1e-5, atol=1e-6)


def test_shared_weight_is_transposed_once_and_stored_once(rng: np.random.Generator) -> None:
    build, x, w = Builder(), rng.standard_normal((2, 4)), rng.standard_normal((4, 4))
    weight = build.weight("w", w)
    first = ops.linear(build.input("x", x), weight)
    built = build.build("onnx", y=ops.linear(first, weight))
    assert op_types(built) == ["Transpose", "MatMul", "MatMul"] and [w.value.name for w in built.weights] == ["w"]
    np.testing.assert_allclose(run(built, build.feeds)["y"], x @ w.T @ w.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", BOTH)
def test_norms_without_weights_have_constants(target: str, rng: np.random.Generator) -> None:
    build, x, weight = Builder(), rng.standard_normal((2, 3, 8)), rng.standard_normal(8)
    value, scale = build.input("x", x), build.weight("w", weight)
    built = build.build(
        target,
        plain=ops.rms_norm(value, eps=1e-3),
        scaled=ops.rms_norm(value, scale, eps=1e-6),
        layer=ops.layer_norm(value, eps=1e-6),
    )
    operator = "RMSNormalization" if target == "onnx" else "SimplifiedLayerNormalization"
    assert op_types(built) == [operator, operator, "LayerNormalization"]
    found = run(built, build.feeds)
    np.testing.assert_allclose(found["plain"], rms(x, eps=1e-3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["scaled"], rms(x, weight), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["layer"], rms(x - x.mean(-1, keepdims=True)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", BOTH)
def test_norm_is_emitted_once_for_all_its_linears(target: str, rng: np.random.Generator) -> None:
    build, x, w, v, n = Builder(), *(rng.standard_normal(shape) for shape in ((2, 4), (3, 4), (5, 4), (4,)))
    value, norm = build.input("x", x), build.weight("n", n)
    first = ops.norm_linear(value, build.weight("w", w), norm_weight=norm, kind="rms", eps=1e-6)
    second = ops.norm_linear(value, build.weight("v", v), norm_weight=norm, kind="rms", eps=1e-6)
    built = build.build(target, first=first, second=second)
    assert len(op_types(built)) == 3
    found = run(built, build.feeds)
    np.testing.assert_allclose(found["first"], rms(x, n) @ w.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["second"], rms(x, n) @ v.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("reads_sum", [False, True])
def test_added_norm_returns_the_sum_only_if_it_is_read(kind: str, reads_sum: bool, rng: np.random.Generator) -> None:
    build, x, y, w = Builder(), *(rng.standard_normal(shape) for shape in ((2, 3, 8), (2, 3, 8), (8,)))
    normed, total = ops.add_norm(build.input("x", x), build.input("y", y), build.weight("w", w), kind=kind, eps=1e-5)
    built = build.build("ort-cpu", normed=normed, **({"total": total} if reads_sum else {}))
    (node,) = built.model.graph
    assert node.op_type == ("SkipLayerNormalization" if kind == "layer" else "SkipSimplifiedLayerNormalization")
    assert len(node.outputs) == (4 if reads_sum else 1)
    found, both = run(built, build.feeds), x + y
    centred = both - both.mean(-1, keepdims=True) if kind == "layer" else both
    np.testing.assert_allclose(found["normed"], rms(centred, w, 1e-5), rtol=1e-4, atol=1e-5)
    if reads_sum:
        np.testing.assert_allclose(found["total"], both, rtol=1e-6)


ACTIVATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Array], Array]]] = {
    "silu": (ops.swish, {"beta": 1.0}, lambda x: x * sigmoid(x)),
    "swish": (ops.swish, {"beta": 2.5}, lambda x: x * sigmoid(2.5 * x)),
    "gelu by tanh": (
        ops.gelu,
        {"approximate": "tanh"},
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
}


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_follow_their_formulas(name: str, target: str) -> None:
    op, attrs, formula = ACTIVATIONS[name]
    build, x = Builder(), np.linspace(-6, 6, 25)
    built = build.build(target, y=op(build.input("x", x), **attrs))
    np.testing.assert_allclose(run(built, build.feeds)["y"], formula(x), rtol=1e-4, atol=1e-5)


def test_gelu_by_a_sigmoid_needs_operators_of_onnx_runtime() -> None:
    build, x = Builder(), np.linspace(-6, 6, 25)
    y = ops.gelu(build.input("x", x), approximate="sigmoid")
    assert list_refusals(next(iter(build.graph.nodes)), TARGETS["onnx"]) == ["Gelu: ONNX has no gelu by a sigmoid"]
    built = build.build("ort-cpu", y=y)
    assert op_types(built) == ["QuickGelu"]
    np.testing.assert_allclose(run(built, build.feeds)["y"], x * sigmoid(1.702 * x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attrs", "target", "reason"),
    [
        ({"activation": "silu"}, "onnx", None),
        ({"activation": "relu2"}, "ort-cpu", "no ONNX operator for relu2"),
        ({"activation": "gelu_quick"}, "onnx", "no ONNX operator for gelu_quick"),
        ({"activation": "gelu_quick"}, "ort-cpu", None),
        ({"limit": 7.0}, "ort-cpu", "it has a limit, which ONNX has no operator for"),
    ],
)
def test_gated_units_that_onnx_lacks_are_refused(attrs: dict[str, Any], target: str, reason: str | None) -> None:
    build = Builder()
    ops.glu(*(build.input(name, np.ones((2, 4))) for name in ("gate", "up")), **attrs)
    wanted = None if reason is None else [f"GatedUnit: {reason}"]
    assert list_refusals(next(iter(build.graph.nodes)), TARGETS[target]) == wanted


@pytest.mark.parametrize(
    ("name", "slope"), [("silu", 1.0), ("gelu_quick", 1.702), ("swish(0.5)", 0.5), ("gelu", None), ("identity", None)]
)
def test_swish_slope_is_parsed(name: str, slope: float | None) -> None:
    assert find_swish_slope(name) == slope


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [2, 4])
def test_rope_rotates_pairs_of_a_head(interleaved: bool, pairs: int, rng: np.random.Generator) -> None:
    """With two pairs, half of each head of 8 elements passes through."""
    build, x, positions = Builder(), rng.standard_normal((2, 3, 16)), np.array([[0, 1, 2], [5, 6, 30]])
    frequencies = 0.3 ** np.arange(pairs)
    at, weight = build.input("at", positions), build.weight("f", frequencies)
    built = build.build(y=ops.rope(build.input("x", x), at, weight, heads=2, interleaved=interleaved))
    (node,) = built.model.graph
    assert node.attributes["rotary_embedding_dim"].value == (0 if pairs == 4 else 4)
    by_head, angles = x.reshape(2, 3, 2, 8), (positions[..., None] * frequencies)[:, :, None]
    index = np.arange(2 * pairs).reshape((pairs, 2) if interleaved else (2, pairs))
    first, second = index.T if interleaved else index
    expected = by_head.copy()
    expected[..., first] = by_head[..., first] * np.cos(angles) - by_head[..., second] * np.sin(angles)
    expected[..., second] = by_head[..., second] * np.cos(angles) + by_head[..., first] * np.sin(angles)
    np.testing.assert_allclose(run(built, build.feeds)["y"], expected.reshape(x.shape), rtol=1e-4, atol=1e-5)


def test_rope_by_computed_frequencies_is_refused() -> None:
    build = Builder()
    at = build.input("at", np.zeros((1, 2), np.int64))
    ops.rope(build.input("x", np.ones((1, 2, 4))), at, build.input("f", np.ones(2)), heads=1)
    reasons = list_refusals(next(iter(build.graph.nodes)), TARGETS["onnx"])
    assert reasons == ["RotaryEmbedding: the frequencies are computed at run time"]
