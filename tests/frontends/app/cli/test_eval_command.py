"""`weft eval`: its table, and the same values as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from ...command import weft_command


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
