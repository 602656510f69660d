"""`weft distil`: its result on models that the command line rewrote, and impossible options."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ....sampling import others_long
from ...command import TINY, done, refused

SHORT = ("--batch", "4", "--context", "16", "--device", "cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model (run), a quantized one (q3) and one with fewer heads (heads)."""
    home = tmp_path_factory.mktemp("models")
    (home / "tiny.py").write_text(TINY)
    (home / "notes.txt").write_text("it was a bright cold day in april " * 200)
    text = ("--text", home / "notes.txt", *SHORT)
    done("train", home / "tiny.py", *text, "--steps", "30", "-o", home / "run")
    done("opt", home / "run", "-p", "quantize{bits=3, group=16, head=4, method=rtn}", "-o", home / "q3")
    done("opt", home / "run", "-p", "mha-to-gqa{kv_heads=1}", "-o", home / "heads")
    return home


@pytest.mark.parametrize("name", others_long(["heads", "q3"]))
def test_distil_writes_a_model_closer_to_the_original(name: str, models: Path, tmp_path: Path) -> None:
    options = ("--against", models / "run", "--text", models / "notes.txt", *SHORT, "--rate", "0.02")
    out = done("distil", models / name, *options, "--steps", "40", "-o", tmp_path / "out").stdout.splitlines()
    before, best = (float(part.split()[0]) for part in out[-2].split(": ")[1].split(", ")[:2])
    assert best < 0.9 * before and out[-2].startswith("KL divergence from the original on held-out text")
    arguments = (models / name, tmp_path / "out", "--against", models / "run", "--text", models / "notes.txt")
    scores = json.loads(done("eval", *arguments, "--device", "cpu", "--tokens", "512", "--json").stdout)
    assert scores["scores"][2]["kl"] < 0.9 * scores["scores"][1]["kl"]
    again = done("distil", models / name, *options, "--steps", "40", "--resume", tmp_path / "out", "--json").stdout
    assert json.loads(again)["best"] == pytest.approx(best, abs=1e-4)


@pytest.mark.long
def test_two_processes_reach_the_losses_of_one(models: Path, warm: dict[str, str], tmp_path: Path) -> None:
    options = ("--against", models / "run", "--text", models / "notes.txt", *SHORT, "--rate", "0.02", "--steps", "6")
    done("distil", models / "heads", *options, "-o", tmp_path / "one")
    launch = [str(shutil.which("torchrun", path=warm["PATH"])), "--standalone", "--nproc-per-node", "2", "-m", "weft"]
    command = [*launch, "distil", models / "heads", *options, "-o", tmp_path / "two"]
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=warm)
    assert process.returncode == 0, process.stderr
    logs = []
    for name in ("one", "two"):
        with (tmp_path / name / "log.csv").open(newline="") as file:
            logs.append([[float(row[key]) for key in ("loss", "gradient")] for row in csv.DictReader(file)])
    np.testing.assert_allclose(*logs, rtol=1e-3)
    assert len(logs[0]) == 6 and process.stdout.count("written; try") == 1


@pytest.mark.long
def test_heal_is_an_earlier_name(models: Path, tmp_path: Path) -> None:
    options = ("--against", models / "run", "--text", models / "notes.txt", *SHORT, "--steps", "20", "--rate", "0.02")
    done("heal", models / "q3", *options, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "best" / "model.weft").is_file()
    assert "heal" not in done("--help").stdout


def test_impossible_options_are_refused(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (models / "q3", "--against", models / "run", "--text", models / "notes.txt", *SHORT)
    out = ("-o", tmp_path / "out")
    assert "needs either -o FOLDER or --resume FOLDER" in refused("distil", *given)
    assert "--train nothing.*: no parameter has such a name" in refused("distil", *given, *out, "--train", "nothing.*")
    assert "layers is 2.0, but it is a share of the run" in refused("distil", *given, *out, "--layers", "2")
    assert "is not the folder of a run" in refused("distil", *given, "--resume", tmp_path / "out")
    assert "device" in refused("distil", *given, *out, "--device", "cuda")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch cannot be imported" in refused("distil", *given, *out)
    assert not (tmp_path / "out").exists()
