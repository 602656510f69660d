"""An architecture file in the working folder, and folders of tiny Llamas to compare."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft

from ..command import TINY


@pytest.fixture
def arch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "arch.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return "arch.py"


@pytest.fixture
def compiled_tiny(tiny: Path, tmp_path: Path) -> Path:
    """A folder compiled from the architecture file `tiny`, next to it."""
    weft.compile(tiny, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two Hugging Face folders of one shape, with different weights."""
    from .llamas import write_llama

    home = tmp_path_factory.mktemp("llamas")
    return write_llama(home / "one", 0), write_llama(home / "two", 1)


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text for the tokenizer of `llamas`."""
    from .llamas import TEXT

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path
