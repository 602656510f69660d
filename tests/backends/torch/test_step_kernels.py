"""Decode steps whose kernels run block by block, in Triton's interpreter: every pattern once, in one layer.

`make test` takes each second pattern; every kernel is in one of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from weft import (
    MLA,
    MLP,
    MLSTM,
    RGLRU,
    SLSTM,
    ALiBi,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LightningAttention,
    LinearAttention,
    Mamba,
    Mamba2,
    MoE,
    RMSNorm,
    RoPE,
    Router,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVTimeMix,
)
from weft.backends.torch.kernels.shared import launch
from weft.ir import Graph

from ...e2e.random_models import strong
from ...lowered import build_module, build_step, write_step
from ...passes.zoo_variants import BIASED, FEED, HIDDEN, Elman, attends, decoder, feeds
from ...sampling import each
from .generated import assert_close, call, tolerance

PROMPT, STEPS = 4, 2
MODELS = {  # and the kernels of each
    "grouped": (attends(), "norm_qkv decode_attention linear_residual norm_glu norm_linear"),
    "norms of q and k": (attends(qk_norm=RMSNorm()), "norm_qkv decode_attention"),
    "sandwich": (feeds(FEED, arrangement="sandwich"), "linear_residual"),
    "biases and layer norm": (
        decoder(attends(**BIASED).block.attn, GatedMLP(HIDDEN, bias=True), norm=LayerNorm()),
        "norm_qkv linear_residual norm_glu",
    ),
    "parallel, ungated": (feeds(MLP(HIDDEN, "relu2"), arrangement="parallel"), "linear_residual norm_linear"),
    "window, sinks, cap": (attends(window=3, keep_first=1, sinks=True, softcap=2.0), "norm_qkv decode_attention"),
    "chunks": (attends(pattern="chunked", stride=3), "norm_qkv decode_attention"),
    "dilated window": (attends(window=4, pattern="dilated", stride=2), "norm_qkv decode_attention"),
    "ALiBi": (attends(rope=None, bias=ALiBi()), "norm_qkv decode_attention"),
    "experts": (
        feeds(MoE(4, 7, 2, "swish(1.702)", bias=True, limit=7.0, shift=1.0, shared=GatedMLP(5))),
        "norm_route moe_decode norm_glu linear_residual",
    ),
    "groups of experts": (
        feeds(MoE(6, 7, 3, router=Router(scoring="sigmoid", correction=True, groups=3, top_groups=2, scale=2.5))),
        "norm_route moe_decode",
    ),
    "limited gate": (feeds(GatedMLP(HIDDEN, "swish(1.702)", bias=True, limit=0.5)), "norm_glu"),
    "latent": (decoder(MLA(3, 9, 5, 4, 7, RoPE(interleaved=True))), "latent_decode latent_qk linear_by_head"),
    "Mamba": (decoder(Mamba(21, 5), None), "conv_step selective_step"),
    "Mamba, norms": (decoder(Mamba(21, 5, norms=RMSNorm()), None), "conv_step selective_step"),
    "Mamba-2": (decoder(Mamba2(21, 3, 5), None), "conv_step ssd_step"),
    "Mamba-2 in groups": (decoder(Mamba2(24, 4, 5, groups=2, norm_groups=2), None), "conv_step ssd_step"),
    "delta rule": (decoder(GatedDeltaNet(4, 3, 5, groups=2, negative=True), None), "conv_step matrix_step"),
    "delta rule by key": (decoder(GatedDeltaNet(3, 5, per_key=True, rank=7), None), "conv_step matrix_step"),
    "lightning attention": (decoder(LightningAttention(3), None), "matrix_step"),
    "linear attention": (decoder(LinearAttention(3, bias=True), None), "matrix_step"),
    "linear attention, turned": (decoder(LinearAttention(3, RoPE()), None), "matrix_step"),
    "mLSTM": (decoder(MLSTM(3, 12, 21), None), "matrix_step shared.recurrence"),
    "RWKV-6": (decoder(RWKV6TimeMix(3, 4, 5), None), "conv_step matrix_step"),
    "RWKV-7": (decoder(RWKV7TimeMix(3, 4, 5, 6, keep_values="v"), None), "conv_step shared.recurrence"),
    "RWKV": (decoder(RWKVTimeMix(21), None), "conv_step shared.recurrence"),
    "RG-LRU": (decoder(RGLRU(3, 21), None), "conv_step linear_by_head shared.recurrence"),
    "sLSTM": (decoder(SLSTM(3), None), "shared.recurrence"),
    "matrix of a state": (decoder(Elman(), None), "shared.recurrence"),
    "full norms of q and k": (attends(qk_norm=RMSNorm(), qk_norm_full=True), "decode_attention"),
}


def one_layer(name: str) -> Graph:
    return strong(replace(MODELS[name][0], layers=1).graph())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on the CPU, and nothing in their place, in modules that no other test sees."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    others = generated()
    yield
    generated()
    sys.modules.update(others)


def generated() -> dict[str, ModuleType]:
    """Take all modules of generated text from those that are imported."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("weft_generated_")}


@pytest.mark.halved
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", each(2, MODELS))
def test_decode_step_kernels_agree_with_the_module(
    name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, expected = one_layer(name), set(MODELS[name][1].split())
    _, files = write_step(graph)
    assert expected <= set(files)
    for file in files:  # kernels, and what launches those that are generated
        home = importlib.import_module(f"weft.backends.torch.kernels.{file}")
        launcher = "step_in_place" if file == "shared.recurrence" else file
        if hasattr(home, launcher):
            monkeypatch.setattr(home, launcher, partial(getattr(home, launcher), kernel=True))
    module: Any = build_module(graph).eval()
    ids = torch.randint(1, 9, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(5))
    (whole, *_) = call(module, {"input_ids": ids})
    step = build_step(graph, module)
    with torch.inference_mode():
        cache = module.new_cache(2, PROMPT + STEPS)
        call(module, {"input_ids": ids[:, :PROMPT], "cache": cache})
        for i in range(PROMPT, PROMPT + STEPS):
            got = step(ids[:, i : i + 1], torch.full((2, 1), i), cache)
            assert_close(got, whole[:, i : i + 1].double().numpy(), tolerance(graph, torch.float32))
