"""Steps of training equal a plain PyTorch loop, in one part or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft import Attention, Block, Decoder, GatedMLP, MoE, RMSNorm, RoPE, Router
from weft.backends.torch.training.batches import WindowBatch, Windows
from weft.backends.torch.training.objectives import NextToken
from weft.backends.torch.training.optimizer import compute_rate
from weft.backends.torch.training.trainer import Plan, Trainer, TrainingStep, open_accelerator

IDS = np.random.default_rng(0).integers(0, 53, 600)
DATA = Windows(IDS, 17, 16, seed=1, shift=True)
ATTENTION = Attention(4, kv_heads=2, rope=RoPE())
DECAYED = {"layers.0.ffn.up.weight", "layers.0.attn.q.weight"}


def build(experts: bool = False) -> Any:
    ffn = MoE(4, 16, 2, router=Router(aux_loss=0.01)) if experts else GatedMLP(48)
    return weft.torch(Decoder(53, 32, 1, Block(ATTENTION, ffn, RMSNorm()), context=32, tie_embeddings=True))


def train(net: nn.Module, plan: Plan) -> tuple[Trainer, Sequence[TrainingStep]]:
    trainer = Trainer(open_accelerator("cpu", False, plan.accumulate), net, NextToken(), DATA, plan, DECAYED)
    return trainer, list(trainer.train())


@pytest.mark.parametrize(("accumulate", "experts"), [(1, False), (4, False), (1, True)])
def test_steps_equal_a_plain_loop(accumulate: int, experts: bool) -> None:
    net, plain = build(experts), build(experts)
    plan = Plan(8, 8, accumulate, 3e-3, 0.25, decay=0.2, clip=0.5)
    _, steps = train(net, plan)
    named = dict(plain.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if (n in DECAYED) == decays], "weight_decay": 0.2 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    for n, step in enumerate(steps):
        windows = DATA.draw(8 * n, 8).windows
        outputs = plain(windows[:, :-1])
        logits, auxiliary = outputs if experts else (outputs, torch.zeros(()))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * compute_rate("cosine", (n + 1) / 8, 0.25)
        optimizer.step()
        assert step.losses["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.gradient == pytest.approx(float(norm), rel=1e-4)
        assert step.rate == pytest.approx(optimizer.param_groups[0]["lr"])
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-4, atol=1e-5 if accumulate > 1 else 1e-7)


def test_validation_is_the_mean_over_all_windows() -> None:
    trainer, _ = train(build(), Plan(2, 8))
    held_out = Windows(IDS[:200], 17, 16)
    with torch.no_grad():
        losses = [NextToken()(trainer.net, held_out.read(np.array([n])))["loss"] for n in range(len(held_out))]
    entropies = [float(loss) for loss in losses]
    assert trainer.validate(held_out) == pytest.approx(np.mean(entropies), rel=1e-5)
    first, middle, last = (entropies[n] for n in (0, round((len(held_out) - 1) / 2), -1))
    assert trainer.validate(held_out, 3) == pytest.approx((first + middle + last) / 3, rel=1e-5)


def test_training_ends_at_its_time_limit() -> None:
    trainer, steps = train(build(), Plan(10**9, 8, warmup=0.1, seconds=0.5))
    assert 1 < len(steps) < 10**4 and trainer.elapsed >= 0.5
    assert steps[-1].rate < 0.5 * max(step.rate for step in steps)


def test_a_loss_that_is_not_finite_ends_the_training_before_the_step() -> None:
    class Broken(NextToken):
        def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, torch.Tensor]:
            losses = super().__call__(net, batch)
            return losses | {"loss": losses["loss"] * math.nan}

    net = build()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = Trainer(open_accelerator("cpu", False), net, Broken(), DATA, Plan(2, 8))
    with pytest.raises(FloatingPointError, match="step 1: the loss is"):
        list(trainer.train())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
