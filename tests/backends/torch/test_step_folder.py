"""Who computes the steps of a folder: decode.py or the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.backends.runtime.torch.open_torch import import_from
from weft.backends.torch.package.shipped import load

DECODE = """
class Step:
    def __init__(self, model): pass
    def __call__(self, ids, positions, cache): return "decode.py"
"""


class Model(nn.Module):
    """A model of one weight that tells its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Any) -> str:
        return "model.py"


class OnAGPU(Model):
    """The same as `make_stepper` sees it where there is a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "decode.py").write_text(DECODE)
    with import_from(tmp_path):
        yield tmp_path


def computes(model: nn.Module, folder: Path, texts: int = 1) -> Any:
    return load.make_stepper(model, folder)(torch.zeros(texts, 1), torch.zeros(texts, 1), None)


def test_kernels_are_for_few_texts(folder: Path) -> None:
    assert computes(Model(), folder, load.MAX_CPU_BATCH) == "decode.py"
    assert computes(Model(), folder, load.MAX_CPU_BATCH + 1) == "model.py"


def test_memory_is_not_filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that decode.py reads on a CPU come beside those of the model."""
    monkeypatch.setattr(load.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 3}.__getitem__)
    assert computes(Model(), folder) == "model.py"
    monkeypatch.setattr(load.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 4}.__getitem__)
    assert computes(Model(), folder) == "decode.py"


@pytest.mark.parametrize("reason", ["Triton is not installed", None])
def test_a_gpu_that_runs_no_kernels_is_named(folder: Path, reason: str | None) -> None:
    """The model itself steps then."""
    (folder / "kernels" / "shared").mkdir()
    (folder / "kernels" / "shared" / "launch.py").write_text(f"def refusal(x): return {reason!r}")
    if reason is None:
        assert computes(OnAGPU(), folder) == "decode.py"
        return
    with pytest.warns(UserWarning, match=rf"decode\.py: {reason}$"):
        assert computes(OnAGPU(), folder) == "model.py"


def test_a_model_that_processes_share(folder: Path) -> None:
    """decode.py reads weights as whole tensors, which a DTensor is not."""
    shared = Model()
    weight: Any = shared.weight
    weight.device_mesh = "of two processes"  # as a DTensor's
    assert computes(shared, folder) == "model.py"


def test_a_folder_without_decode(tmp_path: Path) -> None:
    assert computes(Model(), tmp_path) == "model.py"
