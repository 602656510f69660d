"""Memory of window and latent caches: reported before compiling, written into the manifest, and allocated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.app.api.source.sources import load_source
from weft.ir import Graph, interpret
from weft.ir.recipes.readers import Array
from weft.passes import run_passes


def block(**options: int) -> Block:
    return Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000), **options), GatedMLP(48), norm=RMSNorm(1e-6))


def cache_bytes(graph: Graph, length: int) -> int:
    """Of the inputs of a cached graph in f32, for texts of `length` tokens."""
    shapes = [
        v.type.concrete({"batch": 1, "capacity": length}) for n, v in graph.inputs.items() if n.startswith("past")
    ]
    return sum(4 * int(np.prod(shape)) for shape in shapes)


def test_mistral_window_cache_at_32k_takes_an_eighth() -> None:
    model = load_source("mistral-7b")
    rolling = run_passes(model.graph, "default")
    full = run_passes(model.graph, "default, -rolling-buffer")
    assert cache_bytes(rolling, 32_768) * 8 == cache_bytes(full, 32_768) == 32 * 2 * 8 * 128 * 32_768 * 4
    facts = inspect(model)
    assert facts.cache_per_token is not None
    assert facts.cache_at_context == facts.cache_per_token * 32_768 // 8
    assert facts.cache_at_context * 4 == cache_bytes(rolling, 32_768)


def test_deepseek_v3_caches_only_its_latent() -> None:
    facts = inspect(load_source("deepseek-v3"))
    assert facts.cache_per_token == 576 * 61


def test_runtime_allocates_the_reported_bytes(tmp_path: Path) -> None:
    sizes = {}
    for name, layers in {"local": [block(window=16)] * 2, "mixed": [block(window=16), block()]}.items():
        for passes in ("default", "default, -rolling-buffer"):
            model = Decoder(vocab=64, dim=64, layers=layers, context=128)
            weft.compile(model, tmp_path / "out", passes=passes)
            sizes[name, passes] = weft.load(tmp_path / "out").decoder.cache_bytes(1, 128)
            records = json.loads((tmp_path / "out" / "weft.json").read_text())["cache"]
            rows = (r["kv_heads"] * r["head_dim"] * (2 - r["latent"]) * (r["capacity"] or 128) for r in records)
            assert sizes[name, passes] == 4 * sum(rows)
    assert sizes["local", "default"] * 8 == sizes["local", "default, -rolling-buffer"]
    assert sizes["mixed", "default"] * 16 == sizes["mixed", "default, -rolling-buffer"] * 9


def test_latent_cache_is_allocated_once(tmp_path: Path) -> None:
    mixer = MLA(heads=4, rank=24, head_dim=8, rope_dim=8, v_head_dim=8, rope=RoPE(10_000))
    model = Decoder(vocab=64, dim=64, layers=2, block=Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6)), context=128)
    weft.compile(model, tmp_path / "out")
    assert weft.load(tmp_path / "out").decoder.cache_bytes(3, 128) == 3 * 128 * (24 + 8) * 2 * 4


def shared(readers: int) -> Decoder:
    """A layer that keeps its keys and values, and `readers` of them."""
    layers = [block(keep_kv="memory"), *[block(share_kv="memory")] * readers]
    return Decoder(vocab=64, dim=64, layers=layers, context=128)


def whole(graph: Graph, ids: Array) -> Array:
    """The logits of a graph without caches."""
    at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return interpret(graph, {"input_ids": ids, "position_ids": at})["logits"]


@pytest.mark.parametrize("cache_dtype", ["", "int8", "int4"])
@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_readers_share_a_cache(target: str, cache_dtype: str, tmp_path: Path) -> None:
    """Find one cache for all readers, and the token of the largest logit of the interpreter at every call."""
    sizes, told = {}, {}
    for readers in (0, 3):
        out = tmp_path / f"{readers}"
        weft.compile(shared(readers), out, target=target, cache_dtype=cache_dtype)
        sizes[readers] = weft.load(out).decoder.cache_bytes(2, 100)
        told[readers] = inspect(load_source(shared(readers))).cache_per_token
    assert sizes[0] == sizes[3] and told[0] == told[3] == 64
    graph = shared(3).graph()
    if bits := cache_dtype.removeprefix("int"):
        graph = run_passes(graph, f"quantize-cache{{bits={bits}}}")
    ids = list(range(3, 12))
    for token in weft.load(tmp_path / "3").generate([ids], max_tokens=20)[0].tokens:
        ids.append(token)
        logits = whole(graph, np.array([ids[:-1]]))[0, -1]
        assert logits[token] > logits.max() - 1e-4


def test_readers_share_a_cache_in_pytorch() -> None:
    graph = shared(3).graph()
    module = weft.torch(shared(3))
    cache = module.new_cache(2, 100)
    assert len(cache) == 1 and cache[0].k.shape == (2, 2, 100, 16)
    ids = np.random.default_rng(0).integers(0, 64, (2, 12))
    with torch.no_grad():
        parts = [module(torch.tensor(ids[:, a:b]), cache=cache) for a, b in ((0, 5), (5, 9), (9, 12))]
    assert np.abs(torch.cat(parts, 1).numpy() - whole(graph, ids)).max() < 1e-5
