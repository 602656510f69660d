"""Routers and experts in ONNX: equal to the float64 meaning, in a fixed number of nodes, only experts asked."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft.backends.onnx.export import BuiltModel, build_model, serialize_model, write_models
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, Param, TensorType, Value, interpret, ops
from weft.ir.ops.routing import emit_hierarchical_routing
from weft.ir.recipes import Concat, Normal, Recipe, Reshape, Source
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym
from weft.passes import legalize, run_passes

from ....sampling import each
from ..cuda_placement import cuda_problems

EXPERTS, DIM, HIDDEN = 8, 6, 10
Router = Callable[[Graph, Value], Value]


def sparse(rng: np.random.Generator, *shape: int, k: int = 2) -> np.ndarray:
    """Return weights of up to k of the experts on the last axis."""
    weights = rng.uniform(0.1, 1, shape)
    rank = np.argsort(np.argsort(rng.random(shape), -1), -1)
    return np.where(rank < rng.integers(0, k + 1, (*shape[:-1], 1)), weights, 0)


PLACES = [name for name, target in TARGETS.items() if target.opset]  # that are ONNX models


class Layer:
    """A graph with input x [batch, seq, DIM] and experts whose weights are parameters."""

    def __init__(self, experts: int = EXPERTS, dtype: str = "f32", seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.experts, self.dtype = experts, dtypes.parse(dtype)
        self.graph = Graph("layer", MemoryReader({}))
        self.x = self.input("x", sym("batch"), sym("seq"), DIM)

    def input(self, name: str, *shape: Any) -> Value:
        return self.graph.add_input(name, TensorType(self.dtype, shape))

    def param(self, name: str, *shape: int) -> Param:
        assert isinstance(self.graph.reader, MemoryReader)
        self.graph.reader.arrays[name] = self.rng.standard_normal(shape).astype(np.float32)
        return self.graph.add_param(name, TensorType(self.dtype, shape), Source(name))

    def moe(self, combine: Value, gated: bool = True, biases: str = "", **attrs: Any) -> None:
        wide, narrow = (self.experts, HIDDEN, DIM), (self.experts, DIM, HIDDEN)
        gate = self.param("gate", *wide) if gated else None
        found = {
            name: self.param(f"{name}_bias", self.experts, DIM if name == "down" else HIDDEN) for name in biases.split()
        }
        b = (found.get(name) for name in ("up", "down", "gate"))
        y = ops.moe(self.x, combine, self.param("up", *wide), self.param("down", *narrow), gate, *b, **attrs)
        self.graph.add_output("y", y)

    def build(self, target: str) -> BuiltModel:
        place = TARGETS[target]
        graph = self.graph.clone()
        legalize(graph, lambda node: list_refusals(node, place))
        return build_model(graph, place, max_length=16)


def kinds(built: BuiltModel) -> Counter[str]:
    return Counter(node.op_type for node in built.model.graph)


def run(built: BuiltModel, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
    used = {i.name for i in session.get_inputs()}
    got: np.ndarray = session.run(["y"], {k: v.astype(np.float32) for k, v in feeds.items() if k in used})[0]
    return got


def check(layer: Layer, target: str, feeds: dict[str, np.ndarray]) -> Counter[str]:
    """Compare with the interpreter; return the operators used."""
    built = layer.build(target)
    want, got = interpret(layer.graph, feeds)["y"], run(built, feeds)
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=128 * dtypes.f32.eps * scale)
    if target == "onnx":
        proto = onnx.load_from_string(serialize_model(built))
        onnx.checker.check_model(proto, full_check=True)
        assert {node.domain for node in proto.graph.node} <= {""}
    return kinds(built)


UNITS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether ONNX Runtime's operator takes it, settings
    "swiglu": (True, {}),
    "swiglu biased": (True, {"biases": "up down gate"}),
    "swiglu up bias": (True, {"biases": "up"}),
    "gpt-oss": (True, {"activation": "swish(1.702)", "limit": 0.7, "shift": 1.0, "biases": "up down gate"}),
    "quick": (True, {"activation": "gelu_quick"}),
    "geglu": (False, {"activation": "gelu", "biases": "down"}),
    "reglu": (False, {"activation": "relu", "limit": 0.4, "shift": 0.5}),
    "bilinear": (False, {"activation": "identity"}),
    "elu gate": (False, {"activation": "elu"}),
    "relu": (True, {"activation": "relu", "gated": False, "biases": "up down"}),
    "silu": (True, {"activation": "silu", "gated": False}),
    "identity": (True, {"activation": "identity", "gated": False}),
    "gelu tanh": (True, {"activation": "gelu_tanh", "gated": False}),
    "gelu": (False, {"activation": "gelu", "gated": False}),
    "squared relu": (False, {"activation": "relu2", "gated": False, "biases": "down"}),
}


@pytest.mark.parametrize(
    ("unit", "target", "active"), each(5, itertools.product(UNITS, ("onnx", "ort-cpu"), (None, 2, 3)))
)
def test_expert_activations(unit: str, target: str, active: int | None, rng: np.random.Generator) -> None:
    fits, attrs = UNITS[unit]
    layer = Layer()
    combine = layer.input("combine", sym("batch"), sym("seq"), EXPERTS)
    layer.moe(combine, active=active, **attrs)
    used = check(layer, target, {"x": rng.standard_normal((2, 5, DIM)), "combine": sparse(rng, 2, 5, EXPERTS)})
    assert used["MoE"] == (fits and target == "ort-cpu")
    # One product each for up, down and gate, whatever the number of experts, and one with the weights.
    assert used["MatMul"] + used["FusedMatMul"] == (0 if used["MoE"] else 3 + attrs.get("gated", True))
    assert used["NonZero"] + used["Loop"] + used["If"] == 0


def routed(**attrs: Any) -> Router:
    return lambda graph, logits: ops.route(logits, **attrs)


def corrected(graph: Graph, logits: Value) -> Value:
    graph.reader.arrays["correction"] = np.linspace(-1, 1, EXPERTS)
    bias = graph.add_param("correction", TensorType(logits.type.dtype, (EXPERTS,)), Source("correction"))
    return ops.route(logits, bias, k=3, scoring="sigmoid", groups=4, top_groups=2, scale=2.5)


def tight(graph: Graph, logits: Value) -> Value:
    return ops.limit_capacity(ops.route(logits, k=2, renormalize=False), capacity=2)


def two_level(graph: Graph, logits: Value) -> Value:
    groups = ops.slice_(logits, axis=2, start=0, stop=4)
    return emit_hierarchical_routing(groups, logits, top_groups=2, k=1)


ROUTERS: dict[str, tuple[Router, bool]] = {  # and whether the operator can choose by itself
    "softmax": (routed(k=2), True),
    "not renormalized": (routed(k=3, renormalize=False, scale=4.0), True),
    "all": (routed(k=EXPERTS), True),
    "switch": (routed(k=1, renormalize=False), True),
    "sigmoid": (routed(k=2, scoring="sigmoid", scale=2.0), False),
    "grouped": (routed(k=3, groups=4, top_groups=2, group_score="max", renormalize=False, scale=16.0), False),
    "corrected": (corrected, False),
    "capacity": (tight, False),
    "expert choice": (lambda graph, logits: ops.expert_choice(logits, factor=1.5), False),
    "hierarchical": (two_level, False),
}


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_equal_the_interpreter(name: str, target: str, rng: np.random.Generator) -> None:
    make, direct = ROUTERS[name]
    layer = Layer()
    logits = layer.input("logits", sym("batch"), sym("seq"), EXPERTS)
    combine = make(layer.graph, logits)
    layer.moe(combine, active=combine.producer.attrs.get("k") if combine.producer else None)
    feeds = {"x": rng.standard_normal((2, 11, DIM)), "logits": 2 * rng.standard_normal((2, 11, EXPERTS))}
    used = check(layer, target, feeds)
    if target == "ort-cpu":
        assert used["MoE"] == 1 and (used["Log"] == 0) == direct
        if direct:  # the sum of what is not renormalized is a factor of the result
            assert used["TopK"] == used["Softmax"] == (name in ("not renormalized", "switch"))
    assert used["OneHot"] + used["Where"] == (name == "capacity")


@pytest.mark.parametrize("name", ["softmax", "not renormalized", "switch", "sigmoid"])
def test_moe_operator_may_run_in_place(name: str, rng: np.random.Generator) -> None:
    """Between two other operators ONNX Runtime gives it one piece of memory for both."""
    layer = Layer()
    layer.x = ops.neg(layer.x)
    logits = layer.input("logits", sym("batch"), sym("seq"), EXPERTS)
    layer.moe(ROUTERS[name][0](layer.graph, logits))
    layer.graph.outputs["y"] = ops.neg(layer.graph.outputs["y"])
    check(layer, "ort-cpu", {"x": rng.standard_normal((2, 11, DIM)), "logits": rng.standard_normal((2, 11, EXPERTS))})


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("shape", [(DIM,), (7, DIM), (2, 3, 4, DIM)])
def test_experts_take_any_number_of_axes(shape: tuple[int, ...], target: str, rng: np.random.Generator) -> None:
    layer = Layer()
    layer.x = layer.input("tokens", *shape)
    layer.moe(layer.input("combine", *shape[:-1], EXPERTS), active=2)
    x, combine = rng.standard_normal(shape), sparse(rng, *shape[:-1], EXPERTS)
    check(layer, target, {"x": np.zeros((1, 1, DIM)), "tokens": x, "combine": combine})


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("case", ["idle", "one expert", "many tokens", "last expert"])
def test_unevenly_loaded_experts(case: str, target: str, rng: np.random.Generator) -> None:
    tokens = 700 if case == "many tokens" else 5
    layer = Layer(experts=16)
    layer.moe(layer.input("combine", sym("batch"), sym("seq"), 16), activation="gelu", active=3)
    combine = sparse(rng, 1, tokens, 16, k=3) ** 2
    if case != "many tokens":
        combine *= 0
        combine[:, 1:, {"idle": [], "one expert": [3], "last expert": [15]}[case]] = 0.5
    check(layer, target, {"x": rng.standard_normal((1, tokens, DIM)), "combine": combine})


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_unused_experts_are_not_computed(activation: str, target: str, rng: np.random.Generator) -> None:
    """Their weights are not even read: they may be any numbers."""
    layer = Layer()
    layer.moe(ops.route(layer.input("logits", sym("batch"), sym("seq"), EXPERTS), k=2), activation=activation, active=2)
    asked = [1, 6]
    arrays = layer.graph.reader.arrays
    for array in arrays.values():
        array[[e for e in range(EXPERTS) if e not in asked]] = 3e38  # which no product survives
    logits = rng.standard_normal((1, 4, EXPERTS))
    logits[..., asked] += 50
    x = rng.standard_normal((1, 4, DIM))
    got = run(layer.build(target), {"x": x, "logits": logits})
    for name, array in arrays.items():
        arrays[name] = np.where(array > 1e38, 0, array)
    np.testing.assert_allclose(got, interpret(layer.graph, {"x": x, "logits": logits})["y"], atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("target", PLACES)
def test_node_count_does_not_grow_with_experts(activation: str, target: str) -> None:
    found = []
    for experts in (8, 256):
        layer = Layer(experts)
        logits = layer.input("logits", sym("batch"), sym("seq"), experts)
        layer.moe(ops.route(logits, k=2, scoring="sigmoid"), activation=activation, active=2)
        found.append(kinds(layer.build(target)))
    assert found[0] == found[1]


def test_expert_choice_has_no_token_by_token_tensor() -> None:
    layer = Layer()
    layer.graph.add_output("y", ops.expert_choice(layer.input("logits", sym("batch"), sym("seq"), EXPERTS)))
    for target in PLACES:
        assert kinds(layer.build(target))["TopK"] == 1


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("name", ROUTERS)
def test_layers_can_be_captured_on_cuda(name: str, activation: str, dtype: str) -> None:
    layer = Layer(dtype=dtype)
    combine = ROUTERS[name][0](layer.graph, layer.input("logits", sym("batch"), sym("seq"), EXPERTS))
    layer.moe(combine, activation=activation)
    built = layer.build("ort-cuda")
    assert cuda_problems(built.model) == []
    # Of bf16 logits the CUDA kernel of ONNX Runtime 1.30 makes other choices.
    assert kinds(built)["MoE"] == (activation == "silu" and dtype == "f16")


def stacked(part: str, experts: int, out: int, width: int) -> Recipe:
    each = (Normal((out, width), 0.02, f"{part}.{i}") for i in range(experts))
    return Concat(tuple(Reshape(e, (1, out, width)) for e in each))


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_stacked_weights_are_streamed(target: str, tmp_path: Path) -> None:
    """Memory for a few blocks of rows, not for all experts of a layer."""
    experts, hidden, dim = 32, 512, 256
    graph = Graph("stream")
    x = graph.add_input("x", TensorType(dtypes.f32, (sym("seq"), dim)))
    combine = graph.add_input("combine", TensorType(dtypes.f32, (sym("seq"), experts)))
    gate, up, down = (
        graph.add_param(part, TensorType(dtypes.f32, (experts, out, width)), stacked(part, experts, out, width))
        for part, out, width in (("gate", hidden, dim), ("up", hidden, dim), ("down", dim, hidden))
    )
    graph.add_output("y", ops.moe(x, combine, up, down, gate, active=2))
    built = build_model(run_passes(graph, ""), TARGETS[target], max_length=16)
    tracemalloc.start()
    write_models({"model.onnx": built}, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = 4 * experts * hidden * dim
    assert (tmp_path / "model.onnx.data").stat().st_size == 3 * whole
    assert peak < whole / 2
