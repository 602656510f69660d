"""`weft bisect`: what it prints, its exit status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ...command import weft_command


def test_equal_models_are_reported(tiny: Path, compiled_tiny: Path) -> None:
    result = weft_command("bisect", tiny, compiled_tiny)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("equal\n") and "error of logits" in result.stdout


def test_first_difference_is_reported(tiny: Path, compiled_tiny: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(tiny.read_text().replace("RMSNorm()", "RMSNorm(1e-2)"))
    result = weft_command("bisect", wrong, compiled_tiny, "--viz", tmp_path / "place.html")
    assert result.exit_code == 1, result.output
    assert "layers.0.attn_norm, relative error" in result.stdout and result.stdout.endswith("DIFFERENT\n")
    assert "if, in A, eps is 1e-06 instead of 0.01" in result.stdout and "SimplifiedLayerNormalization" in result.stdout
    assert (tmp_path / "place.html").is_file() and "place.html written" in result.stderr
    found = json.loads(weft_command("bisect", compiled_tiny, wrong, "--json", "--ids", "1,2,3").stdout)
    assert found["kind"] == "eps" and found["at"] == "b" and found["tokens"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ids", "1,x"), "is not a list of token ids"),
        (("--ids", "1", "--prompt", "words"), "cannot be combined with"),
        (("--ids", "1,12"), "from 0 to 11"),
        (("--viz", "place.svg"), "place.svg"),
    ],
)
def test_bad_options_are_refused(tiny: Path, compiled_tiny: Path, args: tuple[str, ...], words: str) -> None:
    result = weft_command("bisect", tiny, compiled_tiny, *args)
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1
