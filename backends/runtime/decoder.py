"""A compiled decoder on ONNX Runtime: key/value caches at fixed addresses, everything bound, nothing copied.

The graph's contract: inputs `input_ids` [batch, seq], `attention_mask` [batch, total] (1 for a token of the row,
padding only on the right), `position_ids` [batch, seq] where it declares them, `past_key_values.{i}.key|value`
[batch, kv_heads, capacity, head_dim]; outputs `logits` [batch, 1 or seq, vocab] and `present.{i}.key|value`, written
into the past's memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from .sampling import Floats, Ints
from .session import Session, onnxruntime, ort_errors

# ONNX Runtime's name of a tensor type: (its ONNX number, the numpy dtype for its bytes; ORT knows none for bf16).
_TYPES: dict[str, tuple[int, type[np.generic]]] = {
    "tensor(float)": (1, np.float32),
    "tensor(uint8)": (2, np.uint8),
    "tensor(int8)": (3, np.int8),
    "tensor(int32)": (6, np.int32),
    "tensor(int64)": (7, np.int64),
    "tensor(float16)": (10, np.float16),
    "tensor(bfloat16)": (16, np.uint16),
}
_TEXT = ("input_ids", "attention_mask", "position_ids")
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
# Caches grow in steps of this many tokens: few sizes, so memory and captured graphs are used again.
_STEP = {"cpu": 256, "cuda": 1024}

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _Cache:
    past: str
    present: str
    onnx_type: int
    dtype: type[np.generic]
    heads: int
    capacity: int | None  # None: as the caller wishes
    width: int


class _Buffer:
    """Zeros at a fixed address on the session's device; `host` is that memory on the CPU, a staging copy on CUDA."""

    def __init__(self, session: Session, shape: tuple[int, ...], onnx_type: int, dtype: type[np.generic]) -> None:
        self.shape, self.onnx_type, self.device = shape, onnx_type, session.device
        self.host: NDArray[Any] = np.zeros(shape, dtype)
        self._value = onnxruntime().OrtValue.ortvalue_from_numpy(self.host, self.device, 0)
        self.address: int = self._value.data_ptr()

    def drop_host(self) -> None:
        """Give the staging copy back, where it is one."""
        if self.device != "cpu":
            self.host = np.empty(0, self.host.dtype)

    def push(self) -> None:
        """Host to device."""
        if self.device != "cpu":
            self._value.update_inplace(self.host)

    def pull(self) -> NDArray[Any]:
        """The device's contents on the host."""
        return self.host if self.device == "cpu" else self._value.numpy()


