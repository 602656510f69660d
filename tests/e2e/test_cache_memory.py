"""Memory of window and latent caches: reported before compiling, written into the manifest, and allocated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.frontends.api.inspect.counting import inspect
from weft.frontends.api.source.sources import load_source
from weft.ir import Graph
from weft.passes import run_passes


def block(**options: int) -> Block:
    return Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000), **options), GatedMLP(48), norm=RMSNorm(1e-6))


def cache_bytes(graph: Graph, length: int) -> int:
    """Of the inputs of a cached graph in f32, for texts of `length` tokens."""
    shapes = [
        v.type.concrete({"batch": 1, "capacity": length}) for n, v in graph.inputs.items() if n.startswith("past")
    ]
    return sum(4 * int(np.prod(shape)) for shape in shapes)


def test_mistral_at_32k_needs_an_eighth() -> None:
    model = load_source("mistral-7b")
    rolling = run_passes(model.graph, "default")
    full = run_passes(model.graph, "default, -rolling-buffer")
    assert cache_bytes(rolling, 32_768) * 8 == cache_bytes(full, 32_768) == 32 * 2 * 8 * 128 * 32_768 * 4
    facts = inspect(model)
    assert facts.cache_per_token is not None
    assert facts.cache_at_context == facts.cache_per_token * 32_768 // 8
    assert facts.cache_at_context * 4 == cache_bytes(rolling, 32_768)


def test_deepseek_v3_leaves_its_latent() -> None:
    facts = inspect(load_source("deepseek-v3"))
    assert facts.cache_per_token == 576 * 61


def test_the_runtime_allocates_that(tmp_path: Path) -> None:
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


def test_a_latent_is_allocated_once(tmp_path: Path) -> None:
    mixer = MLA(heads=4, rank=24, head_dim=8, rope_dim=8, v_head_dim=8, rope=RoPE(10_000))
    model = Decoder(vocab=64, dim=64, layers=2, block=Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6)), context=128)
    weft.compile(model, tmp_path / "out")
    assert weft.load(tmp_path / "out").decoder.cache_bytes(3, 128) == 3 * 128 * (24 + 8) * 2 * 4
