"""Folders of PyTorch, and their scripts run in this process."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .....passes.zoo import ZOO
from .scripts import compiled

NAMES = ("model", "load", "sampling", "decode", "kernels")


Script = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Script]:
    """Runs a script of a folder in this process, where weft cannot be imported: its status, stdout, and stderr."""

    def run(path: Path, *args: str | Path) -> tuple[int, str, str]:
        for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
            del sys.modules[name]
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "weft", None)
            patch.setattr(sys, "argv", [str(path), *map(str, args)])
            patch.setattr(sys, "path", [str(path.parent), *sys.path])
            try:
                runpy.run_path(str(path), run_name="__main__")
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
        return status, *capsys.readouterr()

    yield run
    for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(ZOO["variant/grouped"](), tmp_path_factory.mktemp("scripts") / "decoder")


@pytest.fixture
def broken(decoder: Path, tmp_path: Path) -> Path:
    """A copy of the decoder to be changed."""
    return Path(shutil.copytree(decoder, tmp_path / "broken"))
