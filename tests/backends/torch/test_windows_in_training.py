"""Models with windows, soft caps and sinks in training: flex_attention gives the gradients that masks of all pairs do,
from blocks that layers share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn
from torch.nn import functional as F

from weft import Decoder
from weft.ir.schema.visible_keys import PATTERNS

from ...e2e.random_models import strong
from ...lowered import build_module
from ...passes.zoo_variants import BIASED, LOCAL, WIDE, attends
from .lib.test_windows import flexing

pytestmark = [  # of torch's own, where it plays Triton's part
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]

CAPPED = Decoder(37, 30, [attends(window=20, softcap=2.0).block, attends(softcap=2.0).block] * 2, context=300)
MODELS = {  # and how many rules of what is seen
    "window": (attends(window=20), 1),
    "local and global": (Decoder(37, 30, [LOCAL, LOCAL, WIDE], context=300), 1),
    "capped, local and global": (CAPPED, 2),
    "sinks": (attends(window=20, sinks=True, **BIASED), 1),
    "first kept": (attends(window=20, keep_first=2, scale=0.7), 1),
    **{name: (attends(pattern=name, stride=5), 1) for name in PATTERNS[1:]},
    "dilated window": (attends(window=40, pattern="dilated", stride=2), 1),
}
SEQ = 45
ROUNDED = 32 * torch.finfo(torch.float32).eps  # differences of sums in another order, by layers


def module(name: str, layers: slice = slice(None)) -> Any:
    model = MODELS[name][0]
    kept = model.layers if isinstance(model.layers, int) else list(model.layers)[layers]
    return build_module(strong(replace(model, layers=kept, context=300).graph(seed=1)))


def generated(net: nn.Module) -> Any:
    """The Python module that the text of `net` makes."""
    return sys.modules[type(net).__module__]


def gradients(net: Any, ids: Tensor, **given: Any) -> dict[str, Tensor]:
    net.zero_grad()
    logits = net(ids, **given)
    torch.autograd.backward(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of all of `other`."""
    assert one.keys() == other.keys()
    norm = sum(float(g.double().square().sum()) for g in other.values()) ** 0.5
    return sum(float((one[n].double() - g).square().sum()) for n, g in other.items()) ** 0.5 / norm


def ids(rows: int = 2) -> Tensor:
    return torch.randint(37, (rows, SEQ), generator=torch.Generator().manual_seed(4))


@pytest.mark.halved
@pytest.mark.parametrize("name", MODELS)
def test_window_gradients_agree_with_full_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass makes the blocks of every rule once; all layers whose attention torch has no operator for read them."""
    net = module(name)
    want = gradients(net, ids())
    assert len(want) == len(list(net.parameters()))
    with flexing(monkeypatch, generated(net)) as asked:
        got = gradients(net, ids())
    assert asked.count(torch_flex.create_block_mask) == MODELS[name][1]
    assert asked.count(torch_flex.flex_attention) == len(net.layers) - (name == "local and global")
    assert apart(got, want) <= ROUNDED


@pytest.mark.long
def test_checkpointed_windows_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass asks for every layer once more, and for no blocks."""
    net = module("capped, local and global", slice(2))
    want = gradients(net, ids())
    net.checkpointing = True
    with flexing(monkeypatch, generated(net), traced=True) as asked:
        got = gradients(net, ids())
    assert asked.count(torch_flex.create_block_mask) == 2
    assert asked.count(torch_flex.flex_attention) == 2 * len(net.layers)
    assert apart(got, want) <= ROUNDED


def test_window_gradients_of_rows_at_different_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module("capped, local and global")
    at = torch.stack((torch.arange(SEQ), torch.arange(SEQ) + 7))
    want = gradients(net, ids(), position_ids=at)
    with flexing(monkeypatch, generated(net)):
        assert apart(gradients(net, ids(), position_ids=at), want) <= ROUNDED


@pytest.mark.parametrize("name", ["window", "sinks", "capped, local and global"])
def test_window_training_works_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of one dtype arrive, whatever norms and rotations hand on; gradients are as near as masks come."""
    net = module(name)
    want = gradients(net, ids())
    with torch.autocast("cpu", torch.bfloat16):
        masked = gradients(net, ids())
    arrived: list[set[torch.dtype]] = []
    flex: Callable[..., Tensor] = generated(net).flex

    def watched(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        arrived.append({q.dtype, k.dtype, v.dtype})
        return flex(q, k, v, *more)

    monkeypatch.setattr(generated(net), "flex", watched)
    with flexing(monkeypatch, generated(net)), torch.autocast("cpu", torch.bfloat16):
        got = gradients(net, ids())
    assert arrived and all(kinds == {torch.bfloat16} for kinds in arrived)
    assert 0 < apart(got, want) <= 2 * apart(masked, want)
