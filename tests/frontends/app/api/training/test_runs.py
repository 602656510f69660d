"""Runs: how a text is divided, which state is the best, and runs that must improve."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, TrainingSettings
from weft.backends.torch.training.trainer import open_accelerator
from weft.frontends.app.api.training.corpus import Corpus
from weft.frontends.app.api.training.run_folder import Run, RunFolder
from weft.frontends.app.api.training.runs import Hooks, begin_run, read_tokens, run_phases
from weft.frontends.app.api.training.trainers import open_training
from weft.ir.errors import WeftError

MODEL = weft.load_source(Decoder(64, 16, 1, Block(Attention(2), GatedMLP(16), RMSNorm()), context=64))


def corpus(folder: Path, count: int) -> Corpus:
    np.save(folder / f"{count}.npy", np.arange(count) % 64)
    return Corpus(folder / f"{count}.npy")


@pytest.mark.parametrize(("count", "sizes"), [(1000, (949, 51)), (200, (173, 27))])
def test_the_end_of_a_text_is_held_out(count: int, sizes: tuple[int, int], tmp_path: Path) -> None:
    settings = TrainingSettings(context=16)
    ids, held_out = read_tokens(MODEL, [corpus(tmp_path, count)], [], settings, lambda *_: None)
    assert (len(ids), len(held_out)) == sizes
    # A short text has its last twentieth first, and then the window before it.
    assert sorted([*ids, *held_out]) == sorted(n % 64 for n in range(count))
    assert ids.tolist() == [n % 64 for n in range(len(ids))]
    both = read_tokens(MODEL, [corpus(tmp_path, count)], [corpus(tmp_path, 90)], settings, lambda *_: None)
    assert [len(part) for part in both] == [count, 90]


def test_texts_shorter_than_two_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="12 tokens to train on and 18 to validate on, not enough for windows of 16"):
        read_tokens(MODEL, [corpus(tmp_path, 30)], [], TrainingSettings(context=16), lambda *_: None)


def run(folder: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Run, list[int]]:
    """A run of four steps whose validations find `losses`; also the steps at which the best model was written."""
    settings = TrainingSettings(steps=4, batch=4, context=16, validate_every=1).resolve(MODEL)
    accelerator, run_folder, written = open_accelerator("cpu", False), RunFolder(folder / "run"), list[int]()
    begin_run(run_folder, MODEL, [corpus(folder, 1000)], [], settings, {}, accelerator, lambda *_: None)
    training = open_training(MODEL, *run_folder.open_tokens(MODEL.graph, 16), settings, accelerator)
    monkeypatch.setattr(training.trainer, "validate", lambda *_: losses.pop(0))
    result = run_phases(
        run_folder,
        {"training": training.trainer},
        training.held_out,
        1,
        lambda weights: MODEL,
        Hooks(),
        save_more=lambda: written.append(training.trainer.step),
        **options,
    )
    return result, written


def test_the_state_of_the_smallest_loss_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, written = run(tmp_path, [4.0, 3.0, 2.0, 2.5, 1.9], monkeypatch)
    assert (result.before, result.best, result.last) == (4.0, 1.9, 1.9) and written == [1, 2, 4]
    assert (tmp_path / "run" / "best" / "model.weft").is_file()


def test_a_run_that_must_improve_writes_no_worse_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, written = run(tmp_path, [1.0, 3.0, math.nan, 2.5, 1.0], monkeypatch, must_improve=True)
    assert result.best == result.before == 1.0 and written == []
    assert not (tmp_path / "run" / "best").exists() and (tmp_path / "run" / "last").exists()


def test_rates_follow_the_loss_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    for number, factor in enumerate((1.0, 0.5)):
        (tmp_path / str(number)).mkdir()
        run(tmp_path / str(number), [0.5, 0.4, 0.3, 0.2, 0.1], monkeypatch, scale_rate=factor.__mul__)
        rates.append([row["rate"] for row in RunFolder(tmp_path / str(number) / "run").read_log()])
    np.testing.assert_allclose(rates[1], np.array(rates[0]) / 2)
