"""Caches of layers: rolling caches slot by slot, and decoders whose windows have rolled over."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from weft import MLP, Attention, Block, Decoder
from weft.backends.torch.lib.caches import (
    Cache,
    RollingKeyCache,
    RollingKVCache,
    earlier_keys,
    mask_padding,
    rolling_positions,
    slot_positions,
)
from weft.frontends.dsl import T5Bias
from weft.ir import interpret
from weft.ir.ops import caches
from weft.passes import run_passes

from ....e2e.random_models import strong
from ....ir.ops.attention_oracle import write_rolling_cache
from ....lowered import build_module
from ....passes.zoo import ZOO
from ....sampling import each
from ..generated import assert_close, call, feeds_of, graph_of, module_of, tensors, tolerance

LONG = 13  # tokens, more than any window here
WINDOWED = (
    *("variant/grouped", "variant/latent", "variant/soft cap", "variant/sinks", "variant/ALiBi"),
    *("variant/T5 bias, per layer", "variant/T5 bias, shared"),
)
SHAPES = [(5, 0), (5, 2), (1, 0), (3, 2), (4, 4)]  # slots, and how many of the first positions stay


@pytest.mark.parametrize(("slots", "keep"), SHAPES)
def test_slot_positions_of_rolling_caches(slots: int, keep: int) -> None:
    if slots == keep:
        return
    for newest in range(LONG):
        got = slot_positions(torch.tensor([[newest]]), slots, keep)[0].numpy()
        want = caches.find_slot_positions(np.array([[newest]]), slots, keep)[0]
        np.testing.assert_array_equal(got, np.where((want < 0) | (want > newest), -1, want))


@pytest.mark.parametrize(("slots", "keep"), SHAPES[:4])
@pytest.mark.parametrize("cuts", [(LONG,), (4, 6, 3), (1,) * LONG, (7, 1, 1, 4)])
def test_rolling_caches_write_the_slots_of_the_reference(slots: int, keep: int, cuts: tuple[int, ...]) -> None:
    """Of every row: three tokens of the second are padding in the first call."""
    generator = torch.Generator().manual_seed(0)
    cache = RollingKVCache(2, 3, slots, 4, 2, torch.zeros(1), keep)
    latent = RollingKeyCache(2, 3, slots, 4, torch.zeros(1), keep)
    want, start = cache.k.numpy().copy(), np.zeros((2, 1), int)
    for i, n in enumerate(cuts):
        k, v = torch.randn(2, 3, n, 4, generator=generator), torch.randn(2, 3, n, 2, generator=generator)
        positions = torch.from_numpy(start + np.arange(n))
        padding = 3 if i == 0 and n > 3 else 0
        if padding:
            positions = mask_padding(positions, torch.tensor([n - 1, n - 1 - padding]))
        for row in range(2):
            at = positions[row].numpy()
            want[row] = write_rolling_cache(want[row], k[row].numpy(), np.where(at < 0, LONG * 9, at), at.max(), keep)
        mask = torch.ones(2, 1, n, n if i == 0 else slots if n == 1 else slots + n, dtype=torch.bool)
        before = cache.k.clone()
        keys, values = cache.update(k, v, positions, mask)
        latent.update(k, positions, mask)
        np.testing.assert_array_equal(cache.k.numpy(), want)
        np.testing.assert_array_equal(latent.k.numpy(), want)
        assert keys.shape[2] == values.shape[2] == mask.shape[-1]
        if i > 0 and n > 1:
            assert torch.equal(keys, torch.cat((before, k), 2))
        start = start + n - np.array([[0], [padding]])


def test_empty_slots_are_after_all_positions() -> None:
    known = rolling_positions(torch.tensor([[2, 3]]), 2, Cache([], 9), 5)
    assert known.tolist() == [[0, 1, 9, 9, 9, 2, 3]]


@pytest.mark.parametrize(
    ("name", "window"), each(2, itertools.product(WINDOWED, ("{size=3}", "{size=3, keep_first=2}", "{size=1}")))
)
def test_decoders_whose_windows_roll_over_agree_with_the_interpreter(name: str, window: str) -> None:
    graph = run_passes(ZOO[name](), f"sliding-window{window}")
    module: Any = build_module(graph).eval()
    ids = np.random.default_rng(0).integers(0, 9, (2, LONG))
    want = next(iter(interpret(graph, {"input_ids": ids, "position_ids": np.arange(LONG) + 0 * ids}).values()))
    bound, tokens = tolerance(graph, torch.float32), torch.from_numpy(ids)
    assert_close(call(module, {"input_ids": tokens})[0], want, bound)
    for cuts in ((LONG,), (5, 1, 1, 4, 2), (1,) * LONG):
        cache, made = module.new_cache(2, LONG), []
        assert all(type(layer).__name__.startswith("Rolling") for layer in cache)
        for part in tokens.split(list(cuts), 1):
            made.append(call(module, {"input_ids": part, "cache": cache})[0])
        assert_close(torch.cat(made, 1), want, bound)


@pytest.mark.parametrize(("windows", "rolls"), [((3, 3), True), ((3, 4), False), ((3, None), False)])
def test_layers_that_share_a_bias_cache_the_same_keys(windows: tuple[int | None, ...], rolls: bool) -> None:
    layers = [Block(Attention(2, window=window), MLP(9)) for window in windows]
    graph = strong(Decoder(11, 8, layers, context=LONG, position_bias=T5Bias(8, 20, heads=2)).graph())
    module: Any = build_module(graph).eval()
    ids = np.random.default_rng(0).integers(0, 9, (2, LONG))
    want = next(iter(interpret(graph, {"input_ids": ids, "position_ids": np.arange(LONG) + 0 * ids}).values()))
    cache, tokens = module.new_cache(2, LONG), torch.from_numpy(ids)
    assert [type(layer).__name__.startswith("Rolling") for layer in cache] == [rolls] * 2
    made = [call(module, {"input_ids": part, "cache": cache})[0] for part in tokens.split([5, 1, 4, 3], 1)]
    assert_close(torch.cat(made, 1), want, tolerance(graph, torch.float32))


@pytest.mark.parametrize("name", ["family/t5", "family/bart", "variant/encoder-decoder"])
def test_encoder_masks_are_optional(name: str) -> None:
    """Then all of the encoded text is seen."""
    module, given = module_of(name), tensors(feeds_of(name))
    everything = torch.ones_like(given["encoder_attention_mask"])
    want = call(module, {**given, "encoder_attention_mask": everything})[0]
    del given["encoder_attention_mask"]
    assert_close(call(module, given)[0], want.double().numpy(), tolerance(graph_of(name), torch.float32))


def test_later_calls_pass_a_causal_bias_to_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go on together get the mask of GPUs, others one of all pairs; the logits are those of one call."""
    net: Any = build_module(Decoder(11, 24, 2, Block(Attention(4, 2, 6), MLP(20)), context=LONG).graph(seed=3))
    source, told = sys.modules[type(net).__module__], list[tuple[int, int]]()

    def on_a_gpu(positions: torch.Tensor, keys: torch.Tensor, first: int | None) -> torch.Tensor:
        if first is None:
            return earlier_keys(positions, keys, first)
        assert earlier_keys(positions, keys, first).dtype == torch.bool  # on this device
        told.append((positions.shape[1], keys.shape[1]))
        return causal_lower_right(*told[-1])

    monkeypatch.setattr(source, "earlier_keys", on_a_gpu)
    ids = torch.randint(11, (2, LONG), generator=torch.Generator().manual_seed(1))
    want = net(ids)
    for given, calls in ((False, [(3, 8), (1, 9), (4, 13)]), (True, [])):
        cache, at, made = net.new_cache(2, LONG), 0, []
        for n in (5, 3, 1, 4):
            positions = torch.arange(at, at + n).expand(2, -1) if given else None
            made.append(net(ids[:, at : at + n], position_ids=positions, cache=cache))
            at += n
        torch.testing.assert_close(torch.cat(made, 1), want, atol=2e-6, rtol=0)
        assert told == calls
        told.clear()
