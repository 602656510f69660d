"""A compiled decoder on ONNX Runtime: caches and states at fixed addresses, everything bound, nothing copied.

The graph's contract: inputs `input_ids` [batch, seq]; where it declares them `attention_mask` [batch, total] (1 for a
token of the row, padding only on the right) and `position_ids` [batch, seq]; caches and states as in `states`; of an
encoder-decoder also what `sources` describes. Outputs `logits` [batch, 1 or seq, vocab] and the present states.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from .buffers import Buffer, float32, kind_of
from .protocols import Bools
from .sampling import Floats, Ints
from .session import Session, failures, one_line, ort_errors
from .sources import Reading, SourceEncoder
from .states import PAST, Memory, read_states
from .text import padded

_TEXT = ("input_ids", "attention_mask", "position_ids")
# Caches grow in steps of this many tokens: few sizes, so memory and captured graphs are used again.
_STEP = {"cpu": 256, "cuda": 1024}


class OrtDecoder:
    """A decoder graph in an open session, behind the encoder of its `sources` where it has one.

    `head_dim` is that of its caches where the graph leaves it open; `rolling` are the numbers of caches that roll;
    `compares` says that the tokens of a row compete, as for places at experts.
    Raises WeftError when the graph does not follow the contract above.
    """

    def __init__(
        self,
        session: Session,
        *,
        vocab: int,
        max_length: int,
        head_dim: int | None = None,
        name: str = "model.onnx",
        rolling: Collection[int] = (),
        compares: bool = False,
        sources: SourceEncoder | None = None,
    ) -> None:
        self.session, self.vocab, self.max_length, self.name, self.sources = session, vocab, max_length, name, sources
        inputs = {i.name: i for i in session.ort.get_inputs()}
        outputs = {o.name: o for o in session.ort.get_outputs()}
        if missing := {"input_ids"} - inputs.keys() or {"logits"} - outputs.keys():
            raise WeftError(f"{name}: the graph has no {', '.join(sorted(missing))}, so it is no decoder")
        self.crossed = {} if sources is None else sources.gives(inputs)
        if unknown := [i for i in inputs if i not in (*_TEXT, *self.crossed) and not PAST.fullmatch(i)]:
            raise WeftError(f"{name}: the graph asks for the input {unknown[0]}, which the runtime does not know")
        self.kinds = {i: kind_of(name, inputs[i]) for i in _TEXT if i in inputs}
        self.logits_kind = kind_of(name, outputs["logits"])
        self.states = read_states(name, inputs, outputs, head_dim=head_dim, rolling=rolling)
        if not self.states:
            raise WeftError(
                f"{name}: the graph has no past_key_values, so it cannot decode; compile it with a kv-cache"
            )
        if "attention_mask" not in inputs and not all(state.recurrent for state in self.states):
            raise WeftError(f"{name}: the graph has no attention_mask for its caches, so it is no decoder")
        _, middle, width = outputs["logits"].shape
        self.every_position = middle != 1
        if isinstance(width, int) and width != vocab:
            raise WeftError(f"{name}: its logits are {width} wide, but the vocabulary is said to hold {vocab} tokens")
        self.padded = self.rewinds and not compares  # rows of a call may differ in length
        self.graph_ids = itertools.count(1)
        self._spare: OrtContext | None = None

    @property
    def start(self) -> tuple[int, ...] | None:
        """What every row begins with where prompts are sources; None where a row begins with its prompt."""
        return None if self.sources is None else (self.sources.start,)

    @property
    def max_prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.max_length if self.sources is None else self.sources.max_length

    @property
    def rewinds(self) -> bool:
        """Whether a row can go back to fewer tokens: not once states or rolling caches have forgotten."""
        return not any(state.recurrent or state.rolling for state in self.states)

    @contextmanager
    def context(self, batch: int, tokens: int) -> Iterator[OrtContext]:
        """Caches for `batch` rows of at most `tokens` tokens each, used again by the next call of the same size.

        Contexts are independent: one may be opened while another is in use.
        Raises WeftError when `tokens` is above `max_length` or the memory cannot be had.
        """
        capacity = self._capacity(tokens)
        found, self._spare = self._spare, None
        if found is not None and found.lengths.size == batch and found.capacity == capacity:
            context = found
        else:
            if found is not None:
                found.close()
            del found
            context = OrtContext(self, batch, capacity)
        try:
            yield context
        finally:
            if self._spare is not None:
                self._spare.close()
            self._spare = context

    def cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes that the caches and states of `batch` rows of `tokens` tokens each take, as `context` allocates them.

        Raises WeftError as `context` does.
        """
        capacity = self._capacity(tokens)
        return batch * sum(state.nbytes(capacity) for state in self.states)

    def _capacity(self, tokens: int) -> int:
        if tokens > self.max_length:
            raise WeftError(
                f"{tokens} tokens are longer than the maximum of {self.max_length} the model was compiled for"
            )
        fixed = {state.limit for state in self.states if state.limit is not None}
        if fixed:
            if tokens > min(fixed):
                raise WeftError(f"{tokens} tokens are longer than the {min(fixed)} that the graph's caches hold")
            return max(fixed)
        step = _STEP[self.session.device]
        return min(self.max_length, -(-tokens // step) * step)

    def run(self, binding: Any, options: Any = None) -> None:
        """Run the graph. Raises WeftError, with ONNX Runtime's own words, when it fails."""
        with failures(self.name):
            self.session.ort.run_with_iobinding(binding, options)


class OrtContext:
    """The caches of one batch, and the buffers a decoding step reads and writes; `lengths` counts each row's tokens."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        session = model.session
        try:
            self.lengths: Ints = np.zeros(batch, np.int64)
            self._ids = np.zeros((batch, capacity), np.int64)  # the tokens held
            self._whole = True  # no run was interrupted
            self._memory = Memory(session, model.states, batch, capacity)
            widths = {"input_ids": 1, "attention_mask": capacity, "position_ids": 1}
            self._inputs = {name: Buffer(session, (batch, widths[name]), kind) for name, kind in model.kinds.items()}
            self._logits = Buffer(session, (batch, 1, model.vocab), model.logits_kind)
        except ort_errors() as error:
            raise WeftError(
                f"no memory for the caches of {batch} rows of {capacity} tokens ({one_line(error)}): "
                "use a smaller batch or fewer tokens"
            ) from error
        shared = session.device == "cpu" and self._logits.host.dtype == np.float32
        self._scores: Floats = self._logits.host[:, 0] if shared else np.zeros((batch, model.vocab), np.float32)
        self._shared = shared
        self._scratch: NDArray[Any] = np.empty(0, self._logits.host.dtype)
        self._reading: Reading | None = None
        self._plain = session.run_options()
        self._graph_ids: list[int] = []  # of the captured steps
        self._steps: list[tuple[Any, Any]] = []  # a binding and its run options for each side of the memory
        if model.sources is None:
            self._bind_steps()

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for caches and states."""
        return self._memory.nbytes

    def close(self) -> None:
        """Release what was captured of this context's steps."""
        for number in self._graph_ids:
            self.model.session.ort.release_captured_graph(number)
        self._graph_ids = []

    def reset(self) -> None:
        """Empty every row."""
        self._memory.clear()
        self._cut(0)
        self._whole = True

    def held(self, prompt: Sequence[int]) -> int:
        """How many first tokens of `prompt` the one row holds and may keep; never all, as the last gives the logits.

        None of a source: what is held then is its answer.
        """
        past = int(self.lengths[0]) if self._whole and self.model.sources is None else 0
        known = np.array(prompt[:-1][:past], np.int64)
        differ = np.flatnonzero(self._ids[0, : known.size] != known)
        common = int(differ[0]) if differ.size else known.size
        return common if common == past or self.model.rewinds else 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Floats:
        """Start every row anew with its prompt, at most `chunk` tokens a run; the logits after each, [batch, vocab].

        Neighbours run together, padded on the right, as far as they fit one chunk; without padding, hence of one
        length, where it would enter states or rolling caches or compete with tokens. A longer prompt runs alone, in its
        own part of the caches, since the attention kernels continue only one row at a time. Prompts fewer than rows are
        spread: each is read once and copied to as many neighbouring rows. Behind an encoder the prompts are sources,
        and the rows begin with its start token. `keep` says how many tokens of its prompt a single row keeps, see
        `held`.

        The result is valid until the next call.
        """
        model, memory = self.model, self._memory
        self._cut(keep) if keep else self.reset()
        if model.sources is not None:
            self._reading = model.sources.read(prompts, model.crossed)
            self._bind_steps()
            prompts = [[model.sources.start]] * len(prompts)
        for first, end in _groups([len(prompt) for prompt in prompts], chunk, padded=model.padded):
            group = prompts[first:end]
            runs = [group] if len(group) > 1 else [[part] for part in parts(group[0][keep:], chunk)]
            if not keep:  # every row ends on the same side
                memory.side = len(runs) % memory.sides
            for run in runs:
                logits = self._extend(first, run)
            self._last(first, run, logits)
        for row, prompt in enumerate(prompts):
            self._inputs["input_ids"].host[row] = prompt[-1]
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].host[:, 0] = self.lengths - 1
        if len(prompts) < self.lengths.size:
            rows = np.repeat(np.arange(len(prompts)), self.lengths.size // len(prompts))
            self.gather(rows)
            self._scores[:] = self._scores[rows]
        return self._scores

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append `tokens` to the one row in one run: the logits as the graph gives them, [seq or 1, vocab]."""
        logits: NDArray[Any] = self._extend(0, [tokens])[0]
        return float32(logits, np.empty(logits.shape, np.float32))

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append a token to every row where `active`, all by default: the logits after it, [batch, vocab].

        The other rows repeat their last step: caches stay as they are, but states go on, so that only a row of caches
        can be taken up again. The result is valid until the next call.
        Raises WeftError when a row's cache is full.
        """
        rows = slice(None) if active is None else np.flatnonzero(active)
        at = self.lengths[rows]
        if at.size and int(at.max()) >= self.capacity:
            raise WeftError(f"the cache is full: it holds {self.capacity} tokens a row")
        inputs = self._inputs
        inputs["input_ids"].host[rows, 0] = np.asarray(tokens, np.int64)[rows]
        if "attention_mask" in inputs:
            inputs["attention_mask"].host[np.arange(self.lengths.size)[rows], at] = 1
        if "position_ids" in inputs:
            inputs["position_ids"].host[rows, 0] = at
        for buffer in inputs.values():
            buffer.push()
        self._whole = False
        self.model.run(*self._steps[self._memory.side])
        self._memory.turn()
        self._ids[np.arange(self.lengths.size)[rows], at] = inputs["input_ids"].host[rows, 0]
        self.lengths[rows] = at + 1
        self._whole = True
        if not self._shared:
            float32(self._logits.pull()[:, 0], self._scores)
        return self._scores

    def gather(self, rows: Ints) -> None:
        """Row r continues what row `rows[r]` holds: its tokens, caches, states and source."""
        self._memory.gather(rows, int(self.lengths.max()))
        self.lengths[:], self._ids[:] = self.lengths[rows], self._ids[rows]
        for buffer in self._inputs.values():
            buffer.host[:] = buffer.host[rows]
        if self._reading is not None and (moved := self._reading.gather(rows)) is not self._reading:
            self._reading = moved
            self._bind_steps()

    def take(self, other: OrtContext) -> None:
        """Hold what `other`, a context of as many rows and of no larger capacity, holds."""
        used = int(other.lengths.max())
        self._memory.take(other._memory, used)
        self.lengths[:], self._whole = other.lengths, other._whole
        self._ids[:, :used] = other._ids[:, :used]
        for name, buffer in self._inputs.items():
            width = other._inputs[name].shape[1]
            buffer.host[:, :width] = other._inputs[name].host
            buffer.host[:, width:] = 0

    def _cut(self, length: int) -> None:
        """Every row with its first `length` tokens only."""
        self.lengths[:] = length
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[:, length:] = 0

    def _extend(self, first: int, parts: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Append one part to each of the rows from `first` on: the graph's logits on the host, valid until the next."""
        ids, _ = padded(parts)
        rows, longest = ids.shape
        past = self.lengths[first : first + rows]
        total = past + [len(part) for part in parts]
        if int(total.max()) > self.capacity:
            raise WeftError(f"{int(total.max())} tokens do not fit the cache of {self.capacity} tokens a row")
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
        logits = self._room(shape)
        binding.bind_output("logits", "cpu", 0, self._logits.onnx_type, shape, logits.ctypes.data)
        self._whole = False
        model.run(binding, self._plain)
        self._memory.turn()
        for row, (part, at) in enumerate(zip(parts, past.tolist(), strict=True), first):
            self._ids[row, at : at + len(part)] = part
        self.lengths[first : first + rows] = total
        self._whole = True
        if "attention_mask" in self._inputs:
            self._inputs["attention_mask"].host[first : first + rows, :width] = feed["attention_mask"]
        return logits

    def _last(self, first: int, parts: Sequence[Sequence[int]], logits: NDArray[Any]) -> None:
        """Keep the logits of each part's last token as those of its row."""
        for row, part in enumerate(parts):
            float32(logits[row, len(part) - 1 if self.model.every_position else 0], self._scores[first + row])

    def _room(self, shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape))
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._scratch.dtype)
        return self._scratch[:size].reshape(shape)

    def _bind_steps(self) -> None:
        """Bind a step of all rows, once for each side of the memory; what was captured before no longer holds."""
        self.close()
        session = self.model.session
        self._steps = []
        for side in range(self._memory.sides):
            binding = session.ort.io_binding()
            self._memory.bind(binding, side)
            for name, buffer in self._inputs.items():
                buffer.bind_input(binding, name)
            if self._reading is not None:
                self._reading.bind(binding)
            self._logits.bind_output(binding, "logits")
            if session.graphs:
                self._graph_ids.append(next(self.model.graph_ids))
            self._steps.append((binding, session.run_options(*self._graph_ids[-1:])))


def parts(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """`prompt` in pieces of at most `chunk` tokens."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _groups(lengths: Sequence[int], chunk: int, padded: bool) -> Iterator[tuple[int, int]]:
    """First row and end of each run of neighbours that fit `chunk` tokens together, one at least; when `padded` to the
    longest, otherwise only neighbours of one length."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        apart = longest * (row + 1 - first) > chunk or not (padded or length == lengths[first])
        if row > first and apart:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)
