"""Experts with quantized weights: QMoE means the dequantized numbers, whatever the router, without storing them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from weft.backends.onnx.export import build_model
from weft.backends.onnx.lowering import list_refusals, select_lowerings
from weft.backends.onnx.lowerings import kept
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, Param, TensorType, Value, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Quantize
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym
from weft.passes import Trace, legalize, run_passes
from weft.passes.library.target.stored_codes import KeepBlocks

from .test_block_matmul import on_onnxruntime, relative

EXPERTS, DIM, HIDDEN = 6, 64, 96


class Layer:
    """A router and quantized experts over x [batch, seq, dim]."""

    def __init__(
        self, bits: int = 4, zeros: bool = True, group: int = 32, dim: int = DIM, hidden: int = HIDDEN
    ) -> None:
        self.rng, self.scheme, self.dim, self.hidden = np.random.default_rng(bits), (bits, group, zeros), dim, hidden
        self.graph = Graph("layer", MemoryReader({}))
        self.x = self.graph.add_input("x", TensorType(dtypes.f32, (sym("batch"), sym("seq"), dim)))
        self.feeds = {"x": self.rng.standard_normal((2, 5, dim)).astype(np.float32)}

    def param(self, name: str, *shape: int, scheme: tuple[Any, ...] | None = None) -> Param:
        assert isinstance(self.graph.reader, MemoryReader)
        self.graph.reader.arrays[name] = self.rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        recipe = Source(name) if len(shape) < 3 else Quantize(Source(name), *(scheme or self.scheme))
        return self.graph.add_param(name, TensorType(dtypes.f32, shape), recipe)

    def logits(self) -> Value:
        return ops.linear(self.x, self.param("router", EXPERTS, self.dim))

    def moe(self, combine: Value, gated: bool = True, biased: bool = False, **attrs: Any) -> Graph:
        wide = (EXPERTS, self.hidden, self.dim)
        gate, up = (self.param("gate", *wide) if gated else None), self.param("up", *wide)
        down = self.param("down", EXPERTS, self.dim, self.hidden)
        biases = [None, None, None]
        if biased:
            sizes = {"up": self.hidden, "down": self.dim, "gate": self.hidden if gated else 0}
            biases = [self.param(f"{name}_bias", EXPERTS, n) if n else None for name, n in sizes.items()]
        self.graph.add_output("y", ops.moe(self.x, combine, up, down, gate, *biases, **attrs))
        return self.graph

    def plain(self, **attrs: Any) -> Graph:
        """Return a layer with a softmax router that chooses two experts."""
        return self.moe(ops.route(self.logits(), k=2), active=2, **attrs)


def kinds(graph: Graph, target: str = "ort-cpu") -> set[str]:
    return {lowering.name for lowering in select_lowerings(graph, TARGETS[target]).chosen.values()}


def check(layer: Layer, graph: Graph, name: str = "QMoE") -> None:
    """Compare with the float64 reference where activations are not rounded."""
    exact = interpret(graph, layer.feeds)["y"]
    KeepBlocks("quantized").run(graph, Trace())
    assert name in kinds(graph)
    assert relative(on_onnxruntime(graph, layer.feeds), exact) < 2e-5


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("bits", "zeros"), list(itertools.product((2, 3, 4), (True, False))))
def test_codes_in_f32(bits: int, zeros: bool, group: int) -> None:
    layer = Layer(bits, zeros, group)
    check(layer, layer.plain())


def test_wide_groups_in_f32() -> None:
    for group in (64, 128, 256):
        layer = Layer(4, True, group, dim=256, hidden=256)
        check(layer, layer.plain())


def test_8_bit_codes_are_dequantized_for_f32_arithmetic() -> None:
    layer = Layer(8, False)
    check(layer, graph := layer.plain(), "MoE")
    assert any("rounds activations" in line for line in select_lowerings(graph, TARGETS["ort-cpu"]).trace)
    assert not kept.list_kept_weights(graph, TARGETS["ort-cpu"])


def bound(layer: Layer, graph: Graph) -> Array:
    """Return the largest error of a token's outputs if activations of an expert are off by 1/254 of their largest."""
    arrays = {name: graph.params[name].recipe.evaluate(graph.reader).astype(np.float64) for name in graph.params}
    x = layer.feeds["x"].astype(np.float64)
    combine = next(node.output for node in graph.nodes if node.op is ops.route)
    probe = graph.clone()
    probe.add_output("combine", next(v for n in probe.nodes for v in n.outputs if v.name == combine.name))
    weights = interpret(probe, layer.feeds)["combine"]
    off = np.abs(x).max(-1, keepdims=True)[..., None] / 254
    gate, up = (np.einsum("bsd,ehd->bseh", x, arrays[name]) for name in ("gate", "up"))
    gates, ups = (off * np.abs(arrays[name]).sum(-1) for name in ("gate", "up"))
    silu = gate / (1 + np.exp(-gate))
    slope = 1.1  # the largest of silu
    hidden = slope * gates * np.abs(up) + (np.abs(silu) + slope * gates) * ups
    hidden += (np.abs(silu * up).max(-1, keepdims=True) + hidden.max(-1, keepdims=True)) / 254
    found: Array = np.einsum("bse,bseh,edh->bsd", weights, hidden, np.abs(arrays["down"]))
    return found


