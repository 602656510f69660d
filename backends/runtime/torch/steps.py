"""Steps of one token for every row at fixed addresses: on CUDA captured as graphs, so that a step is one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...torch.kernels.choose_tokens import WRONG
from ..arrays import Ints
from ..core.sampling import check_logits
from .caches import is_cross, layers, mutable, tensors
from .draws import Draws

Step = Callable[..., Tensor]  # ids and positions [batch, 1] and the cache to logits [batch, 1, vocab]
SMALLEST = 256  # keys that a captured step reads at least
PROMPTS = (16, 32, 64, 128, 256)  # tokens of captured prompts: of longer ones, launches take less time than the work


class Waits(Exception):
    """A step that waits for the device, which a graph cannot hold."""


class Landing:
    """Memory of the host for the tokens that a step of `batch` rows brings."""

    def __init__(self, batch: int, cuda: bool) -> None:
        self.tokens = torch.zeros(batch, dtype=torch.int64, pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]  # as torch has it

    def expect(self, tokens: Tensor) -> None:
        """Have `tokens` brought here, behind what the device does."""
        self.tokens.copy_(tokens, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def arrived(self) -> Ints:
        """Wait for what is expected: a copy."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.numpy().copy()


class Steps:
    """The step of a batch with `cache`; `ids`, `positions` and `active` [batch] are what it reads.

    A step for `any_length` is captured once, another one for each bound on the keys that it may see, powers of two; and
    anew for other sources. Without CUDA, where nothing is to be `captured`, and where a step waits for the device, the
    same code runs as it is.
    """

    def __init__(
        self,
        step: Step,
        cache: Any,
        batch: int,
        device: torch.device,
        any_length: bool = False,
        captured: bool = True,
    ) -> None:
        self._step, self._cache, self._cuda = step, cache, device.type == "cuda"
        self._captures = captured
        self._prompts: dict[int, tuple[Tensor, Tensor] | None] = {}  # tokens, and which are the last, by length
        self._any_length = any_length
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.active = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._landing = [Landing(batch, self._cuda) for _ in range(2)]  # a step may begin before the one ahead is read
        self._begun: list[Landing] = []  # what `drawn` reads next
        self._crossing = [layer for layer in layers(cache) if is_cross(layer)]
        self._sources: Any = None  # where they are that the captured steps read
        self.forget()

    def forget(self) -> None:
        """Let go of what was captured, and of its memory: a pool that has lost its graphs takes no new ones."""
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any] | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def logits(self, keys: int) -> Tensor:
        """The logits [batch, vocab] after a step that sees at most `keys` keys, float32; valid until the next."""
        logits: Tensor = self._run(("logits",), keys, lambda: self._logits().float(), [])
        return logits

    def prompt(self, ids: Tensor, last: Tensor) -> Tensor | None:
        """The logits [batch, 1, vocab] of tokens `last` [batch] of texts that begin with `ids` [batch, seq], by a
        captured step, valid until the next; None where there is none. What comes but once is not worth a capture."""
        length = next((n for n in PROMPTS if ids.shape[1] <= n <= self._cache.capacity), None)
        if length is None or not (self._cuda and self._captures):
            return None
        if length not in self._prompts:
            self._prompts[length] = None
            return None
        made = self._prompts[length] or (ids.new_zeros(len(ids), length), torch.zeros_like(last))
        self._prompts[length], (all_ids, of) = made, made
        all_ids[:, : ids.shape[1]] = ids  # what stands behind is not seen, and written over
        of.copy_(last)
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)

        def body() -> Tensor:
            self._cache.length = 0
            return self._step(all_ids, positions, self._cache, of)

        logits: Tensor = self._replayed(("prompt", length), body, [])
        return logits

    def launch(self, draws: Draws, keys: int) -> None:
        """Begin a step that draws tokens, which active rows read at the next step; at most two are under way."""

        def body() -> Tensor:
            return draws(self._logits(), (self.ids, self.positions, self.active))

        changed = [self.ids, self.positions, *draws.mutable]
        tokens = self._run(("drawn", draws), keys, body, changed)
        landing = next(one for one in self._landing if one not in self._begun)
        landing.expect(tokens)
        self._begun.append(landing)

    def drop(self) -> None:
        """Forget the steps under way: what they draw is not read."""
        self._begun.clear()

    def drawn(self, rows: Ints) -> Ints:
        """The tokens [batch] of the first step under way. Raises WeftError if logits of `rows` are no numbers."""
        tokens = self._begun.pop(0).arrived()
        if (worst := int(tokens[rows].min())) < 0:
            check_logits(np.float32(WRONG[-1 - worst]))
        return tokens

    def _logits(self) -> Tensor:
        return self._step(self.ids, self.positions, self._cache)[:, -1]

    def _run(self, what: tuple[Hashable, ...], keys: int, body: Callable[[], Any], changed: Sequence[Tensor]) -> Any:
        if not (self._cuda and self._captures):
            self._cache.length = keys - 1
            return body()
        # Powers of two: few captures, and above SMALLEST none reads more than twice the keys that there are.
        bound = self._cache.capacity
        if not self._any_length:
            bound = min(max(SMALLEST, 1 << (keys - 1).bit_length()), bound)
        sources = [(t.data_ptr(), t.shape) for layer in self._crossing for t in tensors(layer)]
        if sources != self._sources:
            self.forget()
            self._sources = sources

        def bounded() -> Any:
            self._cache.length = bound - 1  # counts as an upper bound; positions say where each row is
            return body()

        return self._replayed((*what, bound), bounded, changed)

    def _replayed(self, key: tuple[Hashable, ...], body: Callable[[], Any], changed: Sequence[Tensor]) -> Any:
        """The result of `body`, by the graph `key`, which is captured where it is new."""
        if key not in self._captured:
            try:
                self._captured[key] = capture(body, [*changed, *mutable(self._cache)], self._pool)
            except Waits as reason:
                warnings.warn(f"steps are launched kernel by kernel: {reason}", stacklevel=2)
                self._captured[key] = None
        if (captured := self._captured[key]) is None:
            return body()
        graph, output = captured
        graph.replay()
        return output


def capture(body: Callable[[], Any], changed: Sequence[Tensor], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`body` as a CUDA graph with memory of `pool`, and what it returns, valid until another graph of the pool runs.

    The tensors `changed` are as before, though `body` ran to warm up.

    Raises:
        Waits: if it cannot be captured.
    """
    before = [t.clone() for t in changed]

    def run() -> None:
        try:
            body()
        finally:  # a second step would write to other slots
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as torch has it
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()
            # The first run compiles kernels, which may wait for the device; from now on nothing may.
            with _unwaiting():
                run()
    finally:
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = body()
    return graph, output


@contextmanager
def _unwaiting() -> Iterator[None]:
    """Inside, an operation that waits for the device raises `Waits`."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise Waits(str(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
