"""Passes are linear in the number of layers, and quick: 126 layers of Llama 3.1 405B."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from weft import MLP, Attention, Block, Decoder, Encoder, LayerNorm, LearnedPositions, MoE, RoPE
from weft.frontends.presets import PRESETS
from weft.ir import Graph, WeftError
from weft.passes import Pass, Trace, run_passes

from .test_every_pass import examples

FUSED = "default, fold-norm-scale, fuse-norm-linear"
LLAMA = PRESETS["llama3.1-405b"].model()
PLAIN = Block(Attention(heads=8), MLP(64), LayerNorm())
POST = replace(PLAIN, arrangement="post")
NOISY = Block(Attention(heads=8, kv_heads=2, rope=RoPE()), MoE(4, 16, 2, noisy=True))
# The first on which a pass does not refuse is that of its test.
MODELS: dict[str, Callable[[int], Graph]] = {
    "llama": lambda layers: replace(LLAMA, layers=layers).graph(),
    "with caches": lambda layers: run_passes(MODELS["llama"](layers), "kv-cache"),
    "no positions": lambda layers: Decoder(97, 32, layers, PLAIN, context=64).graph(),
    "no weights in norms": lambda layers: run_passes(MODELS["llama"](layers), "fold-norm-scale"),
    "token types": lambda layers: Encoder(97, 32, layers, POST, LearnedPositions(64), token_types=2).graph(),
    "noisy experts": lambda layers: Decoder(97, 32, layers, NOISY, context=64).graph(),
}


@functools.cache
def made(model: str, layers: int) -> Graph:
    return MODELS[model](layers)


def calls(graph: Graph, *passes: Pass) -> int:
    """How many functions a run of `passes` calls: unlike its time, the same in every run."""
    copy, profile = graph.clone(), cProfile.Profile()
    for applied in passes:
        with contextlib.suppress(WeftError), profile:
            applied.run(copy, Trace())
    return sum(entry.callcount for entry in profile.getstats())


def suited(applied: Pass) -> str:
    """The model on which `applied` does its work."""
    for model in MODELS:
        with contextlib.suppress(WeftError):
            applied.run(made(model, 4).clone(), Trace())
            return model
    raise AssertionError(f"no model suits {applied}")


@pytest.mark.parametrize("applied", examples().values(), ids=str)
def test_a_pass_is_linear(applied: Pass) -> None:
    model = suited(applied)
    few, more, most = (calls(made(model, layers), applied) for layers in (32, 64, 128))
    assert most - more <= 2.1 * (more - few)


def test_exact_passes_together_are_linear() -> None:
    exact = [applied for applied in examples().values() if applied.effect == "exact" and suited(applied) == "llama"]
    few, more, most = (calls(made("llama", layers), *exact) for layers in (32, 64, 128))
    assert most - more <= 2.1 * (more - few)


def test_a_pipeline_is_quick() -> None:
    graph, taken = made("llama", 126), []
    for _ in range(3):
        start = time.process_time()
        run_passes(graph, FUSED)
        taken.append(time.process_time() - start)
    assert min(taken) <= 2
