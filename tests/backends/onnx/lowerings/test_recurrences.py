"""Recurrences in ONNX Runtime: exact for long texts and large decays, linear in the length, one kernel on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.backend.test.case.test_case import TestCase

from weft.backends.onnx.export import BuiltModel, build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.frontends.dsl import scan
from weft.ir import Graph, Op, TensorType, Value, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array, MemoryReader
from weft.ir.types import dtypes, sizes
from weft.passes import legalize

from ....conformance.onnx_cases import node_cases
from ..cuda_placement import cuda_problems

CPU = ["onnx", "ort-cpu"]
RNG = np.random.default_rng(7)
ROUNDING = 64 * dtypes.f32.eps


def draw(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def lowered(op: Op, operands: dict[str, Any], target: str, dtype: str = "f32", **attrs: Any) -> BuiltModel:
    """Lower `op` for any batch and length; operands of rank 1 and 2 (but not `positions`) are weights."""
    weights = {k: v for k, v in operands.items() if v is not None and v.ndim < 3 and k != "positions"}
    graph = Graph(op.name, MemoryReader(dict(weights)))
    values: list[Value | None] = []
    for name, array in operands.items():
        kind = dtypes.i64 if name == "positions" else dtypes.parse(dtype)
        if name.startswith("past") and op is not ops.causal_conv:
            kind = dtypes.f32
        if array is None:
            values.append(None)
        elif name in weights:
            kind = dtypes.f32 if name == "frequencies" else kind
            values.append(graph.add_param(name, TensorType(kind, array.shape), Source(name)))
        else:
            states = name.startswith("past")
            tail = array.shape[1:] if states else (sizes.sym("seq"), *array.shape[2:])
            values.append(graph.add_input(name, TensorType(kind, (sizes.sym("batch"), *tail))))
    for i, value in enumerate(op.emit(*values, **attrs)):
        graph.add_output(f"y{i}", value)
    place = TARGETS[target]
    legalize(graph, lambda node: list_refusals(node, place))
    return build_model(graph, place, max_length=2048)


def session(built: BuiltModel) -> ort.InferenceSession:
    return ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])


def fed(run: ort.InferenceSession, operands: dict[str, Any]) -> list[Array]:
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    feeds = {i.name: np.asarray(operands[i.name], kinds[i.type]) for i in run.get_inputs()}
    return [np.asarray(v, np.float64) for v in run.run(None, feeds)]


def close(found: Array, wanted: Array, bound: float = ROUNDING) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * max(1.0, float(np.abs(wanted).max())))


def rounded(operands: dict[str, Any]) -> dict[str, Any]:
    """Round to values that f32 represents."""
    return {k: v if v is None or v.dtype.kind != "f" else v.astype(np.float32) for k, v in operands.items()}


def scanned(step: float, seq: int, batch: int = 2) -> dict[str, Any]:
    """Return operands of selective_scan: steps of about `step` times rates of −1 … −16."""
    channels, states = 6, 5
    delta = step * np.abs(draw(batch, seq, channels))
    a, d = -np.linspace(1, 16, channels * states).reshape(channels, states), draw(channels)
    b, c = draw(batch, seq, states), draw(batch, seq, states)
    operands = {"x": draw(batch, seq, channels), "delta": delta, "a": a, "b": b, "c": c, "d": d}
    return rounded({**operands, "past": draw(batch, states, channels)})


def dual(step: float, seq: int, batch: int = 2) -> dict[str, Any]:
    """Return operands of ssd: 4 heads of 3, 2 groups of 5 states."""
    delta = step * np.abs(draw(batch, seq, 4))
    operands = {"x": draw(batch, seq, 12), "delta": delta, "a": -np.linspace(1, 16, 4)}
    operands |= {"b": draw(batch, seq, 10), "c": draw(batch, seq, 10), "d": draw(4), "past": draw(batch, 4, 5, 3)}
    return rounded({**operands})


def delta(gates: int, seq: int, batch: int = 2) -> dict[str, Any]:
    """Return operands of gated_delta_rule: 4 value heads of 3, keys of 5 in 2 groups, and `gates`."""
    k = draw(batch, seq, 2, 5)
    k = (k / np.linalg.norm(k, axis=-1, keepdims=True)).reshape(batch, seq, 10)
    operands = {"q": draw(batch, seq, 10), "k": k, "v": draw(batch, seq, 12), "beta": RNG.random((batch, seq, 4))}
    operands |= {"decay": -RNG.random((batch, seq, gates)) if gates else None}
    return rounded({**operands, "past": draw(batch, 4, 5, 3)})


def linear(turned: bool, seq: int, batch: int = 2) -> dict[str, Any]:
    """Return operands of linear_attention: 3 heads of 4, values of 5."""
    operands: dict[str, Any] = {
        "q": draw(batch, seq, 12),
        "k": draw(batch, seq, 12),
        "v": draw(batch, seq, 15),
    }
    at = np.arange(seq)[None] + np.array([[0], [40]])[:batch]
    operands |= {"key_mask": None, "positions": at if turned else None}
    operands |= {"frequencies": np.array([1.0, 0.1]) if turned else None}
    return rounded({**operands, "past_state": draw(batch, 3, 4, 5), "past_norm": 9 + np.abs(draw(batch, 3, 4))})


def recurrence(operands: dict[str, Any], groups: int = 1) -> tuple[Array, Array]:
    """Compute h_t = e^{Δ_t A} h_{t−1} + Δ_t x_t B_tᵀ, the state of every channel [batch, channels, states], step by
    step."""
    x, delta, a, b, c, d, state = (np.asarray(v, np.float64) for v in operands.values())
    batch, seq, channels = x.shape
    if a.ndim == 1:
        wide = channels // len(a)
        a, d = np.repeat(a, wide)[:, None], np.repeat(d, wide)
        delta = np.repeat(delta, wide, 2)
        state = state.transpose(0, 1, 3, 2).reshape(batch, channels, -1)
    else:
        state = state.transpose(0, 2, 1)
    b, c = (np.repeat(t.reshape(batch, seq, groups, -1), channels // groups, 2) for t in (b, c))
    y = np.empty_like(x)
    for t in range(seq):
        fade = np.exp(delta[:, t, :, None] * a)
        state = fade * state + (delta[:, t] * x[:, t])[..., None] * b[:, t]
        y[:, t] = (state * c[:, t]).sum(-1) + d * x[:, t]
    return y, state


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("step", [0.001, 0.3, 20.0])
@pytest.mark.parametrize("seq", [1, 2, 31, 32, 33, 64, 1000])
def test_scans_of_any_length_and_decay(target: str, step: float, seq: int) -> None:
    """Decays from e^0.001 to e^−300 a token, lengths around the borders of chunks, against the recurrence."""
    operands = scanned(step, seq)
    y, state = fed(session(lowered(ops.selective_scan, operands, target)), operands)
    wanted, last = recurrence(operands)
    close(y, wanted)
    close(state, last.transpose(0, 2, 1))

    operands = dual(step, seq)
    y, state = fed(session(lowered(ops.ssd, operands, target, heads=4, groups=2)), operands)
    wanted, last = recurrence(operands, groups=2)
    close(y, wanted)
    close(state, last.reshape(2, 4, 3, 5).transpose(0, 1, 3, 2))


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seq", [1, 32, 65, 500])
def test_linear_attention_of_any_length(target: str, turned: bool, seq: int) -> None:
    operands = linear(turned, seq)
    found = fed(session(lowered(ops.linear_attention, operands, target, heads=3, causal=True)), operands)
    wide = [None if v is None else np.asarray(v, v.dtype if v.dtype.kind == "i" else float) for v in operands.values()]
    for got, wanted in zip(found, ops.linear_attention.reference(*wide, heads=3, causal=True), strict=True):
        close(got, wanted, ROUNDING * np.sqrt(seq))


def test_small_features_keep_their_weight() -> None:
    """φ(x) = e^x for very negative x: elu(x) + 1 in f32 would be zero, and the output 0/0."""
    operands = {"q": np.full((1, 40, 4), -30.0), "k": np.full((1, 40, 4), -40.0), "v": draw(1, 40, 4)}
    for target in CPU:
        (y,) = fed(
            session(lowered(ops.linear_attention, rounded({**operands}), target, heads=1, causal=True)), operands
        )
        close(y, np.cumsum(operands["v"], 1) / np.arange(1, 41)[:, None])


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("cuts", [(70,), (33, 37), (1,) * 5 + (64, 1), (2, 1, 67)])
def test_recurrence_in_chunks_equals_one_call(target: str, cuts: tuple[int, ...]) -> None:
    conv = rounded({"x": draw(2, 70, 6), "weight": draw(6, 4), "bias": draw(6), "past": np.zeros((2, 3, 6))})
    runs: list[tuple[Op, dict[str, Any], dict[str, Any], list[str]]] = [
        (ops.selective_scan, scanned(0.2, 70), {}, ["past"]),
        (ops.ssd, dual(0.2, 70), {"heads": 4, "groups": 2}, ["past"]),
        (ops.causal_conv, conv, {"activation": "silu"}, ["past"]),
        (ops.linear_attention, linear(True, 70), {"heads": 3, "causal": True}, ["past_state", "past_norm"]),
        *((ops.gated_delta_rule, delta(gates, 70), {"heads": 4, "groups": 2}, ["past"]) for gates in (0, 4, 20)),
    ]
    for op, operands, attrs, past in runs:
        run = session(lowered(op, operands, target, **attrs))
        whole, *last = fed(run, operands)
        start, parts, carried = 0, [], dict(operands)
        for n in cuts:
            timed = (k for k, v in operands.items() if v is not None and v.ndim > 1 and v.shape[1] == 70)
            for name in timed:
                carried[name] = operands[name][:, start : start + n]
            y, *present = fed(run, carried)
            carried |= dict(zip(past, present, strict=True))
            parts.append(y)
            start += n
        close(np.concatenate(parts, 1), whole)
        for a, b in zip(present, last, strict=True):
            close(a, b)


def test_half_precision_accumulates_in_f32() -> None:
    """Errors are the rounding of what goes in and out, not of the sums: 3000 features of about 1 end where f16 has
    steps of 2, and a state is rounded a hundred times."""
    operands = scanned(0.01, 500)
    y, _ = fed(session(lowered(ops.selective_scan, operands, "ort-cpu", "f16")), operands)
    assert np.abs(y - recurrence(operands)[0]).max() < 8 * dtypes.f16.eps * np.abs(y).max()

    whole = linear(False, 3000, batch=1)
    wide = [None if v is None else np.asarray(v, float) for v in whole.values()]
    wanted = ops.linear_attention.reference(*wide, heads=3, causal=True)
    run = session(lowered(ops.linear_attention, whole, "ort-cpu", "f16", heads=3, causal=True))
    state, norm, parts = whole["past_state"], whole["past_norm"], []
    for start in range(0, 3000, 30):
        piece = {k: None if v is None else v[:, start : start + 30] for k, v in whole.items()}
        y, state, norm = fed(run, piece | {"past_state": state, "past_norm": norm})
        parts.append(y)
    for found, exact in zip((np.concatenate(parts, 1), state, norm), wanted, strict=True):
        close(found, exact, 4 * dtypes.f16.eps)


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("gates", [0, 20])
def test_delta_rule_in_half_precision(gates: int, target: str) -> None:
    """Changes of 500 tokens are summed in f32: what is left is the rounding of operands and results."""
    operands, sizes = delta(gates, 500), {"heads": 4, "groups": 2}
    half = {k: None if v is None else v.astype(np.float16).astype(np.float64) for k, v in operands.items()}
    wanted = ops.gated_delta_rule.reference(*half.values(), **sizes)
    run = session(lowered(ops.gated_delta_rule, operands, target, "f16", **sizes))
    for found, exact in zip(fed(run, operands), wanted, strict=True):
        close(found, exact, 4 * dtypes.f16.eps)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes(attribute.g)


@pytest.mark.parametrize("target", CPU)
def test_recurrence_cost_is_linear_in_the_length(target: str) -> None:
    """No tensor has two axes of tokens beyond a chunk: ten times the tokens make the largest ten times as large."""
    runs: list[tuple[Op, Any, dict[str, Any]]] = [
        (ops.selective_scan, scanned, {}),
        (ops.ssd, dual, {"heads": 4, "groups": 2}),
        (ops.gated_delta_rule, lambda _, seq: delta(20, seq), {"heads": 4, "groups": 2}),
    ]
    for op, make, attrs in runs:
        built = lowered(op, make(0.1, 8), target, **attrs)
        proto = onnx.load_from_string(serialize_model(built))
        assert sum(1 for _ in nodes(proto.graph)) < 90
        shown = {v.name for v in proto.graph.output}
        made_by = [name for node in proto.graph.node for name in node.output if name not in shown]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made_by)
        made = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        largest = [max(v.size for v in fed(made, make(0.1, seq))) for seq in (64, 640)]
        assert largest[1] <= 10 * largest[0]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_on_cuda_a_recurrence_is_one_kernel(dtype: str) -> None:
    conv: dict[str, Any] = {"x": draw(2, 9, 6), "weight": draw(6, 4), "bias": None, "past": draw(2, 3, 6)}
    runs: list[tuple[Op, dict[str, Any], dict[str, Any], str]] = [
        (ops.selective_scan, scanned(0.2, 9), {}, "LinearAttention"),
        (ops.ssd, dual(0.2, 9), {"heads": 4, "groups": 2}, "LinearAttention"),
        (ops.linear_attention, linear(True, 9), {"heads": 3, "causal": True}, "LinearAttention"),
        (ops.gated_delta_rule, delta(20, 9), {"heads": 4, "groups": 2}, "LinearAttention"),
        (ops.causal_conv, conv, {"activation": "silu"}, "CausalConvWithState"),
    ]
    for op, operands, attrs, kernel in runs:
        built = lowered(op, operands, "ort-cuda", dtype, **attrs)
        kinds = [node.op_type for node in built.model.graph]
        assert kinds.count(kernel) == 1 and "Scan" not in kinds
        assert cuda_problems(built.model) == []


def test_convolution_activations_without_kernel_are_expanded() -> None:
    operands = rounded({"x": draw(2, 9, 6), "weight": draw(6, 3), "bias": draw(6)})
    wide = [np.asarray(v, np.float64) for v in operands.values() if v is not None]
    for name in ("gelu_tanh", "elu", "relu2"):
        kinds = [n.op_type for n in lowered(ops.causal_conv, operands, "ort-cuda", activation=name).model.graph]
        assert "CausalConvWithState" not in kinds
        for target in CPU:
            (y,) = fed(session(lowered(ops.causal_conv, operands, target, activation=name)), operands)
            close(y, ops.causal_conv.reference(*wide, activation=name))


def published() -> list[TestCase]:
    """List the cases of the ONNX standard that the ops can express: value heads that share no state, convolutions over
    two tokens or more."""
    found = []
    for case in node_cases("LinearAttention", "CausalConvWithState"):
        assert case.model is not None
        node = case.model.graph.node[0]
        sizes = {a.name: a.i for a in node.attribute}
        shared = node.op_type == "LinearAttention" and sizes["q_num_heads"] > sizes["kv_num_heads"]
        if not shared and "kernel_size_one" not in case.name:
            found.append(case)
    return found


def expressed(kind: str, given: dict[str, Array], attrs: dict[str, Any]) -> tuple[Op, dict[str, Any], dict[str, Any]]:
    """Return a published case as an op, its operands and its attributes."""
    past = given.get("past_state")
    if kind == "LinearAttention":
        heads = attrs["kv_num_heads"]
        scale = attrs.get("scale") or (given["query"].shape[2] / attrs["q_num_heads"]) ** -0.5
        named = {"q": given["query"] * scale, "k": given["key"], "v": given["value"]}
        operands = {**named, "decay": given.get("decay"), "past": past}
        sizes = {"heads": heads, "groups": attrs["q_num_heads"]}
        if attrs.get("update_rule", b"gated_delta") in (b"linear", b"gated"):
            return ops.gated_linear_attention, operands, sizes
        beta = np.broadcast_to(given["beta"], (*given["beta"].shape[:2], heads))  # one for all heads, or one each
        return ops.gated_delta_rule, {**named, "beta": beta, "decay": given.get("decay"), "past": past}, sizes
    activation = {b"none": "identity", b"silu": "silu", b"swish": "silu"}[attrs.get("activation", b"none")]
    turned = {k: None if v is None else v.transpose(0, 2, 1) for k, v in (("x", given["input"]), ("past", past))}
    weight = given["weight"][:, 0]
    operands = {"x": turned["x"], "weight": weight, "bias": given.get("bias"), "past": turned["past"]}
    return ops.causal_conv, operands, {"activation": activation}


@pytest.mark.parametrize("target", CPU)
@pytest.mark.parametrize("case", published(), ids=lambda c: c.name)
def test_onnx_standard_cases(case: TestCase, target: str) -> None:
    assert case.model is not None and case.data_sets is not None
    node = case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs, outputs = case.data_sets[0]
    arrays = [np.asarray(v) for v in inputs]
    dtype = dtypes.from_numpy(arrays[0])
    given = dict(zip((n for n in node.input if n), (v.astype(np.float64) for v in arrays), strict=True))
    op, operands, shape = expressed(node.op_type, given, attrs)
    found = fed(session(lowered(op, operands, target, dtype.name, **shape)), operands)
    for got, wanted in zip(found, outputs, strict=False):
        layout = (0, 2, 1) if op is ops.causal_conv else range(wanted.ndim)
        close(got.transpose(layout), wanted.astype(np.float64), 64 * dtype.eps)


def test_output_names_are_unique_across_subgraphs() -> None:
    """A value within the model, or within the step of a scan, may be called like an output of the model."""
    graph = Graph("names")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3, 4)))
    y = scan(lambda h, x: (ops.add(h, x, name="y"), ops.tanh(h)), x, state=(4,))
    graph.add_output("y", ops.exp(y, name="z"))
    given = np.random.default_rng(0).standard_normal((2, 3, 4))
    session = ort.InferenceSession(serialize_model(build_model(graph, TARGETS.lookup("onnx"), 8)))
    (found,) = session.run(["y"], {"x": given.astype(np.float32)})
    np.testing.assert_allclose(found, interpret(graph, {"x": given})["y"], rtol=1e-5)
