"""Choice of the next token: filters of logits, and random draws."""

from __future__ import annotations

from pathlib import Path

from .conftest import Script


def test_equal_seeds_draw_equal_tokens(decoder: Path, script: Script) -> None:
    options = ("--ids", "3,4", "--max-tokens", 15, "--top-k", 12, "--top-p", 0.9)
    runs = [script(decoder / "generate.py", *options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
