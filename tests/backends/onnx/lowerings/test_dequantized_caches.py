"""Caches of 8 and 4 bits on both CPU targets: what they hold and what attention makes of it, against formulas.

Keys and values are chosen so that none lies between two codes: rounding in f32 and in f64 agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.backends.onnx.lowering import LOWERINGS
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes

from ..attention_models import BATCH, HEADS, KV_HEADS, SEQ, Array, Decoding, formula

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
