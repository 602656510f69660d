"""Detection of Triton for a tensor; the interpreter of the kernel tests must not leak out of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from weft.backends.torch.kernels.shared import launch


@pytest.fixture(autouse=True)
def _outside_the_kernel_tests(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the interpreter that `device` switches on for the tests of this folder."""
    monkeypatch.setattr(launch, "INTERPRETED", False)


class OnCuda:
    """Imitate a tensor on the first CUDA device, as far as `refusal` and `has_pdl` ask."""

    is_cuda, device = True, torch.device("cuda:0")


@pytest.mark.parametrize(
    ("found", "reason", "pdl"),
    [((7, 5), "compute capability 7.5 is older than 8.0", False), ((8, 0), None, False), ((9, 0), None, True)],
)
def test_gpus_are_refused_below_compute_capability_8(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], reason: str | None, pdl: bool
) -> None:
    monkeypatch.setattr(launch, "capability", lambda index: found)
    monkeypatch.setattr(launch, "triton", launch.triton or launch)
    x = cast(torch.Tensor, OnCuda())
    assert launch.refusal(x) == reason
    assert launch.has_pdl(x) is pdl


def test_a_cpu_tensor_is_refused_outside_the_kernel_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton", launch.triton or launch)
    assert launch.refusal(torch.empty(0)) == "Triton does not run on cpu"


def test_subprocesses_do_not_interpret_kernels(tmp_path: Path, warm: dict[str, str]) -> None:
    """It inherits TRITON_INTERPRET, which only says how kernels are decorated: launchers still compute with torch."""
    ask = tmp_path / "ask.py"
    ask.write_text(f"import torch; from {launch.__name__} import refusal; print(refusal(torch.empty(0)))")
    done = subprocess.run([warm["PYTHON_EXEC"], ask], env=warm, capture_output=True, text=True, check=True)
    said = "Triton is not installed" if launch.triton is None else "Triton does not run on cpu"
    assert done.stdout == f"{said}\n"


def test_without_triton_every_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton", None)
    assert launch.refusal(torch.empty(0)) == "Triton is not installed"

    def kernel(x: Any) -> None: ...

    assert launch.jit(kernel) is kernel
