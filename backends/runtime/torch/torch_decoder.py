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

from ...folder_facts import FolderFacts
from ..arrays import Bools, Ints
from ..core.decoder import EMBEDDED, TAKES_EMBEDDINGS, CachedDecoder
from ..core.results import ExpertCounts
from ..core.sampler import Sampler
from ..text.tokenizer import build_encoder_inputs, pad_rows
from . import module_caches as caches
from .cuda_graphs import CapturedSteps, Step
from .expert_offloading import ExpertOffload
from .sampling_context import SamplingContext


class TorchDecoder(CachedDecoder["TorchContext"]):
    """A decoder that runs the generated language model of the folder that `facts` describe.

    - step: the function that runs a decode step; None: the model itself
    - draws: sample tokens on the device if the sampling options allow it; None: only on CUDA
    - offloaded: the manager of the experts; None: all experts are on the device

    Raises WeftError if the model takes embeddings or has no caches.
    """

    def __init__(
        self,
        model: nn.Module,
        facts: FolderFacts,
        *,
        step: Step | None = None,
        draws: bool | None = None,
        offloaded: ExpertOffload | None = None,
    ) -> None:
        self.model, self.name, self.compares = model, str(facts.model), facts.compares
        self.inputs = set(inspect.signature(model.forward).parameters)
        if EMBEDDED in self.inputs:
            raise WeftError(f"{self.name}: {TAKES_EMBEDDINGS}")
        if "cache" not in self.inputs:
            raise WeftError(f"{self.name}: the model has no cache, so it cannot decode; compile it with a kv-cache")
        self.device = next(model.parameters()).device
        start = facts.start if facts.kind == "encoder-decoder" else None
        super().__init__(self.device.type, facts.vocab, facts.max_length, start, facts.max_source)
        self.step: Step = step or self._run_step
        self.sound = facts.sound
        self.draws = self.device.type == "cuda" if draws is None else draws
        self.every_position, self.offloaded = True, offloaded
        # On meta tensors: only the kinds of caches matter here, so allocate no memory.
        with torch.device("meta"):
            kinds = caches.new_cache(model, 1, 1)
        self.can_rewind = caches.can_rewind(kinds)
        stateful = any(map(caches.is_state, caches.iter_layers(kinds)))
        # A rolling cache needs the end of each row (`last`): padding would push keys out of it.
        self.padded = not stateful and not self.compares and (self.can_rewind or "last" in self.inputs)

    @property
    def experts(self) -> ExpertCounts:
        return ExpertCounts() if self.offloaded is None else self.offloaded.counts

    def new_context(self, batch: int, capacity: int) -> TorchContext:
        return TorchContext(self, batch, capacity)

    def run_model(self, **inputs: Any) -> Tensor:
        """Run the model on those of `inputs` that it declares; return its logits. Raises WeftError if PyTorch fails."""
        with convert_torch_errors(self.name), torch.inference_mode():
            logits: Tensor = self.model(**{name: value for name, value in inputs.items() if name in self.inputs})
        return logits

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """Return `values` as a tensor on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def to_source_tensor(self, values: NDArray[Any]) -> Tensor:
        """Return an encoder input on the device: sound in the dtype of the weights, token ids and masks as int64."""
        if values.dtype.kind == "f":
            return self.to_device(values).to(next(self.model.parameters()).dtype)
        return self.to_device(values.astype(np.int64))

    def _run_step(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return self.run_model(input_ids=ids, position_ids=positions, cache=cache)


class TorchContext(SamplingContext):
    """The caches of one batch of a generated module, and the tensors that a decode step reads and writes."""

    def __init__(self, model: TorchDecoder, batch: int, capacity: int) -> None:
        super().__init__(
            batch, capacity, can_rewind=model.can_rewind, padded=model.padded, answers=model.start is not None
        )
        self.model = model
        trouble = f"no memory for the caches of {batch} rows of {capacity} tokens"
        with convert_torch_errors(model.name, f"{trouble}: use a smaller batch or fewer tokens"):
            self._cache = caches.new_cache(model.model, batch, capacity)
            once = getattr(model.step, "captured_once", None)
            any_length, captured = once is not None and once(batch), model.offloaded is None
            self.steps = CapturedSteps(model.step, self._cache, batch, model.device, any_length, captured)
        self._steps_of: dict[int | None, CapturedSteps] = {None: self.steps}  # number of first rows (None: all)
        self._scores = np.zeros((batch, model.vocab), np.float32)
        self._last = np.zeros((2, batch), np.int64)  # token and position of each row's last step
        self._source_rows: Ints = np.arange(batch)  # the source that each row attends to

    @property
    def cache_bytes(self) -> int:
        return caches.count_bytes(self._cache)

    def new_sampling_step(self, samplers: Sequence[Sampler]) -> Callable[[Ints, Bools], Ints] | None:
        return super().new_sampling_step(samplers) if self.model.draws else None

    def convert_errors(self) -> Any:
        return convert_torch_errors(self.model.name)

    def _clear_states(self) -> None:
        with torch.inference_mode():
            caches.clear_states(self._cache)

    def _begin_rows(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        model = self.model
        if model.start is None:
            return prompts
        groups = [[p] for p in prompts] if model.compares else [prompts]
        with torch.inference_mode():
            caches.join_sources(self._cache, [self._encode_sources(group) for group in groups])
        self._source_rows = np.arange(len(prompts))
        return [model.start] * len(prompts)

    def _encode_sources(self, sources: Sequence[Any]) -> Any:
        """Run the encoder on `sources`; return a cache of capacity 1 with their cross-attention keys and values."""
        model, inputs = self.model, build_encoder_inputs(sources, self.model.sound)
        cache = caches.new_cache(model.model, len(sources), 1)
        model.run_model(
            input_ids=torch.full((len(sources), 1), model.start[0] if model.start else 0, device=model.device),
            **{name: model.to_source_tensor(values) for name, values in inputs.items()},
            cache=cache,
        )
        return cache

    def _record_ends(self, first: int, last: Sequence[int]) -> None:
        self.record_step(np.arange(first, first + len(last)), np.array(last), self.lengths - 1)

    def _run_tokens(
        self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool
    ) -> NDArray[Any]:
        model, (ids, _) = self.model, pad_rows(parts)
        together = bool((past == past[0]).all())  # kernels require rows of equal length
        reads = getattr(model.step, "reads", None)
        if together and reads is not None and reads(len(parts)):
            logits = self._read_prompt(first, model.to_device(ids), int(past[0]), None if every else total - past - 1)
        else:
            cache = caches.narrow_rows(self._cache, first, len(parts))
            cache.length = int(past.max())
            inputs = {"input_ids": ids}
            if not together:
                inputs["position_ids"] = past[:, None] + np.arange(ids.shape[1])
            if not every:
                inputs["last"] = total - past - 1
            logits = model.run_model(**{name: model.to_device(values) for name, values in inputs.items()}, cache=cache)
        if logits.shape[-1] != model.vocab:  # known only after a call
            width = f"{model.name}: its logits are {logits.shape[-1]} wide"
            raise WeftError(f"{width}, but the manifest records a vocabulary of {model.vocab} tokens")
        array: NDArray[Any] = logits.float().cpu().numpy()
        return array

    def _read_prompt(self, first: int, ids: Tensor, start: int, last: Ints | None) -> Tensor:
        """Run prompt tokens `ids` [rows, seq] at the positions from `start` on, in the batch rows from `first` on.
        Return the logits of all tokens [rows, seq, vocab]; with `last` [rows] only those of token `last[r]` in each row
        r, [rows, 1, vocab]."""
        model, rows = self.model, len(ids)
        of = None if last is None else model.to_device(last)
        with convert_torch_errors(model.name), torch.inference_mode():
            if of is not None and start == 0 and rows == self.lengths.size:
                logits = self.steps.run_prompt(ids, of)
                if logits is not None:
                    return logits
            cache = caches.narrow_rows(self._cache, first, rows)
            cache.length = start
            positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(rows, -1)
            return model.step(ids, positions, cache, of)

    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        model = self.model
        if first is not None and first not in self._steps_of:
            cache = caches.narrow_rows(self._cache, 0, first)
            self._steps_of[first] = CapturedSteps(model.step, cache, first, model.device, captured=False)
        self.load_step(rows, tokens, first)
        with convert_torch_errors(model.name), torch.inference_mode():
            self._scores[:first] = self._steps_of[first].run_step(self.count_keys()).cpu().numpy()
        self.record_step(rows, tokens)

    def _clear_row(self, row: int) -> None:
        with torch.inference_mode():
            caches.clear_states(caches.narrow_rows(self._cache, row, 1))

    @contextlib.contextmanager
    def _open_tensors(self, row: int) -> Iterator[Sequence[tuple[Any, bool]]]:
        with self.convert_errors(), torch.inference_mode():
            yield [(t, not caches.is_state(c)) for c in caches.iter_layers(self._cache) for t in caches.iter_tensors(c)]

    def load_step(self, rows: Ints, tokens: Ints, first: int | None = None) -> None:
        steps, (ids, positions) = self._steps_of[first], self._last.copy()
        ids[rows], positions[rows] = tokens, self.lengths[rows]
        steps.ids.copy_(self.model.to_device(ids[:first, None]))
        steps.positions.copy_(self.model.to_device(positions[:first, None]))

    def record_step(self, rows: Ints, tokens: Ints, positions: Ints | None = None) -> None:
        """Record token `tokens[i]` and position `positions[rows[i]]` (default: from `lengths`) as the last step of row
        `rows[i]`, for each i: an idle row repeats its last step."""
        self._last[:, rows] = tokens, (self.lengths if positions is None else positions)[rows]

    def _gather_rows(self, rows: Ints, used: int) -> None:
        model = self.model
        moved = np.flatnonzero(rows != np.arange(rows.size))
        with torch.inference_mode():
            if moved.size:
                caches.gather_rows(self._cache, model.to_device(rows), model.to_device(moved), used)
            if not np.array_equal(self._source_rows[rows], self._source_rows):
                caches.gather_sources(self._cache, model.to_device(rows))
                self._source_rows = self._source_rows[rows]
        self._last = self._last[:, rows]

    def _copy_from(self, other: TorchContext, used: int) -> None:
        with torch.inference_mode():
            caches.copy_cache(self._cache, other._cache)
        self._last, self._source_rows = other._last.copy(), other._source_rows.copy()


@contextlib.contextmanager
def convert_torch_errors(name: str, what: str = "PyTorch failed") -> Iterator[None]:
    """Convert an error of PyTorch inside the block to a WeftError "{name}: {what}: {original message}"."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError, IndexError) as error:
        raise WeftError(f"{name}: {what}: {' '.join(str(error).split())}") from error
