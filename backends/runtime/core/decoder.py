"""The interface of decoders: the properties of a model that generation needs, for any executor."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from weft.ir.errors import WeftError

from ...folder_facts import Sound
from .batch_context import BatchContext
from .results import ExpertCounts

EMBEDDED = "inputs_embeds"
TAKES_EMBEDDINGS = "the model takes embeddings (inputs_embeds), not prompts: run it with ONNX Runtime or PyTorch itself"
C = TypeVar("C", bound=BatchContext)
# Caches grow in steps of this many tokens: few sizes, so memory and captured graphs are reused.
STEP = {"cpu": 256, "cuda": 1024}
# Prompt tokens per call: on a GPU enough to keep it busy; attention of a first call needs no mask there.
CHUNK = {"cpu": 512, "cuda": 8192}


class CachedDecoder(ABC, Generic[C]):
    """A language model with caches on `device`, "cpu" or "cuda".

    - start: a tuple of the token that begins every row of an encoder-decoder; None if a row begins with its prompt
    - max_prompt: the maximum length of a prompt in tokens; for an encoder-decoder that of a source, `max_source`
    - every_position: a model call can return the logits of all new tokens, not only of the last token
    - padded: the rows of a model call may have different numbers of new tokens
    - can_rewind: rows can drop their last tokens, which recurrent states and rolling caches cannot
    - compares: tokens of a model call compete, for example for the capacity of experts
    - adapter: the name of the adapter that its runs use; "" for the base model
    - rounds: activations are rounded to 8 bits, which amplifies differences between calls of one and of several tokens
    - drafts_pay: it can verify drafts, and does so for one row in little more time than a decode step takes
    - concurrent: several threads may run the model at once, each in its own context
    - executor: the threads for calls from asyncio; a single one, in which calls queue, unless `concurrent`
    """

    every_position: bool
    padded: bool
    can_rewind: bool
    compares: bool = False
    rounds: bool = False
    drafts_pay: bool = False
    adapter: str = ""
    sound: Sound | None = None  # the kind of sound that prompts are; None for text

    def __init__(
        self,
        device: str,
        vocab: int,
        max_length: int,
        start: int | None = None,
        max_source: int = 0,
        concurrent: bool = False,
    ) -> None:
        self.device_type, self.vocab, self.max_length = device, vocab, max_length
        self.chunk = CHUNK[device]
        self.start = None if start is None else (start,)
        self.max_prompt = max_length if start is None else max_source
        self.concurrent, self.executor = concurrent, ThreadPoolExecutor(None if concurrent else 1, "weft")
        self._spare: C | None = None
        self._spare_lock = threading.Lock()

    @abstractmethod
    def new_context(self, batch: int, capacity: int) -> C:
        """Return a context with newly allocated caches for `batch` rows of `capacity` tokens each."""

    @property
    def shares_prefixes(self) -> bool:
        """Return whether a row may begin with the caches that another row computed for the same tokens."""
        return self.start is None and not self.compares

    @property
    def experts(self) -> ExpertCounts:
        """Return the counts of expert offloading since the model was opened; all 0 if no experts are offloaded."""
        return ExpertCounts()

    @contextmanager
    def context(self, batch: int, tokens: int) -> Iterator[C]:
        """Yield a context for `batch` rows of at most `tokens` tokens each. A later context of the same size reuses its
        memory, so it may contain tokens of an earlier use. Several contexts may be in use at the same time. Raises
        WeftError if `tokens` is above `max_length` or memory is insufficient."""
        capacity = self.compute_capacity(tokens)
        # Taken out while in use: a second context must not get the same caches.
        with self._spare_lock:
            context, self._spare = self._spare, None
        if context is None or (context.lengths.size, context.capacity) != (batch, capacity):
            if context is not None:
                context.close()
            # Release its memory before allocating the new context: both may not fit.
            del context
            context = self.new_context(batch, capacity)
        try:
            yield context
        finally:
            with self._spare_lock:
                spare, self._spare = self._spare, context
            if spare is not None:
                spare.close()

    def compute_capacity(self, tokens: int) -> int:
        """Return the capacity of caches for `tokens` tokens per row: `tokens` rounded up to a multiple of the device's
        STEP, at most `max_length`. Raises WeftError if `tokens` is above `max_length`."""
        if tokens > self.max_length:
            raise WeftError(
                f"{tokens} tokens exceed the {self.max_length} that the model is compiled for: use fewer, or compile "
                "with a larger --max-length"
            )
        step = STEP[self.device_type]
        return min(self.max_length, -(-tokens // step) * step)
