"""`weft verify`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...command import weft_command


def test_verify_reports_agreement(compiled_tiny: Path) -> None:
    result = weft_command("verify", "--trust", compiled_tiny, "--tokens", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("passed\n")
    assert "same next token" in result.stdout and "none of " in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "words"), "tokenizer.json"),
        (("--against", "nowhere"), "no config.json"),
        (("--tokens", "-1"), "--tokens"),
        (("--device", "cuda"), "ort-cpu"),
    ],
)
def test_verify_refuses_bad_options(compiled_tiny: Path, args: tuple[str, ...], words: str) -> None:
    result = weft_command("verify", "--trust", compiled_tiny, *args)
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1
