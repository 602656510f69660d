"""A compiled decoder on ONNX Runtime: caches, states, inputs and logits are bound at fixed addresses, without copies.

The graph's contract: inputs `input_ids` [batch, seq]; if declared, `attention_mask` [batch, total] (1 for a token of
the row, padding only on the right) and `position_ids` [batch, seq]; caches and states as in `states`; for an
encoder-decoder the outputs of `SourceEncoder`. Outputs: `logits` [batch, 1 or seq, vocab] and the present states.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import StateRecord
from ..arrays import Floats, Ints, float32
from ..core.batch_context import BatchContext
from ..core.decoder import EMBEDDED, TAKES_EMBEDDINGS, CachedDecoder
from ..state_io import infer_states
from ..text.tokenizer import pad_rows
from .bound_states import Memory, read_states
from .buffers import Buffer, kind_of
from .cross_attention import EncodedSources, SourceEncoder
from .session import Session, convert_errors, one_line, ort_errors

_TEXT = ("input_ids", "attention_mask", "position_ids")


class OrtDecoder(CachedDecoder["OrtContext"]):
    """A decoder graph in an open session; `sources` is the encoder of an encoder-decoder.

    `carried`: the states that the folder records; if empty, states are inferred from names, and `rolling` are the layer
    indices of rolling caches.
    `head_dim`: features per head of the caches, if the graph leaves them dynamic.
    `compares`: tokens of a batch row compete, for example for the capacity of experts.

    Raises:
        WeftError: if the graph does not follow the contract of this module.
    """

    def __init__(
        self,
        session: Session,
        *,
        vocab: int,
        max_length: int,
        head_dim: int | None = None,
        name: str = "model.onnx",
        carried: Collection[StateRecord] = (),
        rolling: Collection[int] = (),
        compares: bool = False,
        sources: SourceEncoder | None = None,
    ) -> None:
        source_arguments = () if sources is None else (sources.start, sources.max_length)
        super().__init__(session.device, vocab, max_length, *source_arguments)
        self.session, self.name, self.sources = session, name, sources
        self.sound = None if sources is None else sources.sound
        inputs = {i.name: i for i in session.ort.get_inputs()}
        outputs = {o.name: o for o in session.ort.get_outputs()}
        if EMBEDDED in inputs:
            raise WeftError(f"{name}: {TAKES_EMBEDDINGS}")
        if missing := {"input_ids"} - inputs.keys() or {"logits"} - outputs.keys():
            raise WeftError(f"{name}: the graph has no {', '.join(sorted(missing))}, so it is not a decoder")
        self.crossed = {} if sources is None else sources.gives(inputs)
        carried = carried or infer_states(inputs, rolling)
        expected = {*_TEXT, *self.crossed, *(state.input for state in carried)}
        if unknown := [i for i in inputs if i not in expected]:
            raise WeftError(f"{name}: the graph asks for the input {unknown[0]}, which the runtime does not know")
        self.kinds = {i: kind_of(name, inputs[i]) for i in _TEXT if i in inputs}
        self.logits_kind = kind_of(name, outputs["logits"])
        self.states = read_states(name, inputs, outputs, carried, head_dim)
        if not self.states:
            raise WeftError(
                f"{name}: the graph has no past_key_values, so it cannot decode; compile it with a kv-cache"
            )
        if "attention_mask" not in inputs and not all(state.recurrent for state in self.states):
            raise WeftError(f"{name}: the graph has no attention_mask for its caches, so it is not a decoder")
        _, middle, width = outputs["logits"].shape
        self.every_position = middle != 1
        if isinstance(width, int) and width != vocab:
            raise WeftError(
                f"{name}: its logits are {width} wide, but the manifest records a vocabulary of {vocab} tokens"
            )
        self.can_rewind = all(state.growth.can_rewind for state in self.states)
        self.padded = self.rewinds and not compares
        # Contexts share the session, whose captured graphs are identified only by number.
        self.graph_ids = itertools.count(1)
        self.contexts: type[OrtContext] = OrtContext

    def new_context(self, batch: int, capacity: int) -> OrtContext:
        """Return a context with newly allocated caches for `batch` rows of `capacity` tokens each."""
        return self.contexts(self, batch, capacity)

    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes that `context` allocates for the caches and states of `batch` rows of `tokens` tokens each.

        Raises WeftError as `context` does.
        """
        capacity = self.capacity_for(tokens)
        return batch * sum(state.nbytes(capacity) for state in self.states)

    def capacity_for(self, tokens: int) -> int:
        capacity = super().capacity_for(tokens)
        fixed = {state.limit for state in self.states if state.limit is not None}
        if fixed and tokens > min(fixed):
            raise WeftError(f"{tokens} tokens are longer than the {min(fixed)} that the graph's caches hold")
        return max(fixed, default=capacity)

    def run(self, binding: Any, options: Any = None) -> None:
        """Run the graph. Raises WeftError with ONNX Runtime's message when it fails."""
        with convert_errors(self.name):
            self.session.ort.run_with_iobinding(binding, options)


