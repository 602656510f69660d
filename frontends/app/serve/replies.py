"""Conversion of answer pieces to the chunks of a stream, or to the single object of a response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.backends.runtime.core.results import Finish, TokenLogprobs

from .engine.jobs import AnswerPiece
from .protocol import responses
from .protocol.tools import ToolCall, ToolParser


@dataclass
class Choice:
    """The text, log-probabilities and tool calls of one answer so far; `finish` is None until it ends. `cached` counts
    the tokens of its prompt that did not run."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    finish: Finish | None = None
    parser: ToolParser | None = None
    started: bool = False

    def add(self, piece: AnswerPiece, stop_ids: Collection[int]) -> tuple[str, list[ToolCall], list[TokenLogprobs]]:
        """Add a piece; return its text without tool calls, its calls, and its log-probabilities without stop tokens."""
        text, calls = piece.text, list[ToolCall]()
        if self.parser is not None:
            text, calls = self.parser.push(text)
            if piece.finish is not None:
                rest, last = self.parser.flush()
                text, calls = text + rest, calls + last
        entries = [entry for entry in piece.logprobs if entry.token not in stop_ids]
        self.text += text
        self.calls += calls
        self.logprobs += entries
        self.tokens, self.cached, self.finish = piece.tokens, piece.cached, piece.finish
        return text, calls, entries


@dataclass
class Reply(ABC):
    """The reply to a request for `count` answers, `n` for each prompt.

    prompt_tokens: number of tokens of all prompts. token_bytes: None without log-probabilities.
    named: the request names the tool to call; then calls finish with "stop".
    """

    envelope: responses.Envelope
    count: int
    n: int
    prompt_tokens: int
    stop_ids: Collection[int]
    token_bytes: responses.TokenBytes | None
    named: bool = False

    def __post_init__(self) -> None:
        self.choices, self.include_usage = [Choice() for _ in range(self.count)], False

    @property
    def is_done(self) -> bool:
        """Return whether all answers have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        """Return the usage object: token counts of prompts and answers. A prompt counts once, as cached only if its
        first answer did not run it."""
        cached = sum(choice.cached for choice in self.choices[:: self.n])
        return responses.build_usage(self.prompt_tokens, sum(choice.tokens for choice in self.choices), cached)

    def get_finish(self, choice: Choice) -> str | None:
        """Return the finish_reason of an answer, None while it runs."""
        return choice.finish and responses.get_finish_reason(choice.finish, bool(choice.calls), self.named)

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece of an answer."""
        self.choices[piece.index].add(piece, self.stop_ids)

    def begin(self) -> bytes:
        """Return the events with which a stream begins."""
        return b""

    @abstractmethod
    def stream(self, piece: AnswerPiece) -> bytes:
        """Add a piece; return the events that it results in, if any."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events with which a stream ends."""

    @abstractmethod
    def to_object(self) -> dict[str, Any]:
        """Return the object of a reply that is not streamed."""


class ChoicesReply(Reply):
    """A reply whose object and chunks have `choices`."""

    def stream(self, piece: AnswerPiece) -> bytes:
        return b"".join(self._format([choice], None) for choice in self.add_and_chunk(piece))

    def end(self) -> bytes:
        return (self._format([], self.usage) if self.include_usage else b"") + responses.DONE

    def _format(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        return responses.format_event(self.envelope.build_chunk(choices, usage, self.include_usage))

    def to_object(self) -> dict[str, Any]:
        choices = [self._build_choice(i, choice) for i, choice in enumerate(self.choices)]
        return self.envelope.to_object(choices, self.usage)

    @abstractmethod
    def add_and_chunk(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """Add a piece; yield the entry of `choices` for each chunk that it results in, if any."""

    @abstractmethod
    def _build_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return a finished answer as an entry of the response's `choices`."""


class ChatReply(ChoicesReply):
    """A reply of chat messages."""

    def add_and_chunk(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        choice, index = self.choices[piece.index], piece.index
        if not choice.started:
            choice.started = True
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, [])
        before = len(choice.calls)
        text, calls, entries = choice.add(piece, self.stop_ids)
        if text or calls or entries:
            yield self._chunk(index, responses.build_chat_delta(text, calls, before), None, entries)
        if choice.finish is not None:
            yield self._chunk(index, {}, self.get_finish(choice), [])

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None, entries: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        logprobs = responses.build_chat_logprobs(entries, self.token_bytes) if self.token_bytes and entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _build_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": responses.build_chat_message(choice.text, choice.calls),
            "logprobs": responses.build_chat_logprobs(choice.logprobs, self.token_bytes) if self.token_bytes else None,
            "finish_reason": self.get_finish(choice),
        }


@dataclass
class CompletionReply(ChoicesReply):
    """A reply of completions; `echoes` are the prompts to put before the answers (empty: none)."""

    echoes: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets = [responses.Offsets() for _ in self.choices]

    def add_and_chunk(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        choice, index = self.choices[piece.index], piece.index
        was_started, choice.started = choice.started, True
        text, _, entries = choice.add(piece, self.stop_ids)
        if not was_started and self.echoes:
            text = self.echoes[index] + text
        if text or entries or choice.finish is not None:
            yield self._choice(index, text, entries, self.get_finish(choice))

    def _build_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = (self.echoes[index] if self.echoes else "") + choice.text
        return self._choice(index, text, choice.logprobs, self.get_finish(choice))

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprobs], finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self.token_bytes:
            logprobs = responses.build_completion_logprobs(entries, self.token_bytes, self._offsets[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
