"""Activation checkpointing per layer: the same gradients from less memory, and caches that nothing runs twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from weft import (
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedMLP,
    Mamba,
    MoE,
    RMSNorm,
    RoPE,
)

from ...lowered import build_module

attention = Attention(heads=4, kv_heads=2, rope=RoPE(10_000))
mamba = Mamba(inner=48, state=4)
dense, experts = GatedMLP(80), MoE(4, hidden=24, k=2)


def model(mixers: list[object], ffn: object, seed: int = 0) -> Any:
    blocks = [Block(mixer, ffn, norm=RMSNorm(1e-5)) for mixer in mixers]
    return build_module(Decoder(vocab=61, dim=32, layers=blocks, context=64).graph(seed=seed))


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(ids)
    torch.autograd.backward(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def peak_bytes(model: nn.Module, ids: Tensor) -> int:
    """The most memory that a forward and a backward pass hold of what they allocate."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.autograd.backward(model(ids).sum())
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return int(max(itertools.accumulate(e.nbytes() for e in changes)))


@pytest.mark.parametrize(
    ("mixers", "ffn"),
    [([attention] * 3, dense), ([attention] * 3, experts), ([mamba, attention, mamba], dense)],
    ids=["attention", "experts", "hybrid"],
)
def test_checkpointing_does_not_change_gradients(mixers: list[object], ffn: object) -> None:
    net, ids = model(mixers, ffn), torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(1))
    want = gradients(net, ids)
    assert len(want) == len(list(net.parameters()))
    calls = []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    net.checkpointing = True
    got = gradients(net, ids)
    assert len(calls) == 2 * len(mixers)  # each layer once more, in the backward pass
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_checkpointing_reduces_activation_memory() -> None:
    net, ids = model([attention] * 8, dense), torch.zeros(2, 64, dtype=torch.long)
    peak_bytes(net, ids)  # gradients are there from now on
    kept = peak_bytes(net, ids)
    net.checkpointing = True
    assert peak_bytes(net, ids) < kept / 3


def test_checkpointed_layers_write_the_cache_once() -> None:
    """With gradients on, a recurrence that ran twice over its state would give other gradients."""
    net, ids = model([mamba, attention, mamba], dense), torch.arange(10)[None]
    found = []
    for net.checkpointing in (False, True):
        cache = net.new_cache(1, 10)
        with torch.no_grad():
            net(ids[:, :6], cache=cache)
        logits = net(ids[:, 6:], cache=cache)
        assert cache.length == 10
        found.append(logits)
    assert torch.equal(*found)
    with torch.no_grad():
        torch.testing.assert_close(found[1], net(ids)[:, 6:], rtol=1e-4, atol=1e-5)


def test_encoder_and_decoder_are_checkpointed_separately() -> None:
    reads, writes = (Block(attention, dense, RMSNorm(), cross=c) for c in (None, CrossAttention(4)))
    net: Any = build_module(EncoderDecoder(Encoder(61, 32, 2, reads), Decoder(61, 32, 3, writes)).graph())
    calls: list[int] = []
    layers = [*net.encoder.layers, *net.decoder.layers]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    ids, found = torch.arange(5)[None], []
    for asked in (False, True):
        net.encoder.checkpointing = net.decoder.checkpointing = asked
        net.zero_grad()
        logits = net(input_ids=ids, encoder_input_ids=ids, encoder_attention_mask=torch.ones_like(ids))
        torch.autograd.backward(logits.square().mean())
        found.append([p.grad.clone() for p in net.parameters()])
    assert len(calls) == 3 * len(layers)
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))
