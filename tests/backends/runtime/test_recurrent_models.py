"""Whole models with recurrences, compiled and run by the runtime, against the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft.frontends.dsl import (
    Attention,
    Block,
    Decoder,
    GatedMLP,
    LinearAttention,
    Mamba,
    Mamba2,
    MoE,
    RelativeAttention,
    RMSNorm,
    RoPE,
)
from weft.ir import interpret

TOKENS = 70
FFN, ROPE = GatedMLP(20), RoPE(100)
MAMBA, MAMBA2 = Mamba(32, state=4), Mamba2(32, heads=4, state=6, groups=2)
LOCAL = Attention(heads=3, kv_heads=1, rope=ROPE, window=5)


def decoder(*blocks: Block) -> Decoder:
    return Decoder(61, 24, blocks, context=128)


def plain(*mixers: object) -> Decoder:
    return decoder(*(Block(mixer, FFN, norm=RMSNorm(1e-5)) for mixer in mixers))


MODELS = {
    "mamba": decoder(Block(MAMBA, norm=RMSNorm(1e-5)), Block(MAMBA, norm=RMSNorm(1e-5))),
    "mamba2": plain(MAMBA2, MAMBA2),
    "linear": plain(LinearAttention(3), LinearAttention(2, rope=ROPE)),
    "shaw": plain(RelativeAttention(3, clip=4), RelativeAttention(2, clip=2, values=False)),
    "hybrid": plain(MAMBA, LOCAL, MAMBA2, LinearAttention(2)),
    "experts": decoder(Block(MAMBA, MoE(4, 8, 2), norm=RMSNorm(1e-5)), Block(LOCAL, FFN, norm=RMSNorm(1e-5))),
}


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_prompts_give_the_logits_of_one_pass(name: str, target: str, tmp_path: Path) -> None:
    report = weft.compile(MODELS[name], tmp_path / "out", target=target, passes="default,-last-token-logits")
    ids = np.random.default_rng(3).integers(0, 61, TOKENS)
    graph = report.model.graph
    inputs = {"input_ids": ids[None], "position_ids": np.arange(TOKENS)[None]}
    wanted = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})["logits"][0]
    ours = weft.load(tmp_path / "out")
    for chunk in (TOKENS, 33, 1):
        found = ours.logits(ids.tolist(), chunk=chunk)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_pruned_logits_generate_the_same_tokens(tmp_path: Path) -> None:
    for name, passes in (("full", "default,-last-token-logits"), ("pruned", "default")):
        weft.compile(MODELS["hybrid"], tmp_path / name, passes=passes)
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8] * 40]
    full, pruned = (weft.load(tmp_path / name).generate(prompts, max_tokens=9) for name in ("full", "pruned"))
    assert [r.tokens for r in full] == [r.tokens for r in pruned]
    alone = [weft.load(tmp_path / "pruned").generate([p], max_tokens=9)[0] for p in prompts]
    assert [r.tokens for r in alone] == [r.tokens for r in pruned]
