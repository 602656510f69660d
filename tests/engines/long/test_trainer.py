"""`Trainer` with accelerate: two processes that share the gradients learn what one does from the same rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ..compiled import compiled, error, loaded, reference, texts

WORKER = Path(__file__).with_name("trainer_worker.py")


def trained(warm: dict[str, str], folder: Path, out: Path, processes: int, batch: int) -> dict[str, Any]:
    """Return what the worker tells after training `folder` in that many processes, each with rows of a `batch`."""
    of = ["torchrun", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    command = [str(shutil.which(of[0], path=warm["PATH"])), *of[1:], str(WORKER), str(folder), str(out), str(batch)]
    run = subprocess.run(command, env=warm, capture_output=True, text=True, timeout=120)
    assert not run.returncode, run.stderr[-2000:]
    told: dict[str, Any] = json.loads((out / "losses.json").read_text())
    assert told["processes"] == processes and len(told["losses"]) == 6
    return told


def test_two_processes_train_as_one_does(warm: dict[str, str], tmp_path: Path) -> None:
    folder = compiled("preset/smollm2-135m", tmp_path / "folder")
    one = trained(warm, folder, tmp_path / "one", 1, 8)
    two = trained(warm, folder, tmp_path / "two", 2, 4)
    assert one["losses"][-1] < one["losses"][0] - 0.1
    assert max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)) <= 1e-5
    ids = texts(2, 9, 37)
    found = [loaded(tmp_path / n)(ids, use_cache=False).logits for n in ("one", "two")]
    assert error(*found) <= 1e-4
    shutil.copy(folder / "model.weft", tmp_path / "two")
    assert error(found[1], reference(tmp_path / "two", ids)) <= 1e-5
