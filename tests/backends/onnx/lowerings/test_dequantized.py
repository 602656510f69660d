"""Quantized weights in standard operators: valid ONNX of the same meaning, which ONNX Runtime fuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf.constants import GGMLQuantizationType
from onnx.reference import ReferenceEvaluator

import weft
from weft.backends.onnx import export
from weft.backends.onnx.lowering import LOWERINGS
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Quantize
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes
from weft.passes import legalize, run_passes

from ....sampling import each
from ..attention_models import BATCH, HEADS, KV_HEADS, SEQ, Decoding, formula
from ..quantized_llama import LAYERS, write
from .test_block_matmul import LAYOUTS, SHAPES, product, relative

LEVEL = "session.qdq_matmulnbits_accuracy_level"


def written(graph: Graph, folder: Path) -> Path:
    """Write the model of `graph` for the target onnx into a folder."""
    backend, legal = TARGETS.lookup("onnx"), graph.clone()
    legalize(legal, backend.refusals)
    export.write_models({export.MODEL: export.build_model(legal, backend, 16)}, folder)
    return folder / export.MODEL


def by_onnxruntime(model: Path, feeds: dict[str, Array], level: str) -> tuple[Array, list[str]]:
    """Return the first output, and the operators of the model after ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(model.parent / "optimized.onnx")
    options.add_session_config_entry(LEVEL, level)
    options.log_severity_level = 3  # a model saved after optimization is of this machine only, it warns
    found: Array = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    nodes = onnx.load(model.parent / "optimized.onnx", load_external_data=False).graph.node
    return found, [node.op_type for node in nodes]


def by_the_standard(model: Path, feeds: dict[str, Array]) -> Array:
    """Return the first output by ONNX's reference evaluator, of a model that its checker accepts."""
    proto = onnx.load(model)
    onnx.checker.check_model(str(model), full_check=True)
    assert {node.domain for node in proto.graph.node} <= {""}
    found: Array = ReferenceEvaluator(proto).run(None, feeds)[0]
    return found


