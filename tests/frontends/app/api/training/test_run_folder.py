"""Run folders: the log and what a resumed run removes of it, and damaged records."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.backends.torch.training.trainer import TrainingStep
from weft.frontends.app.api.training.run_folder import Log, RunFolder, RunState
from weft.ir.errors import WeftError


def report(number: int, validation: float | None = None) -> RunState:
    step = TrainingStep(number, {"loss": 2.0 / number, "aux_loss": 0.5}, 1e-3, 0.7, 0.25)
    return RunState("training", number, 100, number / 8, 10.0 * number, step, validation)


def test_the_log_continues_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    log = Log(RunFolder(tmp_path), 0)
    for n in range(1, 5):
        log.write(report(n, 3.0 if n == 2 else None))
    again = Log(RunFolder(tmp_path), 2)
    again.write(report(3))
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert rows[1] | {"loss": 1} == rows[1] | {
        "loss": 1,
        "tokens": "200",
        "validation": "3.0",
        "tokens_per_second": "400.0",
    }
    assert (tmp_path / "loss.svg").read_text().count("validation") >= 1


def test_a_row_that_a_kill_cut_is_left_out_and_other_logs_are_refused(tmp_path: Path) -> None:
    log = Log(RunFolder(tmp_path), 0)
    for n in range(1, 4):
        log.write(report(n))
    text = (tmp_path / "log.csv").read_text()
    (tmp_path / "log.csv").write_text(text[: text.rindex("3,") + 1])
    assert [row["step"] for row in RunFolder(tmp_path).read_log()] == [1, 2]
    (tmp_path / "log.csv").write_text("garbage\n1\n")
    with pytest.raises(WeftError, match=r"log\.csv is damaged \(it has other columns\)"):
        RunFolder(tmp_path).read_log()


def test_the_rest_of_a_run_is_estimated_from_its_share() -> None:
    assert report(2).remaining == pytest.approx(20.0 * 3)


def test_tokens_are_stored_and_opened(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.store_tokens(np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16))
    graph = weft.Decoder(5, 8, 1, weft.Block(weft.Attention(2), None, weft.RMSNorm())).graph()
    training, held_out = folder.open_tokens(graph, 2)
    assert training.tolist() == [0, 1, 2, 3, 4] and held_out.tolist() == [0, 1, 2]
    with pytest.raises(WeftError, match=r"has damaged tokens \(uint16 \[5\] are not 6 ids or more\)"):
        folder.open_tokens(graph, 3)
    for wrong, message in ((np.arange(9, dtype=np.uint16), "token 8 is not below 5"), (np.zeros((9, 9)), "float64")):
        np.save(tmp_path / "tokens.npy", wrong)
        with pytest.raises(WeftError, match=f"has damaged tokens .*{message}"):
            folder.open_tokens(graph, 2)
    (tmp_path / "tokens.npy").write_bytes(b"")
    with pytest.raises(WeftError, match="has damaged tokens"):
        folder.open_tokens(graph, 2)


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"is not the folder of a run: it has no run\.json"):
        RunFolder(tmp_path).read()
    with pytest.raises(WeftError, match="exists: name another folder"):
        RunFolder(tmp_path).check_new()
    RunFolder(tmp_path / "new").check_new()
