"""Folders of a test for what tools keep on this machine; a folder of real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let datasets keep its tables in the folder of the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real SmolLM2-135M as a folder for transformers in f32."""
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    weft.compile(smollm2_gguf, folder, target="transformers", dtype="f32")
    return folder
