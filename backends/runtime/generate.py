"""Generating with a decoder: prompts in, text and tokens out, whatever computes the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol, TypeGuard, Unpack

import numpy as np

from weft.ir.errors import WeftError

from .chat import ChatTemplate, Message
from .decoder import Bools, parts
from .sampling import Floats, Ints, Sampler, Sampling, SamplingOptions
from .text import GrowingText, StopStrings, Tokenizer

Prompt = str | Sequence[int]
Finish = Literal["stop", "stop_string", "length"]


class Context(Protocol):
    """The caches of one batch in use. Logits are float32 and valid until the next call."""

    capacity: int
    lengths: Ints

    def reset(self) -> None:
        """Empty every row."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512) -> Floats:
        """Start all rows anew: the logits after each prompt, [batch, vocab]."""
        ...

    def step(self, tokens: Ints, active: Bools | None = None) -> Floats:
        """Append a token to the active rows: the logits after it, [batch, vocab]."""
        ...

    def extend(self, tokens: Sequence[int]) -> Floats:
        """Append tokens to the first row: their logits, [seq or 1, vocab]."""
        ...


class Decoder(Protocol):
    """A language model that keeps caches: all that generating needs to know of a backend."""

    vocab: int
    max_length: int

    def context(self, batch: int, tokens: int) -> AbstractContextManager[Context]:
        """Caches for `batch` rows of at most `tokens` tokens each."""
        ...


@dataclass
class Timings:
    """How long a call took; of a batch, all rows together. Prefill includes choosing the first tokens."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0  # those after the first of each row
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Result:
    """What one prompt led to; grows while it is streamed."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # all that were generated, the stop token included
    text: str = ""  # without special tokens, cut before a stop string; empty where there is no tokenizer
    finish: Finish | None = None  # a stop token, a stop string, or max_tokens or the model's maximum; None: not yet
    timings: Timings = field(default_factory=Timings, compare=False)

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """The pieces of one answer, as soon as they are certain; `result` grows along."""

    def __init__(self, result: Result, pieces: Iterator[str]) -> None:
        self.result, self._pieces = result, pieces

    def __next__(self) -> str:
        return next(self._pieces)


