"""Functions that open a folder of the target torch: import its Python, map its weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import FolderFacts
from ...target import import_torch
from ..arrays import Floats
from ..core.sampler import check_count
from ..huge_pages import use_huge_pages
from ..ort.ort_encoder import HIDDEN, EncoderModel
from ..ort.session import DEVICES

if TYPE_CHECKING:
    from .torch_decoder import TorchDecoder

NAMES = ("model", "decode", "kernels")  # modules of a folder that import each other


def open_decoder(facts: FolderFacts, device: str, threads: int | None, experts: int | None = None) -> TorchDecoder:
    """Return the decoder of a folder of the target torch. The folder's decode.py runs the decode steps if it exists and
    is faster here, else model.py does. With `experts`, at most that many experts of each mixture are on the device, and
    model.py runs the decode steps. Raises WeftError when PyTorch, the device or a file cannot be used, or `experts` is
    set for an encoder or a model without experts."""
    import_torch()
    from .torch_decoder import TorchDecoder

    if experts is not None and facts.kind == "encoder":
        raise WeftError(f"{facts.folder} is an encoder, whose experts cannot be offloaded: leave out experts_on_device")
    model, step = _open_model(facts, device, threads, all_on_device=experts is None)
    offloaded = None
    if experts is not None:
        from .expert_offloading import offload_experts

        offloaded = offload_experts(model, experts, _resolve_device(device), str(facts.folder))
    return TorchDecoder(model, facts, step=step, offloaded=offloaded)


def open_encoder(facts: FolderFacts, device: str, threads: int | None) -> TorchEncoder:
    """Return the encoder of a folder of the target torch. Raises WeftError as `open_decoder` does."""
    return TorchEncoder(_open_model(facts, device, threads)[0], facts)


class TorchEncoder(EncoderModel):
    """An encoder that runs a generated module. Raises WeftError without an output `last_hidden_state`."""

    def __init__(self, model: Any, facts: FolderFacts) -> None:
        super().__init__(facts, facts.outputs)
        self.model, self._order = model, facts.outputs
        self._inputs = set(inspect.signature(model.forward).parameters)
        if HIDDEN not in self._order:
            raise WeftError(f"{self.folder}: its outputs are {', '.join(self._order)}, so it is not an encoder")

    def _outputs(self, values: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Floats]:
        import torch

        from .torch_decoder import convert_torch_errors

        device = next(self.model.parameters()).device
        inputs = {n: torch.from_numpy(v.astype(np.int64)).to(device) for n, v in values.items() if n in self._inputs}
        with convert_torch_errors(str(self.folder)), torch.inference_mode():
            outputs = self.model(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [outputs[self._order.index(name)].float().cpu().numpy() for name in names]


def _open_model(facts: FolderFacts, device: str, threads: int | None, all_on_device: bool = True) -> tuple[Any, Any]:
    """Load the model of a folder; return (model, function that runs a decode step). Unless `all_on_device`, load it on
    the CPU, and return (model, None). `threads` (None: unchanged) sets PyTorch's threads for the process."""
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    torch = import_torch()
    if threads is not None:
        check_count("threads", threads)
        torch.set_num_threads(threads)
    from ...torch.package.shipped.load import Failure, check_device, load_model, make_stepper

    place = _resolve_device(device) if all_on_device else "cpu"
    with import_from(facts.folder), use_huge_pages() if place == "cpu" else nullcontext():
        try:
            check_device(_resolve_device(device))
            model = load_model(facts.folder, place)
            return model, make_stepper(model, facts.folder) if all_on_device else None
        except Failure as failure:
            raise WeftError(str(failure)) from failure
        except Exception as error:  # raised by code in the folder, which anyone may have written
            raise WeftError(f"{facts.model}: cannot be run: {type(error).__name__}: {error}") from error


def _resolve_device(device: str) -> str:
    return ("cuda" if import_torch().cuda.is_available() else "cpu") if device == "auto" else device


@contextmanager
def import_from(folder: Path) -> Iterator[None]:
    """Import the modules `NAMES` from `folder` inside the block; restore sys.path and sys.modules after it."""
    path, before = str(folder.resolve()), _pop_modules()
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        _pop_modules()
        sys.modules.update(before)


def _pop_modules() -> dict[str, Any]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in NAMES}
