"""`weft eval`: its table, and the same values as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.frontends.app.api.verify.evaluation import Evaluation, Score

from ...command import refused, weft_command


def test_eval_prints_a_table_and_json(llamas: tuple[Path, Path], prose: Path) -> None:
    args = (llamas[1], "--against", llamas[0], "--text", prose, "--device", "cpu", "-p", "half=cast{dtype=f16}")
    shown = weft_command("eval", *args, "--layers", "-p", "cast{dtype=f16}").stdout
    lines = shown.splitlines()
    assert lines[0].endswith(f"tokens of {prose}, in windows of 128")
    assert lines[2].split()[:5] == ["model", "NLL", "ΔNLL", "perplexity", "KL"]
    assert [line.split()[0] for line in lines[4:8]] == [*map(str, llamas), "half", "cast{dtype=f16}"]
    assert "layers.2" in lines[-1]
    given = json.loads(weft_command("eval", *args, "--json").stdout)
    assert [s["name"] for s in given["scores"]] == [*map(str, llamas), "half"]
    assert f"{given['scores'][1]['nll']:.4f}" in lines[5] and given["scores"][2]["kl"] < 1e-3


def score(name: str, **values: float | None) -> Score:
    measured = dict.fromkeys(("nll", "nll_loss", "kl", "kl_99", "agreement", "cosine", "bits")) | values
    return Score(name, seconds=1.0, weight_bytes=1, layer_bits={}, parameters=1, cache_bytes=1, layers={}, **measured)


@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        (("--max-kl", 0.2, "--max-loss", 0.5), 0, ""),
        (("--max-kl", 0.2, "--max-loss", 0.03), 1, "weft: q4/ has ΔNLL 0.04, above --max-loss 0.03\n"),
        (
            ("--max-kl", 0.05),
            1,
            "weft: q4/ has KL 0.141, above --max-kl 0.05; broken/ has KL nan, above --max-kl 0.05\n",
        ),
        (
            ("--min-cosine", 0.5),
            2,
            "weft: error: --min-cosine does not apply to q4/, which has no cosine: leave it out",
        ),
    ],
)
def test_limits_decide_the_exit_status(
    limits: tuple[str | float, ...], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original is not compared with them; a number that is not one exceeds all."""
    broken = [score("broken/", kl=float("nan"), nll_loss=0.0)] if limits[1] == 0.05 else []
    scores = (score("original", kl=9.0, nll_loss=9.0), score("q4/", kl=0.141, nll_loss=0.04), *broken)
    evaluation = Evaluation("a.txt", 5, 5, scores)
    monkeypatch.setattr("weft.frontends.app.api.verify.evaluation.evaluate", lambda *a, **k: evaluation)
    result = weft_command("eval", "q4/", "--against", "original", "--text", "a.txt", *map(str, limits))
    assert (result.exit_code, result.stderr[: len(message)]) == (status, message)
    assert "original" in result.stdout and result.stderr.count("\n") == bool(message)


def test_limit_of_encoders_is_the_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = Evaluation("a.txt", 5, 5, (score("original", cosine=1.0), score("q8/", cosine=0.97)))
    monkeypatch.setattr("weft.frontends.app.api.verify.evaluation.evaluate", lambda *a, **k: evaluation)
    args = ("eval", "q8/", "--against", "original", "--text", "a.txt", "--json", "--min-cosine")
    assert weft_command(*args, "0.9").exit_code == 0
    result = weft_command(*args, "0.98")
    assert (result.exit_code, result.stderr) == (1, "weft: q8/ has cosine 0.97, below --min-cosine 0.98\n")
    assert json.loads(result.stdout)["scores"][1]["cosine"] == 0.97


def test_limit_without_a_model_is_refused() -> None:
    assert "a limit needs a model to compare" in refused("eval", "--against", "x", "--text", "y", "--max-kl", "1")
