"""Choice of target and device for a source that is not compiled yet, by the hardware and packages available."""

from __future__ import annotations

from weft.ir.errors import WeftError

from ..target import TARGETS, Backend, Place
from .ort.session import DEVICES, find_cuda_problem, find_gpu_problem, onnxruntime
from .torch.open_torch import import_torch


def choose_place(device: str, target: str | None = None) -> Place:
    """Return the target, device and dtype for a source that runs on `device` (auto, cpu or cuda).

    Without `target`, choose the first target that can use the device; "auto" takes a GPU if any target can use it.

    Raises:
        WeftError: if the device or the runtime of the target is missing, before anything is compiled.
    """
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    if target is not None:
        return TARGETS.lookup(target).place(device)
    if device != "cpu":
        place, trouble = _first_usable("cuda")
        if place is not None:
            return place
        if device == "cuda":
            raise WeftError(f"device cuda cannot be used: {trouble.removeprefix('device cuda cannot be used: ')}")
    place, trouble = _first_usable("cpu")
    if place is None:
        raise WeftError(f"{trouble}, or weft[torch]")
    return place


def _first_usable(device: str) -> tuple[Place | None, str]:
    """Return (the place of the first target that can use `device`, ""), or (None, the reason why the first cannot)."""
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


def by_onnxruntime(device: str, target: Backend) -> Place:
    """Return the place where ONNX Runtime runs `target`. Raises as `choose_place` does."""
    if device not in ("auto", target.device):
        runs = f"what is compiled for {target.name} runs on {target.device}"
        raise WeftError(f"{runs}, not on {device}: leave out --target or --device")
    ort = onnxruntime()
    trouble = find_cuda_problem(ort) if target.device == "cuda" else None
    if trouble:
        raise WeftError(f"device cuda cannot be used: {trouble}")
    return Place(target.name, target.device)


def by_torch(device: str, target: Backend) -> Place:
    """Return the place where PyTorch runs `target`, with dtype bf16 on a GPU. Raises as `choose_place` does."""
    torch = import_torch()
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    from ..torch.package.module import checked_device

    checked_device(chosen)
    return Place(target.name, chosen, "bf16" if chosen == "cuda" else None)
