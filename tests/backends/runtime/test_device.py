"""Target and device chosen for a source, by installed packages and devices."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft import WeftError
from weft.backends.runtime import device as place
from weft.backends.runtime.device import Place, choose_place
from weft.backends.runtime.ort import session
from weft.backends.torch.package import module

ORT_CPU, ORT_CUDA = Place("ort-cpu", "cpu"), Place("ort-cuda", "cuda")
TORCH_CPU, TORCH_CUDA = Place("torch", "cpu"), Place("torch", "cuda", "bf16")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend what is installed (`ort`: "", "cpu" or "cuda"; `torch`: the same) and whether there is a `gpu`."""

    def pretend(ort: str, pytorch: str, gpu: bool) -> None:
        offered = ["CPUExecutionProvider"] + (["CUDAExecutionProvider"] if ort == "cuda" else [])
        libraries = SimpleNamespace(
            __version__="1.0", get_available_providers=lambda: offered, preload_dlls=lambda: None
        )
        monkeypatch.setitem(sys.modules, "onnxruntime", libraries if ort else None)
        if not pytorch:
            monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytorch == "cuda" and gpu)
        if pytorch == "cuda" and gpu:
            monkeypatch.setattr(module, "parse_device", torch.device)
        for where in (place, session):
            monkeypatch.setattr(where, "find_gpu_problem", lambda: None if gpu else "the NVIDIA driver sees no GPU")
        if ort == "cuda" and gpu:
            monkeypatch.setattr(place, "find_cuda_problem", lambda ort: None)

    return pretend


@pytest.mark.parametrize(
    ("ort", "pytorch", "gpu", "found"),  # for the devices auto, cpu and cuda
    [
        ("cpu", "", False, (ORT_CPU, ORT_CPU, "has no CUDAExecutionProvider")),
        ("cpu", "cpu", True, (ORT_CPU, ORT_CPU, "has no CUDAExecutionProvider")),
        ("cpu", "cuda", True, (TORCH_CUDA, ORT_CPU, TORCH_CUDA)),
        ("cuda", "cuda", True, (ORT_CUDA, ORT_CPU, ORT_CUDA)),
        ("cuda", "cuda", False, (ORT_CPU, ORT_CPU, "the NVIDIA driver sees no GPU")),
        ("", "cpu", False, (TORCH_CPU, TORCH_CPU, "ONNX Runtime cannot be imported")),
        ("", "cuda", True, (TORCH_CUDA, TORCH_CPU, TORCH_CUDA)),
        ("", "", True, ("or weft[torch]", "or weft[torch]", "ONNX Runtime cannot be imported")),
    ],
)
def test_place_is_chosen_by_packages_and_devices(
    machine: Any, ort: str, pytorch: str, gpu: bool, found: tuple[Place | str, ...]
) -> None:
    machine(ort, pytorch, gpu)
    for device, wanted in zip(("auto", "cpu", "cuda"), found, strict=True):
        if isinstance(wanted, Place):
            assert choose_place(device) == wanted
        else:
            with pytest.raises(WeftError, match=wanted.replace("[", r"\[")):
                choose_place(device)


@pytest.mark.parametrize(
    ("device", "target", "found"),
    [
        ("auto", "torch", TORCH_CPU),
        ("cpu", "torch", TORCH_CPU),
        ("cuda", "torch", "device cuda cannot be used: PyTorch"),
        ("auto", "ort-cpu", ORT_CPU),
        ("cuda", "ort-cpu", "models compiled for ort-cpu run on cpu, not on cuda: leave out --target or --device"),
        ("auto", "ort-cuda", "device cuda cannot be used: the installed ONNX Runtime"),
        ("cpu", "ort-cuda", "models compiled for ort-cuda run on cuda, not on cpu"),
        ("auto", "onnx", Place("onnx", "cpu")),
        ("auto", "tpu", "unknown target 'tpu'"),
        ("tpu", None, "device is 'tpu', but it must be one of auto, cpu, cuda"),
    ],
)
def test_requested_target_decides_the_device(machine: Any, device: str, target: str | None, found: Place | str) -> None:
    machine("cpu", "cpu", gpu=False)
    if isinstance(found, Place):
        assert choose_place(device, target) == found
    else:
        with pytest.raises(WeftError, match=found):
            choose_place(device, target)


def test_place_is_printed_as_runtime_and_device() -> None:
    assert [str(p) for p in (ORT_CPU, TORCH_CUDA)] == ["ONNX Runtime on the CPU", "PyTorch on the GPU"]
