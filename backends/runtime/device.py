"""Choice of target and device for a source that is not compiled yet, by the hardware and packages available."""

from __future__ import annotations

from weft.ir.errors import WeftError

from ..target import TARGETS, Backend, Place, import_torch
from .ort.session import DEVICES, find_cuda_problem, find_gpu_problem, import_onnxruntime


def choose_place(device: str, target: str | None = None) -> Place:
    """Return the target, device and dtype with which to compile a source that will run on `device` (auto, cpu or cuda).
    Without `target`, choose the first registered target that has the device in `chosen_on` and can use it; "auto" then
    is the GPU if it has such a target, else the CPU. Raises WeftError if `device` or `target` is unknown, or the device
    or the target's runtime is missing."""
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    if target is not None:
        return TARGETS.lookup(target).place(device)
    if device != "cpu":
        place, trouble = _find_usable_place("cuda")
        if place is not None:
            return place
        if device == "cuda":
            raise WeftError(f"device cuda cannot be used: {trouble.removeprefix('device cuda cannot be used: ')}")
    place, trouble = _find_usable_place("cpu")
    if place is None:
        raise WeftError(f"{trouble}, or weft[torch]")
    return place


def _find_usable_place(device: str) -> tuple[Place | None, str]:
    """Return (the place of the first target that can use `device`, ""), or (None, why the first candidate cannot)."""
    trouble = ""
    for target in TARGETS.values():
        if device in target.chosen_on:
            try:
                return target.place(device), ""
            except WeftError as error:
                trouble = trouble or str(error)
            if device == "cuda" and find_gpu_problem() is not None:
                break  # no GPU at all: loading further libraries would only cost time
    return None, trouble


def choose_ort_place(device: str, target: Backend) -> Place:
    """Return the place where ONNX Runtime runs `target`: the target's only device. Raises WeftError if `device` is
    neither "auto" nor this device, or ONNX Runtime or CUDA cannot be used."""
    if device not in ("auto", target.device):
        runs = f"models compiled for {target.name} run on {target.device}"
        raise WeftError(f"{runs}, not on {device}: leave out --target or --device")
    ort = import_onnxruntime()
    trouble = find_cuda_problem(ort) if target.device == "cuda" else None
    if trouble:
        raise WeftError(f"device cuda cannot be used: {trouble}")
    return Place(target.name, target.device)


def choose_torch_place(device: str, target: Backend) -> Place:
    """Return the place where PyTorch runs `target`, with dtype bf16 on a GPU; "auto" is the GPU if PyTorch finds one.
    Raises WeftError if PyTorch or the device is missing."""
    torch = import_torch()
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    from ..torch.package.module import parse_device

    parse_device(chosen)
    return Place(target.name, chosen, "bf16" if chosen == "cuda" else None)
