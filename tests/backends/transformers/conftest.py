"""Code of models that folders bring along, kept apart from test to test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto classes copy code into the folder of the test, and have imported none before."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.path", [*sys.path])
