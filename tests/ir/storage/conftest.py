"""A folder that weft wrote, and both ways of replacing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.ir.storage import output

from .written import write


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that weft wrote."""
    write(tmp_path / "out", "old")
    return tmp_path / "out"


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing: file systems without an exchange of names get two renames."""
    if request.param == "renames":
        monkeypatch.setattr(output, "swap_paths", lambda a, b: False)
    return str(request.param)
