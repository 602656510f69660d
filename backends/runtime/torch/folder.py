"""Opening a folder of the target torch: its Python is imported, its weights are mapped."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...facts import Facts
from ..arrays import Floats
from ..core.sampling import check_count
from ..huge_pages import huge_pages
from ..ort.encoder import HIDDEN, Encoder
from ..ort.session import DEVICES

if TYPE_CHECKING:
    from .decoder import TorchDecoder

NAMES = ("model", "decode", "kernels")  # what a folder imports of itself


def decoder(facts: Facts, device: str, threads: int | None, experts: int | None = None) -> TorchDecoder:
    """The language model of a folder, with the steps of its decode.py where they can run.

    With `experts` the device holds that many of each mixture, and model.py computes the steps too.
    Raises WeftError when PyTorch, the device or a file cannot be used, or the model has no mixture of experts.
    """
    pytorch()
    from .decoder import TorchDecoder

    if experts is not None and facts.kind == "encoder":
        raise WeftError(f"{facts.folder} is an encoder: its experts are all on the device")
    model, step = _opened(facts, device, threads, whole=experts is None)
    offloaded = None
    if experts is not None:
        from .experts import offload

        offloaded = offload(model, experts, _chosen(device), str(facts.folder))

    return TorchDecoder(
        model,
        vocab=facts.vocab,
        max_length=facts.max_length,
        name=str(facts.model),
        step=step,
        compares=facts.compares,
        start=facts.start if facts.kind == "encoder-decoder" else None,
        max_source=facts.max_source,
        sound=facts.sound,
        offloaded=offloaded,
    )


def encoder(facts: Facts, device: str, threads: int | None) -> TorchEncoder:
    """The encoder of a folder. Raises as `decoder` does."""
    model, _ = _opened(facts, device, threads)
    return TorchEncoder(model, facts)


class TorchEncoder(Encoder):
    """A generated module, `last_hidden_state` among whose outputs is."""

    def __init__(self, model: Any, facts: Facts) -> None:
        super().__init__(facts, facts.outputs)
        self.model, self._order = model, facts.outputs
        self._inputs = set(inspect.signature(model.forward).parameters)
        if HIDDEN not in self._order:
            raise WeftError(f"{self.folder}: its outputs are {', '.join(self._order)}, so it is not an encoder")

    def _outputs(self, values: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Floats]:
        import torch

        from .decoder import failures

        device = next(self.model.parameters()).device
        inputs = {n: torch.from_numpy(v.astype(np.int64)).to(device) for n, v in values.items() if n in self._inputs}
        with failures(str(self.folder)), torch.inference_mode():
            every = self.model(**inputs)
        every = every if isinstance(every, tuple) else (every,)
        return [every[self._order.index(name)].float().cpu().numpy() for name in names]


def _opened(facts: Facts, device: str, threads: int | None, whole: bool = True) -> tuple[Any, Any]:
    """The model of a folder and what runs its steps, `whole` on the device; else it is on the CPU, and runs its own."""
    if device not in DEVICES:
        raise WeftError(f"device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    torch = pytorch()
    if threads is not None:
        check_count("threads", threads)
        torch.set_num_threads(threads)
    from ...torch.package.shipped.load import Failure, check_device, load_model, stepper

    place = _chosen(device) if whole else "cpu"
    with importing(facts.folder), huge_pages() if place == "cpu" else nullcontext():
        try:
            check_device(_chosen(device))
            model = load_model(facts.folder, place)
            return model, stepper(model, facts.folder) if whole else None
        except Failure as failure:
            raise WeftError(str(failure)) from failure
        except Exception as error:  # of code in the folder, which may be anybody's
            raise WeftError(f"{facts.model}: cannot be run: {type(error).__name__}: {error}") from error


def _chosen(device: str) -> str:
    return ("cuda" if pytorch().cuda.is_available() else "cpu") if device == "auto" else device


def pytorch() -> Any:
    """The torch module. Raises WeftError, saying what to install, when there is none."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise WeftError(f"PyTorch cannot be imported ({error}): install weft[torch]") from error


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """Modules that the block imports by `NAMES` are those of `folder`, and known to nobody afterwards."""
    path, before = str(folder.resolve()), _set_aside()
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        _set_aside()
        sys.modules.update(before)


def _set_aside() -> dict[str, Any]:
    """The loaded modules of those names, which are forgotten."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in NAMES}