@pytest.mark.parametrize(("bits", "zeros", "group"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_products_equal_the_interpreter(
    bits: int, zeros: bool, group: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    graph, x = product(bits, zeros, group, shape, False)
    model, exact = written(graph, tmp_path), interpret(graph, {"x": x})["y"]
    assert relative(by_the_standard(model, {"x": x}), exact) < 2e-5
    found, nodes = by_onnxruntime(model, {"x": x}, "0")
    assert relative(found, exact) < 2e-5
    assert nodes.count("MatMulNBits") == 1 and "DequantizeLinear" not in nodes
    rounded, _ = by_onnxruntime(model, {"x": x}, "4")
    weight = np.abs(graph.params["w"].recipe.evaluate(graph.reader))
    assert np.abs(rounded - exact).max() <= (np.abs(x).max() / 254 * weight.sum(1)).max() * 1.01


def test_products_after_a_norm(tmp_path: Path) -> None:
    graph, x = product(4, True, 32, (33, 96), True)
    exact = interpret(graph, {"x": x})["y"]
    found, nodes = by_onnxruntime(written(graph, tmp_path), {"x": x}, "0")
    assert relative(found, exact) < 2e-5 and "MatMulNBits" in nodes


@pytest.mark.parametrize(("layout", "tied", "width"), each(3, itertools.product(LAYOUTS, (False, True), (64, 72))))
def test_dequantized_embeddings_equal_the_interpreter(
    layout: tuple[int, bool, int], tied: bool, width: int, tmp_path: Path
) -> None:
    bits, zeros, group = layout
    rng = np.random.default_rng(0)
    table = rng.standard_normal((2051, width)).astype(np.float32)
    graph = Graph("lookup", MemoryReader({"t": table}))
    ids = graph.add_input("ids", TensorType(dtypes.i64, (sizes.sym("batch"), sizes.sym("seq"))))
    t = graph.add_param("t", TensorType(dtypes.f32, table.shape), Quantize(Source("t"), bits, group, zeros))
    rows = ops.embedding(ids, t)
    graph.add_output("y", ops.linear(ops.relu(rows), t) if tied else rows)
    model, feeds = written(graph, tmp_path), {"ids": rng.integers(0, 2051, (2, 7))}
    exact = interpret(graph, feeds)["y"]
    assert relative(by_the_standard(model, feeds), exact) < 2e-5
    found, nodes = by_onnxruntime(model, feeds, "0")
    assert relative(found, exact) < 2e-5
    assert nodes.count("MatMulNBits") == tied
    # The table itself is never dequantized: what is left of DequantizeLinear has read the rows asked for.
    assert nodes.count("DequantizeLinear") == 1
    # Codes of 8 bits are in the file once, those of up to 4 once in each layout.
    groups = -(-width // group)
    padded = groups * group // 2
    codes = 2051 * (width if bits == 8 else padded + tied * -(-width // 2))
    others = 2051 * groups * (2 + zeros) * (1 + (tied and bits < 8))
    size = (tmp_path / export.DATA).stat().st_size
    assert codes < size < codes + others + 6 * export.PAGE


def test_f16(tmp_path: Path) -> None:
    graph, x = product(4, True, 32, (33, 96), False)
    graph = run_passes(graph, "cast{dtype=f16}")
    exact = interpret(graph, {"x": x.astype(np.float16)})["y"]
    found, _ = by_onnxruntime(written(graph, tmp_path), {"x": x.astype(np.float16)}, "0")
    assert relative(found.astype(np.float64), exact) < 64 * float(dtypes.f16.eps)


def test_folder_stores_codes_of_all_matrices(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": GGMLQuantizationType.F32})
    weft.compile(source, tmp_path / "out", target="onnx", max_length=32, weights="int4{method=rtn}")
    nodes = [n.op_type for n in onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.node]
    # The packed projections of q, k and v, that of the output, gate and up, down; the lookup and the head.
    assert nodes.count("DequantizeLinear") == 4 * LAYERS + 2
    facts = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert facts["arithmetic"] == "int8" and facts["blocks"] == {"uint4_32": 4 * LAYERS, "int8_32": 1}


TARGETS_ON_CPU = ("onnx", "ort-cpu")
FREQUENCIES = np.array([1.0, 0.25, 0.0625, 0.015625] * 4)  # exact in f32
LENGTH = 17


def scales(bits: int, per: str, width: int, heads: int = KV_HEADS) -> Array:
    """Return scales with which values of size 1 use all codes."""
    rng = np.random.default_rng(bits)
    channels = rng.uniform(0.5, 2.0, heads * width) / (1 << (bits - 1))
    if per == "tensor":
        return channels[:1].astype(np.float32)
    return (channels if per == "channel" else channels[::width].repeat(width)).astype(np.float32)


def rounded(x: Array, scale: Array, bits: int) -> tuple[Array, Array]:
    """Return codes and values of x [batch, n, heads · width], by the definition."""
    limit = 1 << (bits - 1)
    codes = np.minimum(np.maximum(np.round(x / scale), -limit), limit - 1)
    return codes, codes * scale


def coded(
    bits: int,
    per: str,
    dim: int = 8,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    rope: bool = False,
    sinks: Array | None = None,
    latent: int | None = None,
    **attrs: Any,
) -> Graph:
    """Return an attention over q, k and v whose cache has codes."""
    tensors = {name: scales(bits, per, dim, kv_heads) * by for name, by in (("k_scale", 1), ("v_scale", 1.5))}
    tensors |= {"frequencies": FREQUENCIES[: dim // 2], **({} if sinks is None else {"sinks": sinks})}
    graph = Graph("coded", MemoryReader({n: x.astype(np.float32) for n, x in tensors.items()}))
    graph.meta |= {"kind": "decoder", "context": 64}
    widths = {"q": heads * dim, "k": kv_heads * dim, **({} if latent else {"v": kv_heads * dim})}
    found = {n: graph.add_input(n, TensorType(dtypes.f32, (BATCH, SEQ, width))) for n, width in widths.items()}
    given = {n: graph.add_param(n, TensorType(dtypes.f32, x.shape), Source(n)) for n, x in tensors.items()}
    if rope:
        at = graph.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
        for name, count in (("q", heads), ("k", kv_heads)):
            found[name] = ops.rope(found[name], at, given["frequencies"], heads=count)
    if latent:
        given.pop("v_scale")
    given.pop("frequencies")
    y = ops.attention(**found, **given, heads=heads, kv_heads=kv_heads, causal=True, cache_bits=bits, **attrs)
    graph.add_output("y", y)
    return graph


def between_codes(rng: np.random.Generator, shape: tuple[int, ...], scale: Array, bits: int) -> Array:
    """Return values far from the middle between two codes; about one in ten is beyond the last code."""
    limit = 1 << (bits - 1)
    whole = rng.integers(int(-1.1 * limit), int(1.1 * limit), shape)
    return (whole + rng.uniform(-0.4, 0.4, shape)) * scale.astype(np.float64)


def turned(x: Array, heads: int, by: float) -> Array:
    """Return x [batch, n, heads · d] rotated to its positions, or with `by` −1 back from them."""
    apart = x.reshape(*x.shape[:2], heads, 2, -1)
    turn = np.exp(1j * by * np.arange(x.shape[1])[:, None, None] * FREQUENCIES[: apart.shape[-1]])
    z = (apart[..., 0, :] + 1j * apart[..., 1, :]) * turn
    return np.stack([z.real, z.imag], -2).reshape(x.shape)


def drawn(
    graph: Graph, batch: int, length: int = LENGTH, v_scale: str = "v_scale"
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return inputs of `graph`, and those of the formula: queries and keys rotated, keys and values rounded."""
    rng, (node,) = np.random.default_rng(7), [n for n in graph.nodes if n.op is ops.attention]
    bits, heads = node.attrs["cache_bits"], {"q": node.attrs["heads"], "k": node.attrs["kv_heads"]}
    rope = any(n.op is ops.rope for n in graph.nodes)
    inputs, meant = {}, {}
    for name in (n for n in "qkv" if n in graph.inputs):
        shape = (batch, length, graph.inputs[name].width)
        if name == "q":
            meant[name] = rng.standard_normal(shape)
        else:
            scale = graph.params[v_scale if name == "v" else "k_scale"].recipe.evaluate(graph.reader)
            stored = between_codes(rng, shape, scale, bits)
            meant[name] = rounded(stored, scale, bits)[1]
        raw = meant[name] if name == "q" else stored
        inputs[name] = turned(raw, heads[name], -1) if rope and name != "v" else raw
    return inputs, meant


def every(i: Array, j: Array) -> Array:
    return i + j >= 0


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "rotated": ({"rope": True}, {}),
    "capped": ({"softcap": 3.0}, {"softcap": 3.0}),
    "sinks": ({"sinks": np.array([0.5, -1.0, 2.0, 0.0])}, {"sinks": np.array([0.5, -1.0, 2.0, 0.0])}),
    "one KV head": ({"kv_heads": 1}, {"kv_heads": 1}),
    "many KV heads": ({"kv_heads": 4}, {"kv_heads": 4}),
}


@pytest.mark.parametrize("target", TARGETS_ON_CPU)
@pytest.mark.parametrize("per", ["channel", "head", "tensor"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_steps_match_the_formula(variant: str, bits: int, per: str, target: str) -> None:
    attrs, meaning = VARIANTS[variant]
    graph = coded(bits, per, **attrs)
    decoding = Decoding(graph, target, 1, 32)
    assert ("GroupQueryAttention" in decoding.ops) == (target == "ort-cpu")
    inputs, meant = drawn(graph, 1)
    found = decoding.chunks(inputs, (6, 1, 1, 5, 1, 3))
    np.testing.assert_allclose(found, formula(meant, every, **meaning), atol=2e-5)


@pytest.mark.parametrize("target", TARGETS_ON_CPU)
@pytest.mark.parametrize("bits", [8, 4])
def test_cache_stores_codes(bits: int, target: str) -> None:
    graph = coded(bits, "channel", rope=True)
    decoding = Decoding(graph, target, 2, 20)
    inputs, _ = drawn(graph, 2)
    decoding.chunks(inputs, (LENGTH,))
    decoded = {}
    for name, cache in decoding.caches.items():
        halves = (cache.astype(int) & 15) - 8, (cache.astype(int) >> 4) - 8
        decoded[name] = cache if bits == 8 else np.stack(halves, -1).reshape(*cache.shape[:-1], -1)
    for part, name in (("key", "k"), ("value", "v")):
        scale = graph.params[f"{name}_scale"].recipe.evaluate(graph.reader)
        stored = turned(inputs[name], KV_HEADS, 1) if name == "k" else inputs[name]
        codes = rounded(stored, scale, bits)[0].reshape(2, LENGTH, KV_HEADS, 8).transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(decoded[f"past_key_values.0.{part}"][:, :, :LENGTH], codes)


@pytest.mark.parametrize("target", TARGETS_ON_CPU)
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_cache_with_a_window(bits: int, dim: int, rolling: bool, target: str) -> None:
    """Also in caches that roll; ONNX Runtime's kernel rolls codes of wide heads only."""
    graph = coded(bits, "channel", dim, window=4)
    decoding = Decoding(graph, target, 1, 32, "kv-cache, rolling-buffer" if rolling else "kv-cache")
    by_kernel = target == "ort-cpu" and (dim == 32 or not rolling)
    assert ("GroupQueryAttention" in decoding.ops) == by_kernel
    inputs, meant = drawn(graph, 1)
    found = decoding.chunks(inputs, (6, 1, 1, 5, 1, 3))
    np.testing.assert_allclose(found, formula(meant, lambda i, j: abs(i - j) < 4, dim=dim), atol=2e-5)


@pytest.mark.parametrize("target", TARGETS_ON_CPU)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_latent_cache(bits: int, target: str) -> None:
    graph = coded(bits, "channel", kv_heads=1, latent=6, value_dim=6)
    inputs, meant = drawn(graph, 2)
    found = Decoding(graph, target, 2, 32).chunks(inputs, (6, 1, 1, 5, 1, 3))
    np.testing.assert_allclose(found, formula(meant, every, kv_heads=1, value_dim=6), atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("target", TARGETS_ON_CPU)
def test_batch_rows_step_independently(target: str, bits: int) -> None:
    graph = coded(bits, "channel", rope=True)
    inputs, meant = drawn(graph, 3)
    decoding = Decoding(graph, target, 3, 32)
    found = decoding.chunks(inputs, (9, *(1,) * 8))
    np.testing.assert_allclose(found, formula(meant, every), atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_interpreter_agrees_with_the_formula(bits: int) -> None:
    graph = coded(bits, "channel", rope=True, window=5, softcap=2.0)
    inputs, meant = drawn(graph, 2)
    at = np.tile(np.arange(LENGTH), (2, 1))
    found = interpret(graph, {**inputs, "position_ids": at})["y"]
    wanted = formula(meant, lambda i, j: abs(i - j) < 5, softcap=2.0)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_mixed_scales_use_standard_operators() -> None:
    """Standard operators compute what the fused kernel refuses, on the same target."""
    graph = coded(8, "channel")
    (node,) = [n for n in graph.nodes if n.op is ops.attention]
    reader = graph.reader
    assert isinstance(reader, MemoryReader)
    reader.arrays["one"] = np.array([0.0125], np.float32)
    one = graph.add_param("one", TensorType(dtypes.f32, (1,)), Source("one"))
    node.set_input(node.op.operand_index("v_scale"), one)
    graph.erase_param(graph.params["v_scale"])
    decoding = Decoding(graph, "ort-cpu", 1, 32)
    assert "GroupQueryAttention" not in decoding.ops
    cached = next(n for n in decoding.graph.nodes if n.op is ops.attention)
    refused = LOWERINGS["attention"][0].find_refusal(cached, TARGETS["ort-cpu"])
    assert refused == "the kernel takes scales of channels for keys and values, or one for each, not both"
    inputs, meant = drawn(graph, 1, v_scale="one")
    np.testing.assert_allclose(decoding.chunks(inputs, (6, 1, 10)), formula(meant, every), atol=2e-5)
