"""Sampled sequences: tokens are drawn from the distributions of the model."""

from __future__ import annotations

import torch

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.torch.distillation.sampled_sequences import sample_continuations

VOCAB, LENGTH = 53, 9


def test_continuations_are_drawn_from_the_full_pass() -> None:
    block = Block(Attention(4, kv_heads=2, rope=RoPE()), GatedMLP(24), RMSNorm())
    model = weft.torch(Decoder(VOCAB, 16, 1, block, context=64).graph())
    prompts = torch.randint(VOCAB, (3, 4), generator=torch.Generator().manual_seed(5))
    lengths: list[int] = []
    drawn = sample_continuations(model, prompts, LENGTH, seed=7, progress=lambda _, done, total: lengths.append(done))
    generator, expected = torch.Generator().manual_seed(7), prompts
    while expected.shape[1] < LENGTH:  # without caches, each sequence from its beginning
        with torch.no_grad():
            likely = model(expected)[:, -1].softmax(-1)
        expected = torch.cat([expected, likely.multinomial(1, generator=generator)], 1)
    assert torch.equal(drawn, expected)
    assert lengths == [4, 5, 6, 7, 8, 9]