class OrtContext(BatchContext):
    """The caches of one batch, and the buffers that a decode step reads and writes."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self.model = model
        session = model.session
        try:
            super().__init__(
                batch, capacity, rewinds=model.rewinds, padded=model.padded, answers=model.sources is not None
            )
            self._memory = Memory(session, model.states, batch, capacity)
            # The mask of a step covers the full capacity: captured graphs need fixed shapes and addresses.
            widths = {"input_ids": 1, "attention_mask": capacity, "position_ids": 1}
            self._inputs = {name: Buffer(session, (batch, widths[name]), kind) for name, kind in model.kinds.items()}
            self._logits = Buffer(session, (batch, 1, model.vocab), model.logits_kind)
        except ort_errors() as error:
            raise WeftError(
                f"no memory for the caches of {batch} rows of {capacity} tokens ({one_line(error)}): "
                "use a smaller batch or fewer tokens"
            ) from error
        # On the CPU f32 logits serve as `_scores` directly, without a copy for every token.
        shared = session.device == "cpu" and self._logits.host.dtype == np.float32
        self._scores = self._logits.host[:, 0] if shared else np.zeros((batch, model.vocab), np.float32)
        self._shares_logits = shared
        self._scratch: NDArray[Any] = np.empty(0, self._logits.host.dtype)
        self._reading: EncodedSources | None = None
        self._plain = session.run_options()
        self._graph_ids: list[int] = []  # of the captured steps
        self._steps: list[tuple[Any, Any]] = []  # a binding and its run options for each side of the memory
        self._steps_of: dict[int, list[tuple[Any, Any]]] = {}  # number of first rows -> their `_steps`
        if model.sources is None:
            self._bind_steps()

    @property
    def cache_bytes(self) -> int:
        """Return the bytes allocated for caches and states."""
        return self._memory.nbytes

    def close(self) -> None:
        """Release the captured CUDA graphs of this context's steps."""
        for number in self._graph_ids:
            self.model.session.ort.release_captured_graph(number)
        self._graph_ids = []

    def _clear(self) -> None:
        self._memory.clear()

    def _cut(self, lengths: Ints | int) -> None:
        super()._cut(lengths)
        if "attention_mask" in self._inputs:
            mask = self._inputs["attention_mask"].host
            mask[np.arange(mask.shape[1]) >= self.lengths[:, None]] = 0

    def extend_all(self, given: Sequence[Sequence[int]]) -> list[Floats]:
        # Row by row: GroupQueryAttention accepts several tokens after a past for a single row only.
        logits = [np.empty((0, self.model.vocab), np.float32) for _ in given]
        for row, part in enumerate(given):
            if part:
                logits[row] = np.array(self._extend(row, [part], every=True)[0], np.float32)
        return logits

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        model = self.model
        if model.sources is None:
            return prompts
        self._reading = model.sources.read(prompts, model.crossed)
        self._bind_steps()
        return [[model.sources.start]] * len(prompts)

    def _ready(self, calls: int) -> None:
        self._memory.side = calls % self._memory.sides  # every row ends on the same side

    def _end(self, prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in enumerate(prompts):
            self._inputs["input_ids"].host[row] = prompt[-1]
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].host[:, 0] = self.lengths - 1

    def _call(self, first: int, parts: Sequence[Sequence[int]], past: Ints, total: Ints, every: bool) -> NDArray[Any]:
        ids, _ = pad_rows(parts)
        rows, longest = ids.shape
        width = int(past.max()) + longest
        feed = {
            "input_ids": ids,
            "attention_mask": np.arange(width) < total[:, None],
            "position_ids": past[:, None] + np.arange(longest),
        }
        model = self.model
        binding = model.session.ort.io_binding()
        self._memory.bind(binding, self._memory.side, first, rows)
        if self._reading is not None:
            self._reading.bind(binding, first, rows)
        for name, (_, dtype) in model.kinds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(feed[name], dtype))
        shape = (rows, longest if model.every_position else 1, model.vocab)
        logits = self._reserve_scratch(shape)
        binding.bind_output("logits", "cpu", 0, self._logits.onnx_type, shape, logits.ctypes.data)
        # Not captured: prompts differ in shape.
        model.run(binding, self._plain)
        self._memory.swap_sides(first, rows)
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[first : first + rows, :width] = feed["attention_mask"]
        return logits

    def _step(self, rows: Ints, tokens: Ints) -> None:
        inputs, at = self._inputs, self.lengths[rows]
        inputs["input_ids"].host[rows, 0] = tokens
        if "attention_mask" in inputs:
            inputs["attention_mask"].host[rows, at] = 1
        if "position_ids" in inputs:
            inputs["position_ids"].host[rows, 0] = at
        for buffer in inputs.values():
            buffer.push()
        self.model.run(*self._steps[self._memory.side])
        self._memory.swap_sides()
        if not self._shares_logits:
            float32(self._logits.pull()[:, 0], self._scores)

    def _step_first(self, tokens: Ints) -> None:
        count, inputs, at = tokens.size, self._inputs, self.lengths[: tokens.size]
        inputs["input_ids"].host[:count, 0] = tokens
        if "attention_mask" in inputs:
            inputs["attention_mask"].host[np.arange(count), at] = 1
        if "position_ids" in inputs:
            inputs["position_ids"].host[:count, 0] = at
        for buffer in inputs.values():
            buffer.push()
        if count not in self._steps_of:
            self._steps_of[count] = self._bind_step(count)
        self._memory.bring(0, count)
        self.model.run(*self._steps_of[count][self._memory.side])
        self._memory.swap_sides(0, count)
        if not self._shares_logits:
            float32(self._logits.pull()[:count, 0], self._scores[:count])

    def _vacate(self, row: int) -> None:
        self._memory.vacate(row)
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[row] = 0

    def _move(self, row: int, to: int, used: int) -> None:
        self._memory.move(row, to, used)
        for buffer in self._inputs.values():
            buffer.host[to] = buffer.host[row]

    def _enter(self, first: int, rows: int) -> None:
        self._memory.bring(first, rows)

    def _leave(self, first: int, last: Sequence[int]) -> None:
        self._memory.bring(first, len(last), (self._memory.side + 1) % self._memory.sides)
        rows = np.arange(first, first + len(last))
        self._inputs["input_ids"].host[rows, 0] = last
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].host[rows, 0] = self.lengths[rows] - 1

    def _gather(self, rows: Ints, used: int) -> None:
        self._memory.gather(rows, used)
        for buffer in self._inputs.values():
            buffer.host[:] = buffer.host[rows]
        if self._reading is not None and (moved := self._reading.gather(rows)) is not self._reading:
            self._reading = moved
            self._bind_steps()

    def _take(self, other: OrtContext, used: int) -> None:
        self._memory.take(other._memory, used)
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
        """Bind a step of all rows, once for each side of the memory; release graphs captured before."""
        self.close()
        self._steps, self._steps_of = self._bind_step(None), {}

    def _bind_step(self, rows: int | None) -> list[tuple[Any, Any]]:
        """Bind a step of the first `rows` rows (default: all); return (binding, run options) for each memory side."""
        session, steps = self.model.session, []
        for side in range(self._memory.sides):
            binding = session.ort.io_binding()
            self._memory.bind(binding, side, 0, rows)
            for name, buffer in self._inputs.items():
                buffer.bind_input(binding, name, 0, rows)
            if self._reading is not None:
                self._reading.bind(binding, 0, rows)
            self._logits.bind_output(binding, "logits", 0, rows)
            if session.graphs:
                self._graph_ids.append(next(self.model.graph_ids))
            steps.append((binding, session.run_options(self._graph_ids[-1] if session.graphs else -1)))
        return steps
