"""Target and device for a source that is not compiled yet, by the hardware and packages available."""

from __future__ import annotations

from typing import NamedTuple

from weft.ir.errors import WeftError

from ..targets import find_target
from .ort.session import DEVICES, gpu_trouble, missing_cuda, onnxruntime
from .torch.folder import pytorch


class Place(NamedTuple):
    """Target to compile a source for, and the device ("cpu" or "cuda") that it then runs on."""

    target: str
    device: str
    dtype: str | None = None  # the first of the target's

    def __str__(self) -> str:
        runtime = "PyTorch" if self.target == "torch" else "ONNX Runtime"
        return f"{runtime} on {'the CPU' if self.device == 'cpu' else 'the GPU'}"


def place_for(device: str, target: str | None = None) -> Place:
    """The place where a source runs on `device` ("auto", "cpu" or "cuda"), compiled for `target` if that is given.

    Otherwise for ONNX Runtime where it can use the device, for PyTorch where only that can; "auto" takes a GPU that
    either can use. PyTorch computes in bf16 on a GPU.

    Raises:
        WeftError: if the device or what runs the target is not there, before anything is compiled.
    """
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    if target == "torch":
        return _by_torch(device)
    if target is not None:
        return _by_onnxruntime(device, target)
    if device != "cpu":
        trouble = _no_cuda_sessions()
        if trouble is None:
            return Place("ort-cuda", "cuda")
        if gpu_trouble() is None and _has_torch_gpu():
            return _by_torch("cuda")
        if device == "cuda":
            raise WeftError(f"device cuda cannot be used: {trouble}")
    try:
        onnxruntime()
    except WeftError as missing:
        try:
            return _by_torch("cpu")
        except WeftError:
            raise WeftError(f"{missing}, or weft[torch]") from None
    return Place("ort-cpu", "cpu")


def _by_torch(device: str) -> Place:
    torch = pytorch()
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    from ..torch.package.module import checked_device

    checked_device(chosen)
    return Place("torch", chosen, "bf16" if chosen == "cuda" else None)


def _by_onnxruntime(device: str, target: str) -> Place:
    runs = find_target(target).device
    if device not in ("auto", runs):
        raise WeftError(
            f"what is compiled for {target} runs on {runs}, not on {device}: leave out --target or --device"
        )
    trouble = missing_cuda(onnxruntime()) if runs == "cuda" else None
    if trouble:
        raise WeftError(f"device cuda cannot be used: {trouble}")
    return Place(target, runs)


def _no_cuda_sessions() -> str | None:
    """Say in a few words why ONNX Runtime cannot use CUDA; None if it can."""
    try:
        return missing_cuda(onnxruntime())
    except WeftError as error:
        return str(error)


def _has_torch_gpu() -> bool:
    try:
        return bool(pytorch().cuda.is_available())
    except WeftError:
        return False
