"""Charts of evaluations: models, captions and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft import WeftError
from weft.frontends.app.api.verify.evaluation import Evaluation, Score
from weft.frontends.app.api.verify.plotting import plot_evaluation

from ....command import refused, weft_command


def test_eval_draws_a_chart(llamas: tuple[Path, Path], prose: Path, tmp_path: Path) -> None:
    args = ("--against", llamas[0], "--text", prose, "--device", "cpu")
    short = ("--weights", "int8{group=16}", "--weights", "int4{method=rtn, group=16}")
    result = weft_command("eval", *args, *short, "--plot", tmp_path / "chart.svg")
    assert result.exit_code == 0 and "chart.svg written" in result.stderr and "after each layer" not in result.stdout
    chart = (tmp_path / "chart.svg").read_text()
    assert ">int8{group=16}</text>" in chart and "int4{method=rtn, group=16} · " in chart
    assert "not measured" not in chart
    assert chart.count("bits · KL ") == 1 + 2 and "NLL +" in chart and "cosine" not in chart
    assert "as .gif; known are" in refused("eval", *args, *short, "--plot", tmp_path / "chart.gif")
    for option in (["--plot", tmp_path / "none.svg"], ["--layers"]):
        assert f"{option[0]} needs MODELS, --passes, --weights or --adapter" in refused("eval", *args, *option)
    assert not (tmp_path / "none.svg").exists() and not (tmp_path / "chart.gif").exists()


def score(name: str, **measured: Any) -> Score:
    optional = ("nll", "nll_loss", "kl", "kl_99", "agreement", "cosine", "bits", "parameters", "cache_bytes")
    layers = {"layer_bits": {}, "layers": {"layers.0": 0.25, "layers.1": 0.5}}
    return Score(name, **{**dict.fromkeys(optional), **layers, "seconds": 0.5, "weight_bytes": 4096, **measured})


def test_charts_of_encoders_measure_the_cosine(tmp_path: Path) -> None:
    scores = (score("models/first", cosine=1.0), score("half", cosine=0.75, bits=16.0))
    evaluation = Evaluation("texts/lines.txt", 1200, 64, scores)
    plot_evaluation(evaluation, tmp_path / "chart.svg")
    chart = (tmp_path / "chart.svg").read_text()
    assert "first and its rewrites" in chart and "1,200 tokens of lines.txt, in windows of 64" in chart
    assert "16.00 bits · cosine 0.7500 · 500 ms/token" in chart and "KL" not in chart
    plot_evaluation(evaluation, tmp_path / "chart.png", dark=True)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_charts_need_a_model_to_compare(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="a chart needs a model to compare with the original"):
        plot_evaluation(Evaluation("lines.txt", 9, 9, (score("first", nll=1.0),)), tmp_path / "chart.svg")
    assert not any(tmp_path.iterdir())