@pytest.mark.parametrize(("bits", "zeros"), list(itertools.product((2, 3, 4, 8), (True, False))))
def test_rounded_activations(bits: int, zeros: bool) -> None:
    layer = Layer(bits, zeros)
    graph = layer.plain()
    assert "QMoE" in kinds(graph)
    exact, found = interpret(graph, layer.feeds)["y"], on_onnxruntime(graph, layer.feeds)
    assert (np.abs(found - exact) <= bound(layer, graph) + 1e-6).all()
    assert relative(found, exact) < 0.03
    assert kept.has_rounded_activations(graph, TARGETS["ort-cpu"])


def _deepseek(layer: Layer) -> Value:
    bias = layer.param("correction", EXPERTS)
    return ops.route(layer.logits(), bias, k=2, scoring="sigmoid", groups=3, top_groups=2, scale=2.5)


ROUTERS = {
    "mixtral": lambda layer: ops.route(layer.logits(), k=2),
    "olmoe": lambda layer: ops.route(layer.logits(), k=2, renormalize=False),
    "scaled": lambda layer: ops.route(layer.logits(), k=2, renormalize=False, scale=3.0),
    "deepseek": _deepseek,
    "all": lambda layer: ops.route(layer.logits(), k=EXPERTS),
    "expert choice": lambda layer: ops.expert_choice(layer.logits(), capacity=2),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_any_router_weights_quantized_experts(router: str) -> None:
    layer = Layer()
    active = None if router in ("all", "expert choice") else 2
    check(layer, layer.moe(ROUTERS[router](layer), active=active))


def test_quantized_shared_experts() -> None:
    """A feed-forward of all tokens beside the mixture, as in Qwen2-MoE and DeepSeek."""
    layer = Layer()
    graph = layer.plain()
    shared = ops.linear(ops.relu(ops.linear(layer.x, layer.param("shared", DIM, DIM))), layer.param("out", DIM, DIM))
    graph.outputs["y"] = ops.add(graph.outputs["y"], shared)
    check(layer, graph)


UNITS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu biased": {"biased": True},
    "gpt-oss": {"activation": "swish(1.702)", "limit": 0.7, "shift": 1.0, "biased": True},
    "silu": {"activation": "silu", "gated": False},
    "relu": {"activation": "relu", "gated": False, "biased": True},
    "gelu": {"activation": "gelu_tanh", "gated": False},
}


@pytest.mark.parametrize("unit", UNITS)
def test_quantized_expert_activations(unit: str) -> None:
    layer = Layer()
    check(layer, layer.plain(**UNITS[unit]))


REFUSED: dict[str, tuple[Layer, dict[str, Any], str]] = {
    "rows that end within a group": (Layer(dim=72), {}, "whole groups, and rows of 72"),
    "hidden rows": (Layer(hidden=40), {}, "whole groups, and rows of 40"),
    "exact gelu": (Layer(), {"activation": "gelu", "gated": False}, "no gelu"),
    "a gate by gelu": (Layer(), {"activation": "gelu"}, "no gate by gelu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_qmoe_lacks_are_dequantized_with_a_reason(name: str) -> None:
    layer, attrs, reason = REFUSED[name]
    graph = Layer(*layer.scheme[:1], layer.scheme[2], layer.scheme[1], layer.dim, layer.hidden).plain(**attrs)
    exact = interpret(graph, layer.feeds)["y"]
    legal = graph.clone()
    legalize(legal, lambda node: list_refusals(node, TARGETS["ort-cpu"]))
    selection = select_lowerings(legal, TARGETS["ort-cpu"])
    assert "QMoE" not in {lowering.name for lowering in selection.chosen.values()}
    assert any("QMoE" in line and reason in line for line in selection.trace), selection.trace
    assert relative(on_onnxruntime(graph, layer.feeds), exact) < 2e-5


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_experts_are_not_stored_as_floats(bits: int) -> None:
    graph = Layer(bits).plain()
    built = build_model(graph, TARGETS["ort-cpu"], 16)
    elements = 3 * EXPERTS * HIDDEN * DIM
    size = sum(w.dtype.bytes_for(int(np.prod(w.shape))) for w in built.weights if w.value.name != "router")
    # Codes, and 2 bytes of a scale and a zero point for 32 of them.
    width = 4 if bits == 3 else bits
    assert size == pytest.approx(elements * (width + (16 + width) / 32) / 8, rel=0.05)
    assert len(kept.list_kept_weights(graph, TARGETS["ort-cpu"])) == 3


def test_f16() -> None:
    layer = Layer()
    graph = run_passes(layer.plain(), "cast{dtype=f16}")
    feeds = {"x": layer.feeds["x"].astype(np.float16)}
    exact = interpret(graph, feeds)["y"]
    KeepBlocks("quantized").run(graph, Trace())
    assert "QMoE" in kinds(graph)
    assert relative(on_onnxruntime(graph, feeds).astype(np.float64), exact) < 64 * float(dtypes.f16.eps)


def test_qmoe_on_cuda_takes_f16_without_zero_points() -> None:
    symmetric, others = Layer(4, False), [(Layer(4, True), "zero points"), (Layer(4, False, 16), "groups of 16")]
    graph = run_passes(symmetric.plain(), "cast{dtype=f16}")
    (node,) = (n for n in build_model(graph, TARGETS["ort-cuda"], 16).model.graph if n.op_type == "QMoE")
    assert node.attributes["weights_prepacked"].value == 0 and "accuracy_level" not in node.attributes
    for layer, reason in others:
        trace = select_lowerings(run_passes(layer.plain(), "cast{dtype=f16}"), TARGETS["ort-cuda"]).trace
        assert any(reason in line for line in trace)
