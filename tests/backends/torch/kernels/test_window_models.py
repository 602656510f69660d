"""Models with windows, soft caps and sinks, whose prompts the kernel reads: at once, in chunks, and after steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import Attention, Decoder, Mask
from weft.ir import Graph

from ....e2e.random_models import strong
from ....lowered import build_module
from ....passes.zoo_variants import ROPE, VOCAB, attends, decoder
from ..generated import assert_close, tolerance

LONG = 14  # tokens, more than the windows
LOCAL, WIDE = (Attention(2, 1, 4, ROPE, window=window, softcap=2.0) for window in (5, None))
MODELS = {
    "window": decoder(Attention(4, 2, 4, ROPE, window=5), layers=1),
    "first kept, sinks": decoder(
        Attention(2, 1, 4, ROPE, window=4, sinks=True, scale=0.6, mask=Mask(keep_first=2)), layers=1
    ),
    "capped, local and global": Decoder(VOCAB, 30, [decoder(LOCAL).block, decoder(WIDE).block], context=LONG),
    "sinks alone": decoder(Attention(2, 2, 4, ROPE, sinks=True), layers=1),
}
CUTS = ((LONG,), (2, 9, 3), (6, 1, 1, 4, 2), (1, 1, 3, 9))


class Watched:
    """The kernel of a module, with how many tokens each call of it had, and no way around it."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        source = sys.modules[type(module).__module__]
        kernel: Callable[..., Tensor] = vars(source)["window_attention"]

        def counted(q: Tensor, *more: Any, **options: Any) -> Tensor:
            self.tokens.append(q.shape[2])
            return kernel(q, *more, **{**options, "kernel": True})

        monkeypatch.setattr(source, "window_attention", counted)


def built(name: str, device: torch.device) -> tuple[Graph, Any]:
    graph = strong(replace(MODELS[name], context=LONG).graph())
    return graph, build_module(graph, device=device).eval()


def ids(device: torch.device, rows: int = 2) -> Tensor:
    return torch.randint(1, 9, (rows, LONG), generator=torch.Generator().manual_seed(6)).to(device)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_window_prompts_in_pieces_agree_with_the_interpreter(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads all pieces of several tokens; steps and pieces go on from what they leave in the caches."""
    graph, module = built(name, device)
    tokens, at = ids(device), torch.arange(LONG, device=device)[None]
    want = module(tokens, position_ids=at).double().cpu().numpy()  # positions that are told take masks
    watched = Watched(module, monkeypatch)
    pieces = [(None, tokens)]
    for cuts in CUTS:
        cache = module.new_cache(2, LONG)
        pieces += [(cache, part) for part in tokens.split(list(cuts), 1)]
    found = [(cache, module(part, cache=cache)) for cache, part in pieces]
    layers = len(module.layers)
    assert watched.tokens == [part.shape[1] for _, part in pieces if part.shape[1] > 1 for _ in range(layers)]
    for cache in dict.fromkeys(id(cache) for cache, _ in found):
        logits = torch.cat([made for other, made in found if id(other) == cache], 1)
        assert_close(logits.cpu(), want, tolerance(graph, torch.float32))


@torch.no_grad()
def test_cache_shorter_than_the_window_agrees_with_the_interpreter(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, module = built("window", device)
    tokens = ids(device)[:, :4]
    want = module(tokens, position_ids=torch.arange(4, device=device)[None])
    watched = Watched(module, monkeypatch)
    cache = module.new_cache(2, 4)
    got = torch.cat([module(part, cache=cache) for part in tokens.split([2, 2], 1)], 1)
    assert watched.tokens == [2, 2]
    assert_close(got.cpu(), want.double().cpu().numpy(), tolerance(graph, torch.float32))


@torch.no_grad()
def test_rows_of_different_lengths_use_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is behind the tokens that see it; where rows go on from different positions, they take masks."""
    graph, module = built("first kept, sinks", device)
    tokens, lengths = ids(device), torch.tensor([9, 6], device=device)
    alone = [module(torch.cat((tokens[r : r + 1, :n], tokens[r : r + 1, 9:]), 1)) for r, n in enumerate((9, 6))]
    watched = Watched(module, monkeypatch)
    cache = module.new_cache(2, LONG)
    first = module(tokens[:, :9], cache=cache, last=lengths - 1)
    at = lengths[:, None] + torch.arange(LONG - 9, device=device)
    more = module(tokens[:, 9:], cache=cache, position_ids=at)
    assert watched.tokens == [9]
    got = torch.cat((first, more), 1)
    for row, (n, want) in enumerate(zip((9, 6), alone, strict=True)):
        expected = want[:, n - 1 :].double().cpu().numpy()
        assert_close(got[row : row + 1].cpu(), expected, tolerance(graph, torch.float32))


def test_training_does_not_use_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = built("capped, local and global", device)
    watched = Watched(module, monkeypatch)
    torch.autograd.backward(module(ids(device, 1)).square().sum())
    assert watched.tokens == []
    assert all(p.grad is not None for p in module.parameters())


@torch.no_grad()
def test_sparse_patterns_do_not_use_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = build_module(strong(attends(window=4, pattern="dilated", stride=2).graph()), device=device)
    watched = Watched(module, monkeypatch)
    module(ids(device, 1))
    assert watched.tokens == []
