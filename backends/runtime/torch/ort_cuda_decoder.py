"""Decoders on ONNX Runtime whose tokens PyTorch samples on the GPU: both use the same memory and the same stream.

A step of `OrtContext` copies inputs to the device and all logits to the host. Here PyTorch writes the inputs of the
next step into the graph's buffers (the mask from positions), and only tokens are copied to the host, one step later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...folder_facts import FolderFacts
from ...torch.lib.caches import Cache
from ..arrays import Ints
from ..ort import open_ort as folder
from ..ort.buffers import Buffer
from ..ort.ort_decoder import OrtContext, OrtDecoder
from ..ort.session import convert_errors
from .cuda_graphs import CapturedSteps
from .sampling_context import DrawingContext


def stream() -> Any:
    """Return a CUDA stream of PyTorch for ONNX Runtime to share; None if PyTorch has no CUDA."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]  # as torch has it


def decoder(facts: FolderFacts, device: str, threads: int | None) -> OrtDecoder:
    """Return the decoder of a folder of ONNX models, which samples tokens on the device if that is CUDA. Raises as
    `ort.open_ort.decoder` does."""
    model = folder.decoder(facts, device, threads, stream())
    if model.session.stream is not None:
        model.contexts = DrawingOrtContext
    return model


class _Memory:
    """GPU memory of a buffer as an object that PyTorch accepts (CUDA array interface, version 3)."""

    def __init__(self, buffer: Buffer) -> None:
        kind = buffer.host.dtype.str
        at = (buffer.address, False)
        self.__cuda_array_interface__ = {"shape": buffer.shape, "typestr": kind, "data": at, "version": 3}


def view(buffer: Buffer) -> Tensor:
    """Return a tensor that shares the memory of `buffer`; uint16, numpy's type for bf16, becomes bfloat16."""
    on_cpu = buffer.device == "cpu"
    tensor = torch.from_numpy(buffer.host) if on_cpu else torch.as_tensor(_Memory(buffer), device=buffer.device)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


class DrawingOrtContext(DrawingContext, OrtContext):
    """An `OrtContext` whose steps may sample on the device."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self._async_steps: list[tuple[Any, Any]] = []  # for each side a binding and run options that do not wait
        super().__init__(model, batch, capacity)
        with self.running():
            self._views = {name: view(buffer) for name, buffer in self._inputs.items()}
            self._device_logits = view(self._logits)
            device = self._device_logits.device
            self._slots = torch.arange(capacity, device=device)
            self.steps = CapturedSteps(self._run, Cache([], capacity), batch, device, captured=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        stream = self.model.session.stream
        with convert_errors(self.model.name), nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def settle(self) -> None:
        if self._loaded is not None:
            if (stream := self.model.session.stream) is not None:
                stream.synchronize()
            at = np.maximum(self.lengths - 1, 0)
            inputs = {
                "input_ids": np.take_along_axis(self._ids, at[:, None], 1),
                "position_ids": at[:, None],
                "attention_mask": np.arange(self.capacity) < self.lengths[:, None],
            }
            for name, buffer in self._inputs.items():
                buffer.host[:] = inputs[name]
        super().settle()

    def load_step(self, rows: Ints, tokens: Ints) -> None:
        self.settle()
        ids, positions = self._inputs["input_ids"].host.astype(np.int64), np.maximum(self.lengths - 1, 0)[:, None]
        ids[rows, 0], positions[rows, 0] = tokens, self.lengths[rows]
        self.steps.ids.copy_(torch.from_numpy(ids))
        self.steps.positions.copy_(torch.from_numpy(positions))

    def _run(self, ids: Tensor, positions: Tensor, _: Any) -> Tensor:
        """Launch a step of all rows; return its logits [batch, 1, vocab] without waiting for them."""
        inputs = {"input_ids": ids, "position_ids": positions}
        for name, target in self._views.items():
            target.copy_(self._slots <= positions if name == "attention_mask" else inputs[name])
        self.model.run(*self._async_steps[self._memory.side])
        self._memory.swap_sides()
        return self._device_logits

    def _bind_steps(self) -> None:
        super()._bind_steps()
        session, numbers = self.model.session, self._graph_ids or [-1] * len(self._steps)
        options = [session.run_options(number, waits=False) for number in numbers]
        self._async_steps = [
            (binding, run_options) for (binding, _), run_options in zip(self._steps, options, strict=True)
        ]

    # -- methods that change rows without device sampling call `settle` first

    def _cut(self, lengths: Ints | int) -> None:
        self.settle()
        super()._cut(lengths)

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        self.settle()
        return super()._begin(prompts)

    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        self.settle()
        return super()._call(first, parts, past, total, every)

    def _step(self, rows: Ints, tokens: Ints) -> None:
        self.settle()
        super()._step(rows, tokens)

    def _step_first(self, tokens: Ints) -> None:
        self.settle()
        super()._step_first(tokens)

    def _vacate(self, row: int) -> None:
        self.settle()
        super()._vacate(row)

    def _move(self, row: int, to: int, used: int) -> None:
        self.settle()
        super()._move(row, to, used)

    def _gather(self, rows: Ints, used: int) -> None:
        self.settle()
        super()._gather(rows, used)

    def _take(self, other: OrtContext, used: int) -> None:
        self.settle()
        if isinstance(other, DrawingOrtContext):
            other.settle()
        super()._take(other, used)
