"""A compiled decoder on ONNX Runtime: caches, states, inputs and logits are bound at fixed addresses, without copies.

The contract of the graph:

- inputs: `input_ids` [batch, seq]; if declared, `attention_mask` [batch, total] (1 for a token, 0 for padding, which
  must be on the right) and `position_ids` [batch, seq]; past caches and states, as in `bound_states`; for an
  encoder-decoder also the outputs of `SourceEncoder`
- outputs: `logits` [batch, 1 or seq, vocab]; present caches and states
- optional input: `logits_from_end` [1, n], the distances from the end of the tokens whose logits are returned
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as clone
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import FolderFacts
from ...target import TARGETS
from ..arrays import Floats, Ints, convert_to_float32
from ..compiled_folder import infer_states
from ..core.batch_context import BatchContext
from ..core.decoder import EMBEDDED, TAKES_EMBEDDINGS, CachedDecoder
from ..text.tokenizer import pad_rows
from .bound_states import Buffer, StateBuffers, bind_states, find_kind
from .cross_attention import EncodedSources, SourceEncoder
from .ort_encoder import OrtEncoder
from .session import (
    FROM_END,
    Session,
    convert_ort_errors,
    import_onnxruntime,
    join_lines,
    list_ort_errors,
    open_session,
)

_TEXT = ("input_ids", "attention_mask", "position_ids")


class OrtDecoder(CachedDecoder["OrtContext"]):
    """The decoder graph of the folder that `facts` describe, in an open session; `encoder` is the session of an
    encoder-decoder's encoder. Caches and states that the folder does not record are inferred from the names of inputs.

    Raises WeftError if a graph does not follow the contract in the docstring of this module.
    """

    def __init__(self, session: Session, facts: FolderFacts, encoder: Session | None = None) -> None:
        sources = None if encoder is None else SourceEncoder(encoder, facts)
        start, max_source = (None, 0) if sources is None else (facts.start, facts.max_source)
        name, vocab, compares, rounds = str(facts.model), facts.vocab, facts.compares, facts.rounds
        # On CUDA, captured graphs and one stream allow one call at a time.
        concurrent = session.device == "cpu"
        super().__init__(session.device, vocab, facts.max_length, start, max_source, concurrent)
        self.session, self.name, self.sources, self.compares = session, name, sources, compares
        self.sound = facts.sound
        inputs = {i.name: i for i in session.ort.get_inputs()}
        outputs = {o.name: o for o in session.ort.get_outputs()}
        if EMBEDDED in inputs:
            raise WeftError(f"{name}: {TAKES_EMBEDDINGS}")
        if missing := {"input_ids"} - inputs.keys() or {"logits"} - outputs.keys():
            raise WeftError(f"{name}: the graph has no {', '.join(sorted(missing))}, so it is not a decoder")
        self.cross_inputs = {} if sources is None else sources.select_inputs(inputs)
        carried = facts.states or infer_states(inputs, facts.rolling)
        expected = {*_TEXT, *self.cross_inputs, *(state.input for state in carried)}
        if unknown := [i for i in inputs if i not in expected]:
            raise WeftError(f"{name}: the graph has the input {unknown[0]}, which the runtime cannot provide")
        self.kinds = {i: find_kind(name, inputs[i]) for i in _TEXT if i in inputs}
        self.logits_kind = find_kind(name, outputs["logits"])
        self.states = bind_states(name, inputs, outputs, carried, facts.head_dim)
        if not self.states:
            raise WeftError(
                f"{name}: the graph has no past_key_values, so it cannot decode; compile it with the pass kv-cache"
            )
        if "attention_mask" not in inputs and not all(state.recurrent for state in self.states):
            raise WeftError(f"{name}: the graph has no attention_mask for its caches, so it is not a decoder")
        _, middle, width = outputs["logits"].shape
        self.selects = any(i.name == FROM_END for i in session.ort.get_overridable_initializers())
        self.every_position = middle != 1 or self.selects
        if isinstance(width, int) and width != vocab:
            raise WeftError(
                f"{name}: its logits are {width} wide, but the manifest records a vocabulary of {vocab} tokens"
            )
        self.can_rewind = all(state.growth.can_rewind for state in self.states)
        self.padded = self.can_rewind and not compares
        self.rounds = rounds
        self.drafts_pay = self.padded and self.every_position and session.device == "cpu" and not rounds
        # Contexts share the session, whose captured graphs are identified only by number.
        self.graph_ids = itertools.count(1)
        self.context_class = AppendingContext if any(state.appends for state in self.states) else OrtContext

    def new_context(self, batch: int, capacity: int) -> OrtContext:
        return self.context_class(self, batch, capacity)

    @property
    def shares_prefixes(self) -> bool:
        # ONNX Runtime alone cannot copy parts of tensors on a GPU.
        return super().shares_prefixes and (self.device_type == "cpu" or self.context_class is not OrtContext)

    def select_adapter(self, name: str, path: Path) -> OrtDecoder:
        """Return a decoder in the same session whose runs use the adapter in the file at `path`. Raises WeftError if
        ONNX Runtime cannot read the file."""
        with convert_ort_errors(str(path), "ONNX Runtime cannot read it"):
            adapter = import_onnxruntime().AdapterFormat.read_adapter(str(path)).get_parameters()
        selected = clone(self)
        selected.adapter, selected.session, selected._spare = name, replace(self.session, adapter=adapter), None
        return selected

    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes that `context` allocates for the caches and states of `batch` rows of `tokens` tokens each.
        Raises WeftError if `tokens` is above the maximum length."""
        capacity = self.compute_capacity(tokens)
        return batch * sum(state.nbytes(capacity) for state in self.states)

    def compute_capacity(self, tokens: int) -> int:
        capacity = super().compute_capacity(tokens)
        fixed = {state.limit for state in self.states if state.limit is not None}
        if fixed and tokens > min(fixed):
            raise WeftError(f"{tokens} tokens do not fit the caches of the graph, which hold {min(fixed)}: use fewer")
        return max(fixed, default=capacity)

    def run(self, binding: Any, options: Any = None) -> None:
        """Run the graph with the IO binding `binding`. Raises WeftError with ONNX Runtime's message if this fails."""
        with convert_ort_errors(self.name):
            self.session.ort.run_with_iobinding(binding, options)


