"""Charts of evaluations: models, captions and refusals."""

from __future__ import annotations

from pathlib import Path

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
    assert weft_command("eval", *args, *short[:2], "--plot", tmp_path / "chart.png", "--theme", "dark").exit_code == 0
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "not as .gif" in refused("eval", *args, *short, "--plot", tmp_path / "chart.gif")
    for option in (["--plot", tmp_path / "none.svg"], ["--layers"]):
        assert f"{option[0]} needs MODELS, --passes, --weights or --adapter" in refused("eval", *args, *option)
    assert not (tmp_path / "none.svg").exists() and not (tmp_path / "chart.gif").exists()
