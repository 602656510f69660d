"""Fixtures of modules, steps and kernels."""

from __future__ import annotations

import pytest

from weft.backends.torch.kernels.shared import gemv


@pytest.fixture
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of many rows even where there are few outputs: fewer blocks to interpret."""
    monkeypatch.setattr(gemv, "PROCESSORS", 1)