class OrtDecoder:
    """A decoder graph in an open session; `head_dim` is that of its caches where the graph leaves it open.

    Raises WeftError when the graph does not follow the contract above.
    """

    def __init__(
        self, session: Session, *, vocab: int, max_length: int, head_dim: int | None = None, name: str = "model.onnx"
    ) -> None:
        self.session, self.vocab, self.max_length, self.name = session, vocab, max_length, name
        inputs = {i.name: i for i in session.ort.get_inputs()}
        outputs = {o.name: o for o in session.ort.get_outputs()}
        if missing := {"input_ids", "attention_mask"} - inputs.keys() or {"logits"} - outputs.keys():
            raise WeftError(f"{name}: the graph has no {', '.join(sorted(missing))}, so it is no decoder")
        if unknown := [i for i in inputs if i not in _TEXT and not _PAST.fullmatch(i)]:
            raise WeftError(f"{name}: the graph asks for the input {unknown[0]}, which the runtime does not know")
        self.types = {i: _type(name, inputs[i]) for i in _TEXT if i in inputs}
        self.logits_type = _type(name, outputs["logits"])
        self.caches = [_cache(name, i, outputs, head_dim) for key, i in inputs.items() if _PAST.fullmatch(key)]
        if not self.caches:
            raise WeftError(
                f"{name}: the graph has no past_key_values, so it cannot decode; compile it with a kv-cache"
            )
        _, middle, width = outputs["logits"].shape
        self.every_position = middle != 1
        if isinstance(width, int) and width != vocab:
            raise WeftError(f"{name}: its logits are {width} wide, but the vocabulary is said to hold {vocab} tokens")
        self.graph_ids = itertools.count(1)
        self._spare: OrtContext | None = None

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

    def _capacity(self, tokens: int) -> int:
        if tokens > self.max_length:
            raise WeftError(
                f"{tokens} tokens are longer than the maximum of {self.max_length} the model was compiled for"
            )
        fixed = {cache.capacity for cache in self.caches if cache.capacity is not None}
        if fixed:
            if tokens > min(fixed):
                raise WeftError(f"{tokens} tokens are longer than the {min(fixed)} that the graph's caches hold")
            return max(fixed)
        step = _STEP[self.session.device]
        return min(self.max_length, -(-tokens // step) * step)

    def run(self, binding: Any, options: Any = None) -> None:
        """Run the graph. Raises WeftError, with ONNX Runtime's own words, when it fails."""
        try:
            self.session.ort.run_with_iobinding(binding, options)
        except ort_errors() as error:
            raise WeftError(f"{self.name}: ONNX Runtime failed: {' '.join(str(error).split())}") from error


class OrtContext:
    """The caches of one batch, and the buffers a decoding step reads and writes; `lengths` counts each row's tokens."""

    def __init__(self, model: OrtDecoder, batch: int, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        session = model.session
        try:
            self.lengths: Ints = np.zeros(batch, np.int64)
            self._memory = [
                _Buffer(session, (batch, c.heads, c.capacity or capacity, c.width), c.onnx_type, c.dtype)
                for c in model.caches
            ]
            for buffer in self._memory:
                buffer.drop_host()
            widths = {"input_ids": 1, "attention_mask": capacity, "position_ids": 1}
            self._inputs = {name: _Buffer(session, (batch, widths[name]), *kind) for name, kind in model.types.items()}
            self._logits = _Buffer(session, (batch, 1, model.vocab), *model.logits_type)
        except ort_errors() as error:
            raise WeftError(
                f"no memory for the caches of {batch} rows of {capacity} tokens ({' '.join(str(error).split())}): "
                "use a smaller batch or fewer tokens"
            ) from error
        shared = session.device == "cpu" and self._logits.host.dtype == np.float32
        self._scores: Floats = self._logits.host[:, 0] if shared else np.zeros((batch, model.vocab), np.float32)
        self._shared = shared
        self._scratch: NDArray[Any] = np.empty(0, self._logits.host.dtype)
        self._step = session.ort.io_binding()
        self._bind_caches(self._step, 0, batch)
        for name, buffer in self._inputs.items():
            self._step.bind_input(name, buffer.device, 0, buffer.onnx_type, buffer.shape, buffer.address)
        logits = self._logits
        self._step.bind_output("logits", logits.device, 0, logits.onnx_type, logits.shape, logits.address)
        self._graph_id = next(model.graph_ids)
        self._plain: Any = _graph(-1) if session.graphs else None
        self._captured: Any = _graph(self._graph_id) if session.graphs else None

    def close(self) -> None:
        """Release what was captured of this context's steps."""
        if self._captured is not None:
            self.model.session.ort.release_captured_graph(self._graph_id)
            self._captured = None

    def reset(self) -> None:
        """Empty every row."""
        self.lengths[:] = 0
        self._inputs["attention_mask"].host[:] = 0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512) -> Floats:
        """Start every row anew with its prompt, at most `chunk` tokens a run; the logits after each, [batch, vocab].

        Neighbours run together, padded on the right, as far as they fit one chunk. A longer prompt runs alone, in its
        own part of the caches, since the attention kernels continue only one row at a time.
        The result is valid until the next call.
        """
        self.reset()
        for first, end in _groups([len(prompt) for prompt in prompts], chunk):
            group = prompts[first:end]
            if len(group) == 1:
                for part in parts(group[0], chunk):
                    logits, group = self._extend(first, [part]), [part]
            else:
                logits = self._extend(first, group)
            self._last(first, group, logits)
        for row, prompt in enumerate(prompts):
            self._inputs["input_ids"].host[row] = prompt[-1]
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].host[:, 0] = self.lengths - 1
        return self._scores

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append `tokens` to the first row in one run: the logits as the graph gives them, [seq or 1, vocab]."""
        logits: NDArray[Any] = self._extend(0, [tokens])[0]
        return _float32(logits, np.empty(logits.shape, np.float32))

    def step(self, tokens: Sequence[int] | Ints, active: Bools | None = None) -> Floats:
        """Append a token to every row where `active`, all by default: the logits after it, [batch, vocab].

        The other rows repeat their last step, which changes nothing. The result is valid until the next call.
        Raises WeftError when a row's cache is full.
        """
        rows = slice(None) if active is None else np.flatnonzero(active)
        at = self.lengths[rows]
        if at.size and int(at.max()) >= self.capacity:
            raise WeftError(f"the cache is full: it holds {self.capacity} tokens a row")
        inputs = self._inputs
        inputs["input_ids"].host[rows, 0] = np.asarray(tokens, np.int64)[rows]
        inputs["attention_mask"].host[np.arange(self.lengths.size)[rows], at] = 1
        if "position_ids" in inputs:
            inputs["position_ids"].host[rows, 0] = at
        self.lengths[rows] += 1
        for buffer in inputs.values():
            buffer.push()
        self.model.run(self._step, self._captured)
        if not self._shared:
            _float32(self._logits.pull()[:, 0], self._scores)
        return self._scores

    def _extend(self, first: int, parts: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Append one part to each of the rows from `first` on: the graph's logits on the host, valid until the next."""
        rows, longest = len(parts), max(map(len, parts))
        past = self.lengths[first : first + rows]
        total = past + [len(part) for part in parts]
        if int(total.max()) > self.capacity:
            raise WeftError(f"{int(total.max())} tokens do not fit the cache of {self.capacity} tokens a row")
        ids = np.zeros((rows, longest), np.int64)
        for row, part in enumerate(parts):
            ids[row, : len(part)] = part
        width = int(past.max()) + longest
        feed = {
            "input_ids": ids,
            "attention_mask": np.arange(width) < total[:, None],
            "position_ids": past[:, None] + np.arange(longest),
        }
        model = self.model
        binding = model.session.ort.io_binding()
        self._bind_caches(binding, first, rows)
        for name, (_, dtype) in model.types.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(feed[name], dtype))
        shape = (rows, longest if model.every_position else 1, model.vocab)
        logits = self._room(shape)
        binding.bind_output("logits", "cpu", 0, self._logits.onnx_type, shape, logits.ctypes.data)
        model.run(binding, self._plain)
        self.lengths[first : first + rows] = total
        self._inputs["attention_mask"].host[first : first + rows, :width] = feed["attention_mask"]
        return logits

    def _last(self, first: int, parts: Sequence[Sequence[int]], logits: NDArray[Any]) -> None:
        """Keep the logits of each part's last token as those of its row."""
        for row, part in enumerate(parts):
            _float32(logits[row, len(part) - 1 if self.model.every_position else 0], self._scores[first + row])

    def _room(self, shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape))
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._scratch.dtype)
        return self._scratch[:size].reshape(shape)

    def _bind_caches(self, binding: Any, first: int, rows: int) -> None:
        """Bind the rows from `first` on, past and present to the same memory."""
        for cache, buffer in zip(self.model.caches, self._memory, strict=True):
            shape = (rows, *buffer.shape[1:])
            address = buffer.address + first * int(np.prod(shape[1:])) * buffer.host.itemsize
            binding.bind_input(cache.past, buffer.device, 0, buffer.onnx_type, shape, address)
            binding.bind_output(cache.present, buffer.device, 0, buffer.onnx_type, shape, address)


