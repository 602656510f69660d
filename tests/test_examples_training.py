"""The training example learns: a small run of it. test_train.py has the one for any model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import weft

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def base() -> Iterator[ModuleType]:
    """examples/train_characters.py."""
    sys.path.insert(0, str(EXAMPLES))
    import train_characters

    yield train_characters
    sys.path.remove(str(EXAMPLES))


def losses(base: ModuleType, steps: int, **options: bool) -> tuple[torch.nn.Module, list[float]]:
    net = weft.torch(base.model)
    codes, _ = base.read(base.TEXT)
    return net, [loss for _, loss in base.train(net, base.batches(codes), steps, **options)]


def test_training_example_reduces_the_loss(base: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller steps than in full, but more than how often characters stand in the text."""
    monkeypatch.setattr(base, "WARMUP", 10)
    monkeypatch.setattr(base, "BATCH", 8)
    codes, held_out = base.read(base.TEXT)
    counts = codes.bincount(minlength=128)
    chances = counts[counts > 0] / counts.sum()
    entropy = -float((chances * chances.log()).sum())
    net, found = losses(base, 60)
    assert abs(found[0] - math.log(128)) < 0.2  # it knows nothing at first
    loss = base.evaluate(net, held_out[:8192])
    assert loss < 0.85 * entropy
    text = base.sample(net, "And ", 60)
    assert text.startswith("And ") and len(text) == 64
    assert base.sample(net, "And ", 60) == text != base.sample(net, "And ", 60, seed=1)


def test_cached_sampling_equals_full_passes(base: ModuleType) -> None:
    net = weft.torch(base.model)
    random = torch.Generator().manual_seed(0)
    codes = torch.tensor([list(b"The ")])
    with torch.no_grad():
        for _ in range(12):
            chances = (net(codes)[:, -1] / 0.7).softmax(-1)
            codes = torch.cat((codes, torch.multinomial(chances, 1, generator=random)), 1)
    assert base.sample(net, "The ", 12) == bytes(codes[0].tolist()).decode("ascii")