class Generator:
    """A language model: a decoder and, where its folder has one, the tokenizer and chat template beside it."""

    def __init__(self, decoder: Decoder, *, stop_ids: frozenset[int] = frozenset(), folder: Path | None = None) -> None:
        self.decoder, self.stop_ids, self.folder = decoder, stop_ids, folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError("the model has no folder, hence no tokenizer: prompt it with token ids")
        return Tokenizer(self.folder)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The folder's chat template. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError("the model has no folder, hence no chat template")
        return ChatTemplate(self.folder)

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The tokens that lead to the assistant's next answer: a prompt for `generate` or `stream`.

        `messages` are mappings with "role" and "content"; `variables` are handed to the chat template.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, **variables), special=False)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int = 512,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Continue a prompt, or a batch of them: text, or token ids; one result for each.

        A row ends with one of the model's stop tokens, before one of the `stop` strings, after `max_tokens` tokens
        (None: no such bound), or where the model's maximum length is reached. Prompts are read `chunk` tokens at a
        time. `sampling` are the fields of `Sampling`; the default is greedy.

        Raises WeftError on an empty prompt, one longer than the model's maximum, tokens outside the vocabulary,
        arguments outside their range, and text where there is no tokenizer.
        """
        batch = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else list(prompt)
        if not batch:
            return []
        rows, run = self._start(batch, max_tokens, stop, chunk, Sampling(**sampling))
        for _ in run:
            pass
        return [row.result for row in rows]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int = 512,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Continue one prompt, as `generate` does, piece by piece: the pieces joined are the text it returns.

        No piece ends inside a code point, or may be the beginning of a stop string. Raises as `generate` does, the
        errors of its arguments at once.
        """
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise WeftError("stream takes one prompt, a text or a list of token ids; use generate for a batch")
        _ = self.tokenizer  # without one there is no text to stream: say so now
        (row,), run = self._start([prompt], max_tokens, stop, chunk, Sampling(**sampling))
        return Stream(row.result, (piece for _ in run if (piece := row.take())))

    def logits(self, ids: Sequence[int], chunk: int = 512) -> Floats:
        """The logits of a sequence of token ids, float32.

        [len(ids), vocab] when the model was compiled to return all of them; otherwise a row for the last token of each
        chunk, hence all of them with chunk=1. Raises WeftError as `generate` does.
        """
        ids = self._encode(ids)
        _check_count("chunk", chunk)
        with self.decoder.context(1, len(ids)) as context:
            context.reset()
            return np.concatenate([context.extend(part) for part in parts(ids, chunk)])

    def _start(
        self, batch: Sequence[Any], max_tokens: int | None, stop: str | Sequence[str], chunk: int, sampling: Sampling
    ) -> tuple[list[_Row], Iterator[None]]:
        _check_count("chunk", chunk)
        if max_tokens is not None:
            _check_count("max_tokens", max_tokens)
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise WeftError(f"stop is {stop!r}, but it must be a text, or several, none of them empty")
        has_text = self.folder is not None and (self.folder / "tokenizer.json").is_file()
        tokenizer = self.tokenizer if has_text or stops else None
        prompts = [self._encode(prompt) for prompt in batch]
        rows = []
        for at, prompt in enumerate(prompts):
            room = self.decoder.max_length + 1 - len(prompt)  # the last token is never fed back
            limit = room if max_tokens is None else min(room, max_tokens)
            rows.append(_Row(prompt, limit, self.stop_ids, Sampler(sampling, prompt, at), tokenizer, stops))
        return rows, self._run(rows, chunk)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif _is_ids(prompt):
            ids = [int(i) for i in prompt]
        else:
            raise WeftError(f"a prompt is {prompt!r:.60}, but it must be a text or a list of token ids")
        if not ids:
            raise WeftError("a prompt has no tokens: give it at least one")
        if len(ids) > self.decoder.max_length:
            raise WeftError(
                f"a prompt of {len(ids)} tokens is longer than the maximum of {self.decoder.max_length} tokens "
                "the model was compiled for; shorten it, or compile with a larger --max-length"
            )
        if min(ids) < 0 or max(ids) >= self.decoder.vocab:
            wrong = next(i for i in ids if not 0 <= i < self.decoder.vocab)
            raise WeftError(f"token {wrong} of a prompt is outside the vocabulary of {self.decoder.vocab} tokens")
        return ids

    def _run(self, rows: list[_Row], chunk: int) -> Iterator[None]:
        """Drive all rows to their end, pausing after each token."""
        timings = Timings(prompt_tokens=sum(len(row.result.prompt) for row in rows))
        for row in rows:
            row.result.timings = timings
        tokens = np.zeros(len(rows), np.int64)
        active = np.ones(len(rows), np.bool_)
        with self.decoder.context(len(rows), max(row.most for row in rows)) as context:
            start = perf_counter()
            _push(rows, context.prefill([row.result.prompt for row in rows], chunk), tokens, active)
            timings.prefill_seconds = perf_counter() - start
            yield
            while active.any():
                start = perf_counter()
                timings.decoded_tokens += _push(rows, context.step(tokens, active), tokens, active)
                timings.decode_seconds += perf_counter() - start
                yield


class _Row:
    """One prompt on its way: what is drawn, said and held back."""

    def __init__(
        self,
        prompt: list[int],
        limit: int,
        stop_ids: frozenset[int],
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
    ) -> None:
        self.result = Result(prompt)
        self._limit, self._stop_ids, self._sampler = limit, stop_ids, sampler
        self._growing = GrowingText(tokenizer) if tokenizer else None
        self._stops = StopStrings(stops)
        self._taken = 0

    @property
    def most(self) -> int:
        """The most tokens that its cache will hold."""
        return len(self.result.prompt) + self._limit - 1

    def push(self, logits: Floats) -> int:
        """Draw the next token and add it to the result."""
        result = self.result
        token = self._sampler(logits)
        result.tokens.append(token)
        if token in self._stop_ids:
            result.finish = "stop"
        else:
            if self._growing:
                result.text += self._stops.push(self._growing.push(token))
            if self._stops.found:
                result.finish = "stop_string"
            elif len(result.tokens) == self._limit:
                result.finish = "length"
        if self._growing and result.finish in ("stop", "length"):
            result.text += self._stops.push(self._growing.flush()) + self._stops.flush()
            if self._stops.found:
                result.finish = "stop_string"
        return token

    def take(self) -> str:
        """The text that came since the last call."""
        piece = self.result.text[self._taken :]
        self._taken += len(piece)
        return piece


def _push(rows: Sequence[_Row], logits: Floats, tokens: Ints, active: Bools) -> int:
    """Draw the next token of every active row into `tokens`; the rows that end leave `active`. How many were drawn."""
    drawn = np.flatnonzero(active).tolist()
    for at in drawn:
        tokens[at] = rows[at].push(logits[at])
        active[at] = rows[at].result.finish is None
    return len(drawn)


def _is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether `prompt` is one sequence of token ids, rather than several prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt)
    )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WeftError(f"{name} is {value!r}, but it must be a whole number of at least 1")
