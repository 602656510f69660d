"""Decoders on ONNX Runtime whose tokens PyTorch samples on the GPU: both use the same memory and the same stream.

A step of `OrtContext` copies inputs to the device and all logits to the host. Here PyTorch writes the inputs of the
next step into the graph's buffers (the mask from positions), and only tokens are copied to the host, one step later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...folder_facts import FolderFacts
from ...torch.lib.caches import Cache
from ..arrays import Ints
from ..ort import ort_decoder as folder
from ..ort.bound_states import Buffer
from ..ort.ort_decoder import OrtContext, OrtDecoder
from ..ort.session import convert_ort_errors
from .cuda_graphs import CapturedSteps
from .sampling_context import SamplingContext


def new_stream() -> Any:
    """Return a CUDA stream of PyTorch for ONNX Runtime to share; None if PyTorch has no CUDA."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]  # as torch has it


def open_decoder(facts: FolderFacts, device: str, threads: int | None) -> OrtDecoder:
    """Return the decoder of a folder of ONNX models; on CUDA it samples tokens on the device. Raises WeftError as
    `ort.ort_decoder.open_decoder` does."""
    model = folder.open_decoder(facts, device, threads, new_stream())
    if model.session.stream is not None:
        model.context_class = SamplingOrtContext
    return model


def view_buffer(buffer: Buffer) -> Tensor:
    """Return a tensor that shares the memory of `buffer`; uint16, which numpy uses for bf16, becomes bfloat16."""
    if buffer.device == "cpu":
        tensor = torch.from_numpy(buffer.host)
    else:  # the CUDA array interface, version 3
        memory = {
            "shape": buffer.shape,
            "typestr": buffer.host.dtype.str,
            "data": (buffer.address, False),
            "version": 3,
        }
        tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=buffer.device)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


class SamplingOrtContext(SamplingContext, OrtContext):
    """An `OrtContext` whose steps can sample tokens on the device."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self._async_steps: list[tuple[Any, Any]] = []  # per copy of the states, a binding and options that do not wait
        super().__init__(model, batch, capacity)
        with self.convert_errors():
            self._views = {name: view_buffer(buffer) for name, buffer in self._inputs.items()}
            self._device_logits = view_buffer(self._logits)
            device = self._device_logits.device
            self._slots = torch.arange(capacity, device=device)
            self.steps = CapturedSteps(self._run, Cache([], capacity), batch, device, captured=False)

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        stream = self.model.session.stream
        with convert_ort_errors(self.model.name), nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def discard_step(self) -> None:
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
        super().discard_step()

    @contextmanager
    def _open_tensors(self, row: int) -> Iterator[Sequence[tuple[Any, bool]]]:
        with self.convert_errors(), super()._open_tensors(row) as tensors:
            yield tensors

    def _view(self, buffer: Buffer) -> Any:
        return view_buffer(buffer)

    def load_step(self, rows: Ints, tokens: Ints) -> None:
        ids, positions = self._inputs["input_ids"].host.astype(np.int64), np.maximum(self.lengths - 1, 0)[:, None]
        ids[rows, 0], positions[rows, 0] = tokens, self.lengths[rows]
        self.steps.ids.copy_(torch.from_numpy(ids))
        self.steps.positions.copy_(torch.from_numpy(positions))

    def _run(self, ids: Tensor, positions: Tensor, _: Any) -> Tensor:
        """Queue a step with `ids`, `positions` [batch, 1]; return the tensor for its logits [batch, 1, vocab]."""
        inputs = {"input_ids": ids, "position_ids": positions}
        for name, target in self._views.items():
            target.copy_(self._slots <= positions if name == "attention_mask" else inputs[name])
        self.model.run(*self._async_steps[self._memory.copy_index])
        self._memory.swap_copies()
        return self._device_logits

    def _bind_steps(self) -> None:
        super()._bind_steps()
        session, steps = self.model.session, self._steps_of[None]
        self._async_steps = [
            (binding, session.new_run_options(number, waits=False))
            for (binding, _), number in zip(steps, self._graph_ids or [-1] * len(steps), strict=True)
        ]
