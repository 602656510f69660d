"""Decode steps with tensors at fixed addresses, captured as CUDA graphs so that a step is one launch; they sample
tokens on the device, with the results of the samplers of the host but without copying logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...torch.kernels.choose_tokens import TICKETS, WRONG, choose_tokens
from ...torch.kernels.shared.tickets import Tickets
from ..arrays import Ints
from ..core.sampler import Sampler, Sampling, check_logits
from .module_caches import is_cross, iter_layers, iter_tensors, list_states


class DeviceSampler:
    """A sampler on the device for `batch` rows with equal sampling options, without penalties and logit bias; its
    tensors have fixed addresses. Each row has a copy of the next `most` random numbers of its host sampler. A draw uses
    up one of them and takes the first token whose cumulative probability exceeds it. If only one token can follow, none
    is used up."""

    def __init__(self, sampling: Sampling, batch: int, most: int, device: torch.device) -> None:
        self.sampling = sampling
        self._uniforms = torch.zeros(batch, most, dtype=torch.float64, device=device)
        self._spent = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._tickets = Tickets(TICKETS)

    def refill(self, samplers: Sequence[Sampler]) -> None:
        """Replace the random numbers of each row by the next ones of its host sampler in `samplers` (one per row; none
        at temperature 0), and count them as unused."""
        if self.sampling.temperature > 0:
            most = self._uniforms.shape[1]
            self._uniforms.copy_(torch.from_numpy(np.stack([s.draw_uniforms(most) for s in samplers])))
        self._spent.zero_()

    @property
    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors that a draw changes: the number of random numbers used up, [batch, 1]."""
        return [self._spent]

    def __call__(self, logits: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Draw the next tokens from `logits` [batch, vocab] and return them [batch]. For active rows, also write them
        to `inputs`, the tensors (ids, positions, active) that the next step reads."""
        s = self.sampling
        return choose_tokens(
            logits,
            self._uniforms,
            self._spent,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            begun=inputs,
            tickets=self._tickets(logits),
        )


Step = Callable[..., Tensor]  # ids and positions [batch, 1] and the cache to logits [batch, 1, vocab]
MIN_KEYS = 256  # least number of keys that a captured step reads
PROMPT_LENGTHS = (16, 32, 64, 128, 256)  # tokens of captured prompts: in longer ones, compute time hides the launches


class SynchronizationError(Exception):
    """Raised if a step synchronizes with the device, because a CUDA graph cannot capture that."""


class TokenBuffer:
    """Host memory (pinned if `cuda`) that receives the tokens [batch] of a step."""

    def __init__(self, batch: int, cuda: bool) -> None:
        self.tokens = torch.zeros(batch, dtype=torch.int64, pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]  # as torch has it

    def start_copy(self, tokens: Tensor) -> None:
        """Queue a copy of the device tensor `tokens` [batch] to the host."""
        self.tokens.copy_(tokens, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def wait(self) -> Ints:
        """Wait for the queued copy; return the tokens [batch] in a new array."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.numpy().copy()


class CapturedSteps:
    """The decode steps of a batch with `cache`. The function `step` reads `ids` and `positions`, and sampling on the
    device also `active`, each [batch, 1]. A step replays a CUDA graph for an upper bound on the number of keys: a power
    of two, or with `any_length` the capacity. New cross-attention sources release all graphs. Steps run without a graph
    on a CPU, if `captured` is False, or if `step` synchronizes with the device."""

    def __init__(
        self, step: Step, cache: Any, batch: int, device: torch.device, any_length: bool = False, captured: bool = True
    ) -> None:
        self._step, self._cache, self._cuda = step, cache, device.type == "cuda"
        self._captures = captured
        self._prompts: dict[int, tuple[Tensor, Tensor] | None] = {}  # length -> tokens and index of the last ones
        self._any_length = any_length
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.active = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._token_buffers = [TokenBuffer(batch, self._cuda) for _ in range(2)]  # a step may begin before one is read
        self._pending: list[TokenBuffer] = []  # steps in progress, the first is read next
        self._cross_caches = [layer for layer in iter_layers(cache) if is_cross(layer)]
        self._sources: Any = None  # addresses and shapes of the sources that captured steps read
        self.release_graphs()

    def release_graphs(self) -> None:
        """Release all captured graphs and their memory pool: a pool whose graphs are gone accepts no new ones."""
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def run_step(self, keys: int) -> Tensor:
        """Run a step with up to `keys` keys per row; return f32 logits [batch, vocab], valid until the next step."""
        logits: Tensor = self._run(("logits",), keys, lambda: self._logits().float(), [])
        return logits

    def run_prompt(self, ids: Tensor, last: Tensor) -> Tensor | None:
        """Run the prompts `ids` [batch, seq] from position 0 on as one CUDA graph, padded to one of `PROMPT_LENGTHS`.
        Return the logits [batch, 1, vocab] of the token with index `last[r]` in each row r, valid until the next step.
        Return None without running anything if no such length fits, graphs are not used, or this is the first prompt of
        its length: a capture might not pay off."""
        length = next((n for n in PROMPT_LENGTHS if ids.shape[1] <= n <= self._cache.capacity), None)
        if length is None or not (self._cuda and self._captures):
            return None
        if length not in self._prompts:
            self._prompts[length] = None
            return None
        buffers = self._prompts[length] or (ids.new_zeros(len(ids), length), torch.zeros_like(last))
        self._prompts[length], (all_ids, of) = buffers, buffers
        all_ids[:, : ids.shape[1]] = ids  # later tokens are masked, and their keys are overwritten
        of.copy_(last)
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)

        def body() -> Tensor:
            self._cache.length = 0
            return self._step(all_ids, positions, self._cache, of)

        logits: Tensor = self._replay(("prompt", length), body, [])
        return logits

    def launch_step(self, draws: DeviceSampler, keys: int) -> None:
        """Queue a step that attends to at most `keys` keys, and after it a draw of tokens by `draws`. Tokens of active
        rows become inputs of the next step; all are copied to the host. At most two steps may be queued."""
        inputs, changed = (self.ids, self.positions, self.active), [self.ids, self.positions, *draws.changed_tensors]
        tokens = self._run(("drawn", draws), keys, lambda: draws(self._logits(), inputs), changed)
        landing = next(free for free in self._token_buffers if free not in self._pending)
        landing.start_copy(tokens)
        self._pending.append(landing)

    def drop_pending(self) -> None:
        """Discard all queued steps: their tokens will not be read."""
        self._pending.clear()

    def pop_tokens(self, rows: Ints) -> Ints:
        """Wait for the oldest queued step and return its tokens [batch]. Raises WeftError if no token could be drawn in
        one of `rows`, because its largest logit is NaN or infinite."""
        tokens = self._pending.pop(0).wait()
        if (worst := int(tokens[rows].min())) < 0:
            check_logits(np.float32(WRONG[-1 - worst]))
        return tokens

    def _logits(self) -> Tensor:
        return self._step(self.ids, self.positions, self._cache)[:, -1]

    def _run(self, kind: tuple[Hashable, ...], keys: int, body: Callable[[], Any], changed: Sequence[Tensor]) -> Any:
        if not (self._cuda and self._captures):
            self._cache.length = keys - 1
            return body()
        # Powers of two: few captures, and above MIN_KEYS none reads more than twice the existing keys.
        bound = self._cache.capacity
        if not self._any_length:
            bound = min(max(MIN_KEYS, 1 << (keys - 1).bit_length()), bound)
        sources = [(t.data_ptr(), t.shape) for layer in self._cross_caches for t in iter_tensors(layer)]
        if sources != self._sources:
            self.release_graphs()
            self._sources = sources

        def run_bounded() -> Any:
            self._cache.length = bound - 1  # an upper bound; `positions` has the position of each row
            return body()

        return self._replay((*kind, bound), run_bounded, changed)

    def _replay(self, key: tuple[Hashable, ...], body: Callable[[], Any], changed: Sequence[Tensor]) -> Any:
        """Run `body` as the CUDA graph `key`, captured on first use, and return its output; `changed` are tensors that
        `body` changes, to be restored after the capture. If it cannot be captured, warn once and call it directly."""
        if key not in self._captured:
            try:
                self._captured[key] = capture_graph(body, [*changed, *list_states(self._cache)], self._pool)
            except SynchronizationError as reason:
                warnings.warn(f"steps are launched kernel by kernel, without a CUDA graph: {reason}", stacklevel=2)
                self._captured[key] = None
        if (captured := self._captured[key]) is None:
            return body()
        graph, output = captured
        graph.replay()
        return output


def capture_graph(
    body: Callable[[], Any], changed: Sequence[Tensor], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `body` as a CUDA graph in the memory pool `pool`; return (the graph, the output of `body`). The output is
    valid until another graph of the pool runs. `body` runs twice to warm up; then the tensors `changed` are restored.
    Raises SynchronizationError if `body` synchronizes with the device."""
    before = [t.clone() for t in changed]

    def run() -> None:
        try:
            body()
        finally:  # otherwise the next run would write to other slots
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as torch has it
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()
            # The first run compiles kernels, which may synchronize; the second one must not.
            with _forbid_synchronization():
                run()
    finally:
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = body()
    return graph, output


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Raise `SynchronizationError` for an operation inside the block that synchronizes with the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise SynchronizationError(str(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
