"""A decoder that runs a generated PyTorch module: preallocated caches, rows of unequal lengths, in-place steps."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.ir.errors import WeftError

from ...folder_facts import Sound
from ..arrays import Bools, Ints
from ..core.decoder import EMBEDDED, TAKES_EMBEDDINGS, CachedDecoder
from ..core.results import ExpertCounts
from ..core.sampler import Sampler
from ..text.encoder_inputs import encoder_inputs
from ..text.tokenizer import pad_rows
from . import module_caches as caches
from .cuda_graphs import CapturedSteps, Step
from .expert_offloading import Offload
from .sampling_context import DrawingContext


class TorchDecoder(CachedDecoder["TorchContext"]):
    """A decoder that runs a generated language model.

    `step`: the function that runs a decode step; by default the model itself.
    `compares`: tokens of a batch row compete, for example for the capacity of experts.
    `start`, `max_source`, `sound`: of an encoder-decoder the first token of its answers, and the maximum number of
    source tokens or the format of the sound that it reads instead.
    `draws`: sample tokens on the device if the sampling options allow it; by default on CUDA.
    `offloaded`: the manager of the experts, if not all of them are on the device.

    Raises:
        WeftError: if the model takes embeddings or has no caches.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab: int,
        max_length: int,
        name: str = "model.py",
        step: Step | None = None,
        compares: bool = False,
        start: int | None = None,
        max_source: int = 0,
        draws: bool | None = None,
        offloaded: Offload | None = None,
        sound: Sound | None = None,
    ) -> None:
        self.model, self.name, self.compares = model, name, compares
        self.inputs = set(inspect.signature(model.forward).parameters)
        if EMBEDDED in self.inputs:
            raise WeftError(f"{name}: {TAKES_EMBEDDINGS}")
        if "cache" not in self.inputs:
            raise WeftError(f"{name}: the model keeps nothing from call to call, so it cannot decode")
        self.device = next(model.parameters()).device
        super().__init__(self.device.type, vocab, max_length, start, max_source)
        self.step: Step = step or self._plain_step
        self.sound = sound
        self.draws = self.device.type == "cuda" if draws is None else draws
        self.every_position, self.offloaded = True, offloaded
        # On meta tensors: only the kinds of caches matter here, so allocate no memory.
        with torch.device("meta"):
            kinds = caches.new_cache(model, 1, 1)
        self.rewinds = caches.rewinds(kinds)
        stateful = any(map(caches.is_state, caches.layers(kinds)))
        # A rolling cache needs the end of each row (`last`): padding would push keys out of it.
        self.padded = not stateful and not compares and (self.rewinds or "last" in self.inputs)

    @property
    def experts(self) -> ExpertCounts:
        return ExpertCounts() if self.offloaded is None else self.offloaded.counts

    def new_context(self, batch: int, capacity: int) -> TorchContext:
        """Return a context with newly allocated caches for `batch` rows of `capacity` tokens each."""
        return TorchContext(self, batch, capacity)

    def call(self, **inputs: Any) -> Tensor:
        """Return the logits of a model call; `inputs` that the model does not declare are dropped. Raises WeftError
        when PyTorch fails."""
        with failures(self.name), torch.inference_mode():
            logits: Tensor = self.model(**{name: value for name, value in inputs.items() if name in self.inputs})
        return logits

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """Return `values` as a tensor on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def source_tensor(self, values: NDArray[Any]) -> Tensor:
        """Return an encoder input as a tensor on the device: sound in the dtype of the weights, integers as int64."""
        if values.dtype.kind == "f":
            return self.tensor(values).to(next(self.model.parameters()).dtype)
        return self.tensor(values.astype(np.int64))

    def _plain_step(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return self.call(input_ids=ids, position_ids=positions, cache=cache)


class TorchContext(DrawingContext):
    """The caches of one batch, and the tensors that a step reads and writes; `lengths` has the tokens of each row."""

    def __init__(self, model: TorchDecoder, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity, rewinds=model.rewinds, padded=model.padded, answers=model.start is not None)
        self.model = model
        trouble = f"no memory for the caches of {batch} rows of {capacity} tokens"
        with failures(model.name, f"{trouble}: use a smaller batch or fewer tokens"):
            self._cache = caches.new_cache(model.model, batch, capacity)
            once = getattr(model.step, "captured_once", None)
            any_length, captured = once is not None and once(batch), model.offloaded is None
            self.steps = CapturedSteps(model.step, self._cache, batch, model.device, any_length, captured)
        self._steps_of: dict[int, CapturedSteps] = {}  # number of first rows -> their steps
        self._scores = np.zeros((batch, model.vocab), np.float32)
        self._last = np.zeros((2, batch), np.int64)  # token and position of each row's last step
        self._of: Ints = np.arange(batch)  # the source that each row attends to

    @property
    def cache_bytes(self) -> int:
        """Return the bytes allocated for caches and states."""
        return caches.nbytes(self._cache)

    def drawing(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        return super().drawing(samplers) if self.model.draws else None

    def running(self) -> Any:
        return failures(self.model.name)

    def _clear(self) -> None:
        with torch.inference_mode():
            caches.clear(self._cache)

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        model = self.model
        self.settle()
        if model.start is None:
            return prompts
        groups = [[p] for p in prompts] if model.compares else [prompts]
        with torch.inference_mode():
            caches.share_sources(self._cache, [self._read(group) for group in groups])
        self._of = np.arange(len(prompts))
        return [model.start] * len(prompts)

    def _read(self, sources: Sequence[Any]) -> Any:
        """Run the encoder over `sources`; return a cache of capacity 1 that holds their keys and values."""
        model, inputs = self.model, encoder_inputs(sources, self.model.sound)
        cache = caches.new_cache(model.model, len(sources), 1)
        model.call(
            input_ids=torch.full((len(sources), 1), model.start[0] if model.start else 0, device=model.device),
            **{name: model.source_tensor(values) for name, values in inputs.items()},
            cache=cache,
        )
        return cache

    def _ready(self, calls: int) -> None:
        pass  # states are updated in place

    def _end(self, prompts: Sequence[Sequence[int]]) -> None:
        self.record_step(np.arange(len(prompts)), np.array([prompt[-1] for prompt in prompts]), self.lengths - 1)

    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        model, (ids, _) = self.model, pad_rows(parts)
        self.settle()
        together = bool((past == past[0]).all())  # kernels require rows of equal length
        reads = getattr(model.step, "reads", None)
        if together and reads is not None and reads(len(parts)):
            logits = self._read_prompt(first, model.tensor(ids), int(past[0]), None if every else total - past - 1)
        else:
            cache = caches.narrow(self._cache, first, len(parts))
            cache.length = int(past.max())
            inputs = {"input_ids": ids}
            if not together:
                inputs["position_ids"] = past[:, None] + np.arange(ids.shape[1])
            if not every:
                inputs["last"] = total - past - 1
            logits = model.call(**{name: model.tensor(values) for name, values in inputs.items()}, cache=cache)
        if logits.shape[-1] != model.vocab:  # known only after a call
            width = f"{model.name}: its logits are {logits.shape[-1]} wide"
            raise WeftError(f"{width}, but the manifest records a vocabulary of {model.vocab} tokens")
        array: NDArray[Any] = logits.float().cpu().numpy()
        return array

    def _read_prompt(self, first: int, ids: Tensor, start: int, last: Ints | None) -> Tensor:
        """Run prompt tokens `ids` [rows, seq] at the positions from `start` on, in the batch rows from `first` on.

        Return the logits of all tokens [rows, seq, vocab]; with `last` [rows] only the logits of the token with that
        index in each row, [rows, 1, vocab].
        """
        model, rows = self.model, len(ids)
        of = None if last is None else model.tensor(last)
        with failures(model.name), torch.inference_mode():
            if of is not None and start == 0 and rows == self.lengths.size:
                logits = self.steps.prompt(ids, of)
                if logits is not None:
                    return logits
            cache = caches.narrow(self._cache, first, rows)
            cache.length = start
            positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(rows, -1)
            return model.step(ids, positions, cache, of)

    def _step(self, rows: Ints, tokens: Ints) -> None:
        self.load_step(rows, tokens)
        with failures(self.model.name), torch.inference_mode():
            logits = self.steps.logits(self.keys())
            self._scores[:] = logits.cpu().numpy()
        self.record_step(rows, tokens)

    def _step_first(self, tokens: Ints) -> None:
        model, count = self.model, tokens.size
        self.settle()
        if count not in self._steps_of:
            cache = caches.narrow(self._cache, 0, count)
            self._steps_of[count] = CapturedSteps(model.step, cache, count, model.device, captured=False)
        steps = self._steps_of[count]
        steps.ids.copy_(model.tensor(tokens[:, None]))
        steps.positions.copy_(model.tensor(self.lengths[:count, None]))
        with failures(model.name), torch.inference_mode():
            self._scores[:count] = steps.logits(self.keys()).cpu().numpy()
        self.record_step(np.arange(count), tokens)

    def _vacate(self, row: int) -> None:
        self.settle()
        with torch.inference_mode():
            caches.clear(caches.narrow(self._cache, row, 1))

    def _move(self, row: int, to: int, used: int) -> None:
        rows = np.arange(self.lengths.size)
        rows[to] = row
        self._gather(rows, used)

    def _leave(self, first: int, last: Sequence[int]) -> None:
        rows = np.arange(first, first + len(last))
        self.record_step(rows, np.array(last), self.lengths - 1)

    def load_step(self, rows: Ints, tokens: Ints) -> None:
        """Copy the inputs of the next step to the device: `tokens` for `rows`; other rows repeat their last step."""
        ids, positions = self._last.copy()
        ids[rows], positions[rows] = tokens, self.lengths[rows]
        self.steps.ids.copy_(self.model.tensor(ids[:, None]))
        self.steps.positions.copy_(self.model.tensor(positions[:, None]))
        self.settle()

    def record_step(self, rows: Ints, tokens: Ints, positions: Ints | None = None) -> None:
        """Record the last step of each of `rows`, which an idle row repeats: its token, and its position from
        `positions` [batch] (default: `lengths`)."""
        self._last[:, rows] = tokens, (self.lengths if positions is None else positions)[rows]

    def _gather(self, rows: Ints, used: int) -> None:
        model = self.model
        self.settle()
        moved = np.flatnonzero(rows != np.arange(rows.size))
        with torch.inference_mode():
            if moved.size:
                caches.gather(self._cache, model.tensor(rows), model.tensor(moved), used)
            if not np.array_equal(self._of[rows], self._of):
                caches.gather_sources(self._cache, model.tensor(rows))
                self._of = self._of[rows]
        self._last = self._last[:, rows]

    def _take(self, other: TorchContext, used: int) -> None:
        with torch.inference_mode():
            caches.take(self._cache, other._cache)
        self._last, self._of = other._last.copy(), other._of.copy()
        self.settle()


@contextlib.contextmanager
def failures(name: str, what: str = "PyTorch failed") -> Iterator[None]:
    """Convert errors of PyTorch inside the block to a WeftError "name: what: original message"."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError, IndexError) as error:
        raise WeftError(f"{name}: {what}: {' '.join(str(error).split())}") from error