class OrtContext(BatchContext):
    """The caches of one batch, and the buffers that a decode step reads and writes."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self.model = model
        session = model.session
        try:
            super().__init__(
                batch, capacity, can_rewind=model.can_rewind, padded=model.padded, answers=model.sources is not None
            )
            self._memory = StateBuffers(session, model.states, batch, capacity)
            # The mask of a step covers the full capacity: captured graphs need fixed shapes and addresses.
            widths = {"input_ids": 1, "attention_mask": capacity, "position_ids": 1}
            self._inputs = {name: Buffer(session, (batch, widths[name]), kind) for name, kind in model.kinds.items()}
            self._logits = Buffer(session, (batch, 1, model.vocab), model.logits_kind)
        except list_ort_errors() as error:
            raise WeftError(
                f"no memory for the caches of {batch} rows of {capacity} tokens ({join_lines(error)}): "
                "use a smaller batch or fewer tokens"
            ) from error
        # On the CPU f32 logits serve as `_scores` directly, without a copy for every token.
        shared = session.device == "cpu" and self._logits.host.dtype == np.float32
        self._scores = self._logits.host[:, 0] if shared else np.zeros((batch, model.vocab), np.float32)
        self._shares_logits = shared
        self._scratch: NDArray[Any] = np.empty(0, self._logits.host.dtype)
        self._encoded_sources: EncodedSources | None = None
        self._default_options = session.new_run_options()
        self._graph_ids: list[int] = []  # of the captured steps
        # Number of first rows (None: all) -> a binding and its run options for each copy of the states.
        self._steps_of: dict[int | None, list[tuple[Any, Any]]] = {}
        if model.sources is None:
            self._bind_steps()

    @property
    def cache_bytes(self) -> int:
        return self._memory.nbytes

    def close(self) -> None:
        """Release the captured CUDA graphs of this context's steps."""
        for number in self._graph_ids:
            self.model.session.ort.release_captured_graph(number)
        self._graph_ids = []

    def _clear_states(self) -> None:
        self._memory.clear_states()

    def _truncate_rows(self, lengths: Ints | int) -> None:
        super()._truncate_rows(lengths)
        if "attention_mask" in self._inputs:
            mask = self._inputs["attention_mask"].host
            mask[np.arange(mask.shape[1]) >= self.lengths[:, None]] = 0

    def append(self, first: int, parts: Sequence[Sequence[int]]) -> Floats:
        memory, rows = self._memory, len(parts)
        memory.sync_rows(first, rows)
        scores = super().append(first, parts)
        # The call swapped the copies of these rows only: move their states back to the copy of the other rows.
        memory.sync_rows(first, rows, (memory.copy_index + 1) % memory.copy_count)
        return scores

    def extend_all(self, parts: Sequence[Sequence[int]]) -> list[Floats]:
        # Row by row: GroupQueryAttention accepts several tokens after a past for a single row only.
        logits = [np.empty((0, self.model.vocab), np.float32) for _ in parts]
        for row, part in enumerate(parts):
            if part:
                logits[row] = np.array(self._append_tokens(row, [part], every=True)[0], np.float32)
        return logits

    def _begin_rows(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        model = self.model
        if model.sources is None:
            return prompts
        self._encoded_sources = model.sources.encode_sources(prompts, model.cross_inputs)
        self._bind_steps()
        return [[model.sources.facts.start]] * len(prompts)

    def _prepare_prefill(self, calls: int) -> None:
        self._memory.copy_index = calls % self._memory.copy_count  # the states of every row end in the same copy

    def _record_ends(self, first: int, last: Sequence[int]) -> None:
        rows = np.arange(first, first + len(last))
        self._inputs["input_ids"].host[rows, 0] = last
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].host[rows, 0] = self.lengths[rows] - 1

    def _run_tokens(
        self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool
    ) -> NDArray[Any]:
        ids, _ = pad_rows(parts)
        rows, longest = ids.shape
        width = int(past.max()) + longest
        feed = {
            "input_ids": ids,
            "attention_mask": self._make_mask(past, total, width),
            "position_ids": past[:, None] + np.arange(longest),
        }
        model = self.model
        binding = model.session.new_binding()
        self._memory.bind(binding, self._memory.copy_index, first, rows)
        self._memory.bind_past(binding, first, past, longest)
        if self._encoded_sources is not None:
            self._encoded_sources.bind(binding, first, rows)
        for name, (_, dtype) in model.kinds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(feed[name], dtype))
        selects, distances = every and model.selects, np.arange(longest, 0, -1)
        if selects:
            # By address, because arrays are accepted for required inputs only. The output cannot be bound to memory
            # of this shape, because its declared shape has one token.
            binding.bind_input(FROM_END, "cpu", 0, np.int64, (1, longest), distances.ctypes.data)
            binding.bind_output("logits", "cpu")
        else:
            shape = (rows, longest if model.every_position and not model.selects else 1, model.vocab)
            logits = self._reserve_scratch(shape)
            binding.bind_output("logits", "cpu", 0, self._logits.onnx_type, shape, logits.ctypes.data)
        # Not captured: prompts differ in shape.
        model.run(binding, self._default_options)
        if selects:
            logits = binding.get_outputs()[-1].numpy()
        self._memory.keep_new(first, past, total)
        self._memory.swap_copies(first, rows)
        self._record_mask(first, feed["attention_mask"])
        return logits

    @staticmethod
    def _make_mask(past: Ints, total: Ints, width: int) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = np.arange(width) < total[:, None]
        return mask

    def _record_mask(self, first: int, mask: NDArray[Any]) -> None:
        """Record the mask of a call, [rows, width], from batch row `first` on, for steps after it."""
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[first : first + len(mask), : mask.shape[1]] = mask

    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        inputs, at = self._inputs, self.lengths[rows]
        inputs["input_ids"].host[rows, 0] = tokens
        if "attention_mask" in inputs:
            inputs["attention_mask"].host[rows, at] = 1
        if "position_ids" in inputs:
            inputs["position_ids"].host[rows, 0] = at
        for buffer in inputs.values():
            buffer.upload()
        if first is not None:
            self._memory.sync_rows(0, first)
            if first not in self._steps_of:
                self._steps_of[first] = self._bind_step(first)
        self.model.run(*self._steps_of[first][self._memory.copy_index])
        self._memory.swap_copies(0, first)
        if not self._shares_logits:
            convert_to_float32(self._logits.download()[:first, 0], self._scores[:first])

    def _clear_row(self, row: int) -> None:
        self._memory.clear_row(row)
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[row] = 0

    def write_row(self, row: int, tokens: Sequence[int], parts: Iterable[tuple[int, Sequence[Any]]]) -> None:
        super().write_row(row, tokens, parts)
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[row, : len(tokens)] = 1

    @contextmanager
    def _open_tensors(self, row: int) -> Iterator[Sequence[tuple[Any, bool]]]:
        self._memory.sync_rows(row, 1)
        yield [(self._view(buffer), has_slots) for buffer, has_slots in self._memory.list_current()]

    def _view(self, buffer: Buffer) -> Any:
        return buffer.host

    def _gather_rows(self, rows: Ints, used: int) -> None:
        self._memory.gather_rows(rows, used)
        for buffer in self._inputs.values():
            buffer.host[:] = buffer.host[rows]
        if (sources := self._encoded_sources) is not None and (moved := sources.gather_rows(rows)) is not sources:
            self._encoded_sources = moved
            self._bind_steps()

    def _copy_from(self, other: OrtContext, used: int) -> None:
        self._memory.copy_from(other._memory, used)
        for name, buffer in self._inputs.items():
            width = other._inputs[name].shape[1]
            buffer.host[:, :width] = other._inputs[name].host
            buffer.host[:, width:] = 0

    def _reserve_scratch(self, shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape))
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._scratch.dtype)
        return self._scratch[:size].reshape(shape)

    def _bind_steps(self) -> None:
        """Bind a step of all rows, once for each copy of the recurrent states; release CUDA graphs captured before."""
        self.close()
        self._steps_of = {None: self._bind_step(None)}

    def _bind_step(self, rows: int | None) -> list[tuple[Any, Any]]:
        """Return (IO binding, run options) of a step of `rows` rows (None: all) for each copy of the states."""
        session, steps = self.model.session, []
        for copy in range(self._memory.copy_count):
            binding = session.new_binding()
            self._memory.bind(binding, copy, 0, rows)
            for name, buffer in self._inputs.items():
                buffer.bind_input(binding, name, 0, rows)
            if self._encoded_sources is not None:
                self._encoded_sources.bind(binding, 0, rows)
            self._logits.bind_output(binding, "logits", 0, rows)
            if session.graphs:
                self._graph_ids.append(next(self.model.graph_ids))
            steps.append((binding, session.new_run_options(self._graph_ids[-1] if session.graphs else -1)))
        return steps


