"""Random decoders whose layers attend to keys and values of others: caches as numbers and as codes, texts in calls of
any length, against one pass of the interpreter.

`make test` runs a tenth of them, ``WEFT_TESTS=all`` all.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import ALiBi, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.ir import Graph, interpret
from weft.ir.recipes.readers import Array
from weft.passes import run_passes

from ..sampling import each
from .test_genai import generated

VOCAB = 61


def drawn(seed: int) -> tuple[random.Random, Decoder]:
    """The model of a seed, and what draws how it is run."""
    r, kept, layers = random.Random(seed), list[str](), list[Block]()
    heads, kv_heads, width = r.choice([2, 4]), r.choice([1, 2]), r.choice([8, 16])
    for i in range(r.randint(2, 5)):
        options: dict[str, Any] = {"rope": RoPE()} if r.random() < 0.6 else {"bias": r.choice([ALiBi(), None])}
        more = {"window": r.choice([3, 5]), "softcap": 5.0, "sinks": True, "qk_norm": RMSNorm()}
        options |= {name: value for name, value in more.items() if r.random() < 0.3}
        if kept and r.random() < 0.6:
            options["share_kv"] = r.choice(kept)
        elif r.random() < 0.7:
            kept.append(f"m{i}")
            options["keep_kv"] = kept[-1]
        layers.append(Block(Attention(heads, kv_heads, width, **options), GatedMLP(40), RMSNorm(1e-6)))
    return r, Decoder(vocab=VOCAB, dim=32, layers=layers, context=40)


def whole(graph: Graph, ids: Array) -> Array:
    """The logits of one pass over ids [batch, seq]."""
    at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    given = {"input_ids": ids, "position_ids": at, "attention_mask": np.ones_like(ids)}
    return interpret(graph, {name: x for name, x in given.items() if name in graph.inputs})["logits"]


@pytest.mark.parametrize("seed", each(10, range(80)))
def test_shared_keys_on_onnxruntime_agree_with_one_pass(seed: int, tmp_path: Path) -> None:
    r, model = drawn(seed)
    target, dtype = r.choice(["onnx", "ort-cpu"]), r.choice(["", "int8", "int4"])
    weft.compile(model, tmp_path / "out", target=target, cache_dtype=dtype)
    bits = dtype.removeprefix("int")
    graph = run_passes(model.graph(), f"quantize-cache{{bits={bits}}}") if bits else model.graph()
    rows = [np.random.default_rng(seed + n).integers(3, VOCAB, n).tolist() for n in (5, 9, 2)]
    options: dict[str, Any] = r.choice([{}, {"chunk": 3}, {"chunk": 1}])
    for row, answer in zip(rows, weft.load(tmp_path / "out").generate(rows, max_tokens=14, **options), strict=True):
        ids = [*row, *answer.tokens]
        logits = whole(graph, np.array([ids[:-1]]))[0, len(row) - 1 :]
        chosen = np.take_along_axis(logits, np.array(answer.tokens)[:, None], 1)[:, 0]
        assert (chosen >= logits.max(1) - 2e-4 * np.maximum(1, abs(logits).max(1))).all()


@pytest.mark.parametrize("seed", each(10, range(80), first=5))
def test_shared_keys_on_pytorch_agree_with_one_pass(seed: int) -> None:
    _, model = drawn(seed)
    module, ids = weft.torch(model), np.random.default_rng(seed).integers(0, VOCAB, (2, 11))
    cache, cuts = module.new_cache(2, 30), (0, 4, 5, 9, 11)
    with torch.no_grad():
        parts = [module(torch.tensor(ids[:, a:b]), cache=cache) for a, b in itertools.pairwise(cuts)]
    assert np.abs(torch.cat(parts, 1).numpy() - whole(model.graph(), ids)).max() < 2e-5


def test_shared_keys_rotated_by_some_readers_are_quantized(tmp_path: Path) -> None:
    """The scales are fitted to keys as they are at all places, if any who read them are turned there."""
    ways = {"keep_kv": "memory"}, {"share_kv": "memory", "rope": RoPE()}
    blocks = [Block(Attention(2, 1, 8, **way), GatedMLP(40), RMSNorm(1e-6)) for way in ways]
    weft.compile(Decoder(VOCAB, 32, blocks, context=40), tmp_path / "out", cache_dtype="int8")
    assert len(weft.load(tmp_path / "out").generate([[3, 4]], max_tokens=3)[0].tokens) == 3


def test_rolling_4_bit_caches_work_with_a_bias(tmp_path: Path) -> None:
    """No operator attends so: the body of the op does, on bytes of two codes."""
    block = Block(Attention(4, 2, 8, window=3, bias=ALiBi()), GatedMLP(40), RMSNorm(1e-6))
    model = Decoder(VOCAB, 32, 2, block, context=40)
    graph = run_passes(model.graph(), "quantize-cache{bits=4}")
    weft.compile(model, tmp_path / "out", cache_dtype="int4")
    ids = [3, 4, 5, 6, 7]
    for token in weft.load(tmp_path / "out").generate([ids], max_tokens=9)[0].tokens:
        logits = whole(graph, np.array([ids]))[0, -1]
        assert logits[token] > logits.max() - 1e-4
        ids = [*ids, token]


def test_shared_keys_on_genai_agree_with_one_pass(tmp_path: Path) -> None:
    ways = {"window": 3}, {"keep_kv": "memory"}, {"share_kv": "memory"}, {"share_kv": "memory"}
    blocks = [Block(Attention(4, 2, 16, rope=RoPE(), **way), GatedMLP(40), RMSNorm(1e-6)) for way in ways]
    weft.compile(Decoder(VOCAB, 32, blocks, context=40), tmp_path / "out", max_length=40)
    prompt = [4, 9, 27, 20, 60]
    ours = weft.load(tmp_path / "out").generate([prompt], max_tokens=20)[0].tokens
    assert 0 not in ours  # which there would end the text
    assert generated(tmp_path / "out", prompt, 25) == [*prompt, *ours]