def parts(prompt: Sequence[int], chunk: int) -> Iterator[Sequence[int]]:
    """`prompt` in pieces of at most `chunk` tokens."""
    return (prompt[at : at + chunk] for at in range(0, len(prompt), chunk))


def _groups(lengths: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    """First row and end of each run of neighbours that fit `chunk` tokens when padded to the longest; one at least."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and longest * (row + 1 - first) > chunk:
            yield first, row
            first, longest = row, length
    yield first, len(lengths)


def _graph(number: int) -> Any:
    """Run options that capture or replay the CUDA graph of this number; -1 does neither."""
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _type(name: str, value: Any) -> tuple[int, type[np.generic]]:
    if value.type not in _TYPES:
        raise WeftError(f"{name}: {value.name} is a {value.type}, which the runtime cannot feed or read")
    return _TYPES[value.type]


def _cache(name: str, past: Any, outputs: dict[str, Any], head_dim: int | None) -> _Cache:
    present = past.name.replace("past_key_values", "present")
    if present not in outputs:
        raise WeftError(f"{name}: the graph takes {past.name} but does not return {present}")
    _, heads, capacity, width = past.shape
    if not isinstance(width, int) and head_dim is not None:
        width = head_dim
    if not isinstance(heads, int) or not isinstance(width, int):
        raise WeftError(f"{name}: {past.name} is {past.shape}, but its heads and head size must be fixed numbers")
    fixed = capacity if isinstance(capacity, int) else None
    return _Cache(past.name, present, *_type(name, past), heads=heads, capacity=fixed, width=width)


def _float32(values: NDArray[Any], out: Floats) -> Floats:
    """`values` as float32 in `out`; 16-bit words are bfloat16."""
    if values.dtype == np.uint16:
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32, casting="same_kind")
    else:
        np.copyto(out, values)
    return out
