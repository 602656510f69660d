"""Tokens that compete for places at experts: what is run together must not take the places of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import (
    Attention,
    Block,
    BlockSparse,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    MoE,
    RMSNorm,
    RoPE,
)

NORM, SHAPE = RMSNorm(1e-6), (61, 32, 2)
ATTENTION = Attention(heads=4, kv_heads=2, rope=RoPE(100.0))
TEXTS = [[5, 9, 33, 2, 60, 7, 11], [1], [40, 41, 42], [3, 2, 1], list(range(20, 41))]
CLOSE: Any = {"rtol": 0, "atol": 1e-5}


def compiled(model: Any, folder: Path) -> Any:
    weft.compile(model, folder, seed=5)
    return weft.load(folder, device="cpu", threads=1)


def experts(**settings: Any) -> Block:
    return Block(ATTENTION, MoE(experts=4, hidden=24, k=1, **settings), NORM)


@pytest.mark.parametrize("choice", ["token", "expert"])
def test_batched_prompts_do_not_share_expert_capacity(choice: str, tmp_path: Path) -> None:
    decoder = compiled(Decoder(*SHAPE, experts(capacity=1.0, choice=choice), context=64), tmp_path / "out").decoder
    with decoder.context(len(TEXTS), 30) as context:
        together = context.prefill(TEXTS).copy()
    for text, row in zip(TEXTS, together, strict=True):
        with decoder.context(1, 30) as context:
            np.testing.assert_allclose(context.prefill([text])[0], row, **CLOSE)


@pytest.mark.parametrize(
    "settings", [{"choice": "expert"}, {"capacity": 1.0}, {"capacity": 3, "batched": True}], ids=str
)
def test_batched_encoder_inputs_do_not_share_expert_capacity(settings: dict[str, Any], tmp_path: Path) -> None:
    model = compiled(Encoder(*SHAPE, experts(**settings), context=64), tmp_path / "out")
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(model.encode(TEXTS), alone, **CLOSE)


@pytest.mark.parametrize("choice", ["token", "expert"])
def test_batched_sources_do_not_share_expert_capacity(choice: str, tmp_path: Path) -> None:
    reads = Encoder(*SHAPE, experts(capacity=1.0, choice=choice), context=64)
    writes = Decoder(*SHAPE, Block(ATTENTION, GatedMLP(24), NORM, cross=CrossAttention(4)), context=64)
    decoder = compiled(EncoderDecoder(reads, writes), tmp_path / "out").decoder
    turned = np.arange(len(TEXTS))[::-1].copy()
    with decoder.context(len(TEXTS), 30) as context:
        first = context.prefill(TEXTS).copy()
        context.gather_rows(turned)
        second = context.step([3] * len(TEXTS))[turned].copy()
    for i, text in enumerate(TEXTS):
        with decoder.context(1, 30) as context:
            np.testing.assert_allclose(first[i : i + 1], context.prefill([text]), **CLOSE)
            np.testing.assert_allclose(second[i : i + 1], context.step([3]), **CLOSE)


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
@pytest.mark.parametrize("dense", [0, 8])
def test_block_sparse_encoder_inputs_are_not_padded(dense: int, target: str, tmp_path: Path) -> None:
    """Padding would move the last block; texts of at most `dense` tokens see all keys, and run together."""
    block = Block(Attention(heads=4, mask=BlockSparse(4, dense=dense)), GatedMLP(24), NORM)
    weft.compile(Encoder(*SHAPE, block, context=64), tmp_path / "out", seed=5, target=target)
    model, texts = weft.load(tmp_path / "out", device="cpu", trust=True), [*TEXTS, list(range(3, 22))]
    alone = np.concatenate([model.encode([text]) for text in texts])
    np.testing.assert_allclose(model.encode(texts), alone, **CLOSE)
    together = model.hidden_states(texts)
    for text, states in zip(texts, together, strict=True):
        np.testing.assert_allclose(states[: len(text)], model.hidden_states([text])[0], **CLOSE)
    assert sorted(map(len, model.split_batches(list(map(len, texts)), 32))) == ([1, 1, 4] if dense else [1] * 6)


def test_hidden_refuses_invalid_rows(tmp_path: Path) -> None:
    model = compiled(Encoder(*SHAPE, Block(ATTENTION, GatedMLP(24), NORM), context=16), tmp_path / "out")
    for rows, message in [
        ([[1] * 17], "longer than the maximum of 16"),
        ([[61]], "token 61"),
        ([[1], []], "no tokens"),
    ]:
        with pytest.raises(weft.WeftError, match=message):
            model.hidden_states(rows)
    assert model.hidden_states([]).shape == (0, 0, 0)
