"""A folder with a tokenizer of a token per byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scripted import byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