class AppendingContext(OrtContext):
    """A context of a graph that appends to its caches: shapes change with every call, so nothing is bound ahead."""

    @staticmethod
    def _make_mask(past: Ints, total: Ints, width: int) -> NDArray[np.bool_]:
        slots, used, lengths = np.arange(width), past.max(initial=0), past[:, None]
        mask: NDArray[np.bool_] = (slots >= used - lengths) & (slots < used + total[:, None] - lengths)
        return mask

    def _record_mask(self, first: int, mask: NDArray[Any]) -> None:
        pass

    def _bind_steps(self) -> None:
        pass

    def _step(self, rows: Ints, tokens: Ints, first: int | None) -> None:
        ids = self._inputs["input_ids"].host
        ids[rows, 0] = tokens
        count = len(ids) if first is None else first
        past = np.maximum(self.lengths[:count] - 1, 0)  # other rows repeat their last token
        past[rows] = self.lengths[rows]
        self._memory.sync_rows(0, count)
        logits = self._run_tokens(0, ids[:count].tolist(), past, past + 1, every=False)
        convert_to_float32(logits[:, -1], self._scores[:count])


def open_encoder(facts: FolderFacts, device: str, threads: int | None) -> OrtEncoder:
    """Return the encoder of an ONNX folder on `device` ("auto", "cpu" or "cuda"). Raises WeftError when a file or the
    device cannot be used."""
    return OrtEncoder(_open_session(facts, 0, device, threads), facts)  # no graphs: shapes vary


def open_decoder(facts: FolderFacts, device: str, threads: int | None, stream: Any = None) -> OrtDecoder:
    """Return the decoder of a folder, with the encoder of an encoder-decoder; it runs on the PyTorch `stream` if given.
    Raises as `open_encoder` does."""
    session = _open_session(facts, 0, device, threads, graphs=True, stream=stream)
    encoder = _open_session(facts, 1, device, threads) if facts.kind == "encoder-decoder" else None
    return OrtDecoder(session, facts, encoder)


def _open_session(facts: FolderFacts, file: int, device: str, threads: int | None, **options: Any) -> Session:
    return open_session(facts.files[file], device=device, threads=threads, target=TARGETS[facts.target], **options)
