"""Caches of 8 and 4 bits in generated models: the interpreter's numbers however a text is cut, in so many bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, Mask, RMSNorm, RoPE
from weft.backends.runtime.torch import module_caches as caches
from weft.ir import Graph, interpret
from weft.passes import run_passes

from ....e2e.random_models import strong
from ....lowered import build_module
from ....sampling import each

LENGTH = 13
CUTS = ((13,), (1,) * 13, (5, 1, 4, 3))


def model(attention: Any) -> Decoder:
    return Decoder(vocab=23, dim=16, layers=2, block=Block(attention, GatedMLP(24), norm=RMSNorm()), context=64)


MODELS = {
    "grouped": model(Attention(heads=4, kv_heads=2, rope=RoPE())),
    "window": model(Attention(heads=4, kv_heads=2, rope=RoPE(), window=4)),
    "first keys, sinks, cap": model(
        Attention(heads=4, kv_heads=1, window=4, sinks=True, softcap=2.0, mask=Mask(keep_first=1))
    ),
    "latent": model(MLA(heads=2, rank=8, head_dim=8, rope_dim=4, v_head_dim=8, rope=RoPE())),
}


def coded(name: str, bits: int, per: str = "channel") -> Graph:
    return run_passes(strong(MODELS[name].graph()), f"quantize-cache{{bits={bits}, per={per}}}")


@pytest.mark.parametrize(
    ("name", "bits", "per"), each(5, itertools.product(MODELS, (8, 4), ("channel", "head", "tensor")))
)
def test_quantized_caches_agree_with_the_interpreter_in_any_pieces(name: str, bits: int, per: str) -> None:
    """In float64, where no number is rounded to another code."""
    graph = coded(name, bits, per)
    ids = np.random.default_rng(4).integers(0, 23, (2, LENGTH))
    at = np.tile(np.arange(LENGTH), (2, 1))
    inputs = {n: {"input_ids": ids, "position_ids": at}[n] for n in graph.inputs}
    wanted = interpret(graph, inputs)["logits"]
    module: Any = build_module(graph, dtype=torch.float64).eval()
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        np.testing.assert_allclose(module(tokens).numpy(), wanted, atol=1e-6 * np.abs(wanted).max())
        for cuts in CUTS:
            cache = module.new_cache(2, LENGTH)
            parts = [module(part, cache=cache) for part in tokens.split(cuts, 1)]
            found = torch.cat(parts, 1).numpy()
            np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


def test_4_bit_caches_change_the_logits() -> None:
    """The check above can fail: 4 bits are not the numbers themselves."""
    plain: Any = build_module(strong(MODELS["grouped"].graph()), dtype=torch.float64).eval()
    module: Any = build_module(coded("grouped", 4), dtype=torch.float64).eval()
    ids = torch.arange(LENGTH)[None]
    apart = (plain(ids) - module(ids)).abs().max() / plain(ids).abs().max()
    assert apart > 1e-3


@pytest.mark.parametrize(("bits", "bytes"), [(8, 1), (4, 0.5)])
def test_quantized_caches_take_8_or_4_bits_per_value(bits: int, bytes: float) -> None:
    module: Any = build_module(coded("grouped", bits)).eval()
    assert caches.count_bytes(module.new_cache(3, 20)) == 2 * 2 * 3 * 20 * 2 * 4 * bytes


def test_cache_scales_stay_f32_when_the_model_is_cast() -> None:
    module: Any = build_module(coded("grouped", 8)).eval().to(torch.bfloat16)
    scales = {n: b.dtype for n, b in module.named_buffers() if n.endswith("_scale")}
    assert len(scales) == 4
    assert {*scales.values()} == {torch.float32}
    assert not [n for n, _ in module.named_parameters() if n.endswith("_scale")]


@pytest.mark.parametrize("bits", [8, 4])
def test_folders_with_quantized_caches_generate_as_onnxruntime_does(bits: int, tmp_path: Path) -> None:
    source = strong(MODELS["grouped"].graph())
    pipeline = f"default, quantize-cache{{bits={bits}}}"
    for target in ("torch", "ort-cpu"):
        weft.compile(source, tmp_path / target, target=target, passes=pipeline, max_length=32)
    runners: list[Any] = [weft.load(tmp_path / target, "cpu", trust=True) for target in ("torch", "ort-cpu")]
    for prompts in ([[3, 1, 4, 1, 5]], [[2, 7, 1], [8, 2, 8, 1, 8, 2]]):
        found = [[r.tokens for r in runner.generate(prompts, max_tokens=12)] for runner in runners]
        assert found[0] == found[1]
    assert runners[1].decoder.cache_bytes(1, 32) == 2 * 2 * 32 * 2 * 4 * bits // 8
