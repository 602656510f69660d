"""Passes are linear in the number of layers, and quick: 126 layers of Llama 3.1 405B."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from weft import (
    MLP,
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    LayerNorm,
    LearnedPositions,
    MoE,
    RoPE,
    Router,
)
from weft.frontends.models.presets import PRESETS
from weft.ir import Graph, WeftError, ops
from weft.passes import Pass, Trace, default_pipeline, parse_pipeline, run_passes

from ....e2e.random_models import strong
from ....sampling import ALL
from ...test_every_pass import examples
from ...zoo_variants import VARIANTS

FUSED = "default, fold-norm-scale, fuse-norm-linear"
LLAMA = PRESETS["llama3.1-405b"].model()
PLAIN = Block(Attention(heads=4), MLP(64), LayerNorm())
POST = replace(PLAIN, arrangement="post")
SHORT = Block(Attention(heads=4, rope=RoPE()), MLP(64))
BOTH = Block(Attention(heads=4, rope=RoPE()), MLP(64), cross=CrossAttention(heads=4))
NOISY = Block(Attention(heads=8, kv_heads=2, rope=RoPE()), MoE(4, 16, 2, router=Router(noisy=True)))


def variant(name: str, layers: int) -> Graph:
    model = VARIANTS[name]
    assert isinstance(model, Decoder)
    return strong(replace(model, layers=layers).graph())


def littered(layers: int) -> Graph:
    """A model with parameters that are computed, values that are made twice, and one that nothing reads."""
    graph = variant("grouped", layers)
    for norm in [node for node in graph.nodes if node.op is ops.rms_norm]:
        x, weight = norm.inputs
        with graph.inserting(before=norm):
            ops.exp(x)
            norm.set_input(0, ops.add(ops.neg(x), ops.neg(x)))
            norm.set_input(1, ops.neg(weight))
    return graph


def rotating(layers: int) -> Graph:
    """A model whose frequencies depend on the length of texts, in every layer others."""
    ropes = [RoPE(theta=1e4 + i, scaling="dynamic", factor=2.0, original=16) for i in range(layers)]
    blocks = [Block(Attention(heads=4, rope=rope), MLP(64)) for rope in ropes]
    return Decoder(97, 32, blocks, context=64).graph()


# A pass is tried on the first on which it rewrites something.
MODELS: dict[str, Callable[[int], Graph]] = {
    "llama": lambda layers: replace(LLAMA, layers=layers).graph(),
    "llama, packed": lambda layers: run_passes(MODELS["llama"](layers), "pack-qkv, fuse-residual-norm"),
    "products": lambda layers: run_passes(MODELS["llama"](layers), "fuse-norm-linear{fold=false}"),
    "routed": lambda layers: run_passes(variant("experts", layers), "fuse-mixture, fuse-norm-linear{fold=false}"),
    "with caches": lambda layers: run_passes(variant("window", layers), "kv-cache"),
    "no positions": lambda layers: Decoder(97, 20, layers, PLAIN, context=64).graph(),
    "no weights in norms": lambda layers: run_passes(MODELS["llama"](layers), "fold-norm-scale"),
    "token types": lambda layers: Encoder(97, 20, layers, POST, LearnedPositions(64), token_types=2).graph(),
    "heads of four pairs": lambda layers: Decoder(97, 32, layers, SHORT, context=64).graph(),
    "noisy experts": lambda layers: Decoder(97, 32, layers, NOISY, context=64).graph(),
    "littered": littered,
    "caches that roll": lambda layers: run_passes(variant("window", layers), "kv-cache, rolling-buffer"),
    "another rotation in every layer": rotating,
    "floats of 4 bits": lambda layers: run_passes(variant("grouped", layers), "quantize{format=mxfp4}"),
    "bf16": lambda layers: run_passes(variant("grouped", layers), "cast{dtype=bf16}"),
    "two sides": lambda layers: EncoderDecoder(Encoder(97, 32, layers, SHORT), Decoder(97, 32, layers, BOTH)).graph(),
    **{name: functools.partial(variant, name) for name in VARIANTS if isinstance(VARIANTS[name], Decoder)},
}


LAYERS = (16, 32, 64) if ALL else (8, 16, 32)
# Of the calls for the second half of the most layers, over those for the quarter before it: more where 0.05 % of a
# layer's are squared.
GROWTH = 2.05 if ALL else 2.025
HUGE = ("llama", "llama, packed", "no weights in norms", "products")
COMPUTING = (
    "quantize-cache",
    "scale-channels",
    "prune-neurons",
    "compress-to-mla",
)  # passes that compute activations or read weights


@functools.cache
def made(model: str, layers: int) -> Graph:
    return MODELS[model](layers)


def calls(graph: Graph, *passes: Pass) -> int:
    """Count the function calls in a run of `passes`: unlike its time, the same in every run."""
    copy, profile = graph.clone(), cProfile.Profile()
    gc.disable()  # it calls what weak references to the garbage of others ask for
    try:
        for applied in passes:
            with contextlib.suppress(WeftError), profile:
                applied.run(copy, Trace())
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def suited(applied: Pass) -> str:
    """The model on which `applied` does its work."""
    # The weights of 405 B parameters take hours to draw, for whoever computes with them.
    for model in [name for name in MODELS if not (applied.name in COMPUTING and name in HUGE)]:
        trace = Trace()
        with contextlib.suppress(WeftError):
            applied.run(made(model, 4).clone(), trace)
        if trace.rewrites:
            return model
    raise AssertionError(f"{applied} rewrites no model")


@pytest.mark.long
@pytest.mark.parametrize("applied", examples().values(), ids=str)
def test_pass_time_is_linear_in_layers(applied: Pass) -> None:
    model = suited(applied)
    few, more, most = (calls(made(model, layers), applied) for layers in LAYERS)
    assert most - more <= GROWTH * (more - few)


@pytest.mark.long
def test_exact_pipeline_time_is_linear_in_layers() -> None:
    exact = [applied for applied in examples().values() if applied.effect == "exact" and suited(applied) == "llama"]
    few, more, most = (calls(made("llama", layers), *exact) for layers in LAYERS)
    assert most - more <= GROWTH * (more - few)


def test_default_pipeline_time_is_linear_in_layers() -> None:
    """With the caches that it makes, which are inputs and outputs of every layer."""
    graphs = (made("llama", layers) for layers in LAYERS)
    few, more, most = (calls(g, *parse_pipeline(FUSED, default_pipeline(g)).passes) for g in graphs)
    assert most - more <= GROWTH * (more - few)


@pytest.mark.long
def test_default_pipeline_is_fast_on_126_layers() -> None:
    graph, taken = made("llama", 126), []
    for _ in range(3):
        start = time.process_time()
        run_passes(graph, FUSED)
        taken.append(time.process_time() - start)
    assert min(taken) <= 2
