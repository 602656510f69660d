"""A folder with a tokenizer of a token per byte, and a process that renders chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.backends.runtime.text.chat import Renderer

from .scripted import byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """Yield a worker that renders in forks: starting Python for each template takes most of a test's time."""
    with Renderer() as worker:
        yield worker
