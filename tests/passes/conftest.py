"""Fixtures of tests of passes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Write token ids of three sequences, of two lengths, and return the path."""
    path = tmp_path / "text.json"
    path.write_text(json.dumps([*np.random.default_rng(0).integers(0, 37, (2, 9)).tolist(), [5, 3, 8, 1]]))
    return str(path)
