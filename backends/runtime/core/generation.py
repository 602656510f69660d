"""Generation with a decoder of any executor: prompts in, text and tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, NoReturn, Unpack

import numpy as np

from weft.ir.errors import WeftError

from ..arrays import Floats
from ..text.chat import ChatTemplate, Message
from ..text.encoder_inputs import check_sound, length_of, quote_prompt
from ..text.tokenizer import Prompt, Tokenizer, check_ids, is_ids, is_sound, prompts_of
from .answers import Answer, Constraint, advance, verify
from .batch_context import BatchContext, parts
from .beams import Beams, BeamSearch, EarlyStopping, search
from .decoder import CachedDecoder
from .results import Result, Timings
from .sampler import Sampler, Sampling, SamplingOptions, TokenRules, check_count
from .speculation import Speculation


class Stream(Iterator[str]):
    """An iterator over the text pieces of one answer; `result` is the answer so far and grows with each piece."""

    def __init__(self, result: Result, pieces: Iterator[str]) -> None:
        self.result, self._pieces = result, pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the stream without generating further."""
        self._pieces = iter(())


class Generator:
    """A language model: a decoder, and the tokenizer and chat template of its folder if it has them.

    For an encoder-decoder, prompts are the sources of the encoder and results the decoded sequences. `defaults` are
    the sampling options (and `max_tokens`) that its checkpoint recommends: servers use them, its methods do not.
    """

    def __init__(
        self,
        decoder: CachedDecoder[Any],
        *,
        stop_ids: frozenset[int] = frozenset(),
        folder: Path | None = None,
        forced: TokenRules = TokenRules(),  # noqa: B008 - frozen
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.defaults = defaults
        self.decoder, self.stop_ids, self.folder, self.forced = decoder, stop_ids, folder, forced

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the folder's tokenizer. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError("the model has no folder, hence no tokenizer: prompt it with token ids")
        return Tokenizer(self.folder)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the folder's chat template. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError("the model has no folder, hence no chat template")
        return ChatTemplate(self.folder)

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a chat up to the start of the next answer, as a prompt for `generate` or `stream`.

        `messages` are mappings with "role" and "content"; `variables` are passed to the chat template.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, **variables), special=False)

    def conversation(self, messages: Sequence[Message] = (), **variables: Any) -> Conversation:
        """Return a conversation that begins with `messages`; `variables` are passed to the chat template."""
        return Conversation(self, messages, **variables)

    def encode(self, *_: object, **__: object) -> NoReturn:
        """Raise WeftError: a decoder predicts the next token and has no embeddings of texts."""
        raise WeftError(f"{self.folder} holds a decoder, which encodes nothing: `generate` continues texts")

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int | None = None,
        prompt_lookup_num_tokens: int = 0,
        assistant: Generator | None = None,
        num_assistant_tokens: int = 5,
        beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        returned: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Continue one prompt or a batch of prompts; return one result for each.

        A prompt is text or token ids. Models that read sound take arrays of floats: waveforms [samples] or spectrograms
        [bins, frames], a list of them for a batch.

        An answer ends with a stop token of the model, before a string in `stop`, after `max_tokens` tokens (None: no
        such bound), or at the model's maximum length. A call reads at most `chunk` prompt tokens, by default 512 on a
        CPU and 8192 on a GPU. `sampling` are the fields of `Sampling`; the default is greedy. With `beams` above 1, run
        a beam search (see `Beams`) and return the `returned` best sequences of each prompt, best first, with scores.
        Speculative decoding yields the same tokens in fewer calls (see `speculation`): drafts of up to
        `prompt_lookup_num_tokens` tokens come from the sequence so far, or drafts of up to `num_assistant_tokens` from
        `assistant`, a smaller model with the same vocabulary.

        Raises WeftError on a prompt that is empty or longer than the model's maximum, tokens outside the vocabulary,
        arguments outside their range or without effect in this combination, and text without a tokenizer.
        """
        batch = prompts_of(prompt)
        if not batch:
            return []
        how = Beams(beams, length_penalty, early_stopping, returned)
        if beams > 1:
            if sampling or stop:
                raise WeftError(f"beams is {beams}: a beam search takes neither stop strings nor sampling options")
            default = Speculation.num_assistant_tokens
            if prompt_lookup_num_tokens or assistant is not None or num_assistant_tokens != default:
                raise WeftError(f"beams is {beams}: a beam search drafts no tokens")
            return self._search(batch, max_tokens, self._chunk(chunk), how)
        if how != Beams():
            raise WeftError("length_penalty and early_stopping are rules of a beam search: give beams above 1")
        drafts = self._speculation(prompt_lookup_num_tokens, assistant, num_assistant_tokens)
        rows, run = self._start(batch, max_tokens, stop, self._chunk(chunk), Sampling.chosen(**sampling), drafts)
        for _ in run:
            pass
        return [row.result for row in rows]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int | None = None,
        prompt_lookup_num_tokens: int = 0,
        assistant: Generator | None = None,
        num_assistant_tokens: int = 5,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Return an iterator over pieces of the answer to one prompt; joined, they are the text `generate` returns.

        No piece ends inside a code point or in the possible beginning of a stop string. Raises WeftError as `generate`
        does; wrong arguments raise it here, not during the iteration.
        """
        if not (isinstance(prompt, str) or is_ids(prompt) or is_sound(prompt)):
            raise WeftError("stream takes one prompt, a text or a list of token ids; use generate for a batch")
        _ = self.tokenizer  # without one there is no text to stream: raise now
        drafts = self._speculation(prompt_lookup_num_tokens, assistant, num_assistant_tokens)
        (row,), run = self._start([prompt], max_tokens, stop, self._chunk(chunk), Sampling.chosen(**sampling), drafts)
        return Stream(row.result, (piece for _ in run if (piece := row.take())))

    def logits(self, ids: Sequence[int], chunk: int | None = None) -> Floats:
        """Return the float32 logits of a sequence of token ids.

        They are [len(ids), vocab] if the model returns logits of every position. Otherwise they are [chunks, vocab],
        for the last token of each `chunk` (1: all tokens). Raises WeftError as `generate` does.
        """
        if self.decoder.start is not None:
            raise WeftError("the logits of an encoder-decoder also depend on a source: generate its answers instead")
        ids = self._encode(ids)
        chunk = self._chunk(chunk)
        with self.decoder.context(1, len(ids)) as context:
            context.reset()
            return np.concatenate([context.extend(part) for part in parts(ids, chunk)])

    def answer(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        row: int = 0,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> Answer:
        """Return a new answer to join a `Batch` (see `batching`). Arguments and errors are the same as of `generate`
        and `Answer`; `row` is added to the seed, so that answers with the same seed differ."""
        return self._answers([prompt], max_tokens, stop, sampling, row, constraint, logprobs)[0]

    def _start(
        self,
        batch: Sequence[Any],
        max_tokens: int | None,
        stop: str | Sequence[str],
        chunk: int,
        sampling: Sampling,
        speculation: Speculation,
    ) -> tuple[list[Answer], Iterator[None]]:
        rows = self._answers(batch, max_tokens, stop, sampling)
        return rows, self._run(rows, chunk, speculation)

    def _answers(
        self,
        batch: Sequence[Any],
        max_tokens: int | None,
        stop: str | Sequence[str],
        sampling: Sampling,
        first: int = 0,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> list[Answer]:
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise WeftError(f"stop is {stop!r}, but it must be a text, or several, none of them empty")
        tokenizer = self.tokenizer if self._has_text or stops else None
        rows = []
        extras: dict[str, Any] = {"constraint": constraint, "logprobs": logprobs}
        for at, (prompt, limit) in enumerate(self._limits(batch, max_tokens), first):
            begin = self.decoder.start or prompt
            sampler = Sampler(sampling, begin, at)
            rows.append(Answer(prompt, begin, limit, self.stop_ids, sampler, self.forced, tokenizer, stops, **extras))
        return rows

    def _search(self, batch: Sequence[Any], max_tokens: int | None, chunk: int, how: Beams) -> list[Result]:
        limits = self._limits(batch, max_tokens)
        searches = [BeamSearch(how, limit, self.stop_ids, self.forced) for _, limit in limits]
        timings = Timings(prompt_tokens=sum(length_of(prompt) for prompt, _ in limits))
        search(self.decoder, [prompt for prompt, _ in limits], self._most(limits), searches, chunk, timings)
        results = []
        for (prompt, _), finished in zip(limits, searches, strict=True):
            for tokens, score in ((list(text.tokens), text.score) for text in finished.best[: how.returned]):
                ended = tokens[-1] in self.stop_ids
                text = self.tokenizer.decode(tokens[:-1] if ended else tokens) if self._has_text else ""
                results.append(Result(prompt, tokens, text, "stop" if ended else "length", score, timings))
        return results

    def _speculation(self, lookup: int, assistant: Generator | None, most: int) -> Speculation:
        """Return the source of drafts. Raises WeftError if this model cannot verify them."""
        speculation = Speculation(lookup, None if assistant is None else assistant.decoder, most)
        if speculation:
            speculation.check(self.decoder)
        return speculation

    def _chunk(self, asked: int | None) -> int:
        """Return the number of prompt tokens per call: `asked`, or the default of the device."""
        if asked is None:
            return self.decoder.chunk
        check_count("chunk", asked)
        return asked

    @property
    def _has_text(self) -> bool:
        return self.folder is not None and (self.folder / "tokenizer.json").is_file()

    def _limits(self, batch: Sequence[Any], max_tokens: int | None) -> list[tuple[list[int], int]]:
        """Return (token ids, maximum number of new tokens) for each prompt of `batch`; at most `max_tokens` if set."""
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        results = []
        for prompt in map(self._encode, batch):
            room = self.decoder.max_length + 1 - len(self.decoder.start or prompt)  # the last token is never fed back
            results.append((prompt, room if max_tokens is None else min(room, max_tokens)))
        return results

    def _most(self, limits: Sequence[tuple[list[int], int]]) -> int:
        """Return the maximum number of tokens that a row will cache, given (prompt, limit) of each row."""
        return max(len(self.decoder.start or prompt) + limit - 1 for prompt, limit in limits)

    def _encode(self, prompt: Prompt) -> Any:
        if self.decoder.sound is not None:
            return check_sound(self.decoder.sound, prompt)
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif is_ids(prompt):
            ids = [int(i) for i in prompt]
        else:
            raise WeftError(f"a prompt is {quote_prompt(prompt)}, but it must be a text or a list of token ids")
        bounds = self.decoder.vocab, self.decoder.max_prompt
        check_ids("a prompt", ids, *bounds, "compile with a larger --max-length")
        return ids

    @contextmanager
    def _open_context(self, prompts: Sequence[list[int]], most: int) -> Iterator[tuple[BatchContext, int]]:
        """Yield a context for `prompts` with `most` tokens per row, and the number of prompt tokens it has cached."""
        with self.decoder.context(len(prompts), most) as context:
            yield context, 0

    def _run(self, rows: list[Answer], chunk: int, speculation: Speculation) -> Iterator[None]:
        """Generate the answers `rows` to their end; yield after the prefill and after each step."""
        timings = Timings(prompt_tokens=sum(length_of(row.result.prompt) for row in rows))
        for row in rows:
            row.result.timings = timings
        tokens = np.zeros(len(rows), np.int64)
        active = np.ones(len(rows), np.bool_)
        prompts = [row.result.prompt for row in rows]
        most = self._most([(row.result.prompt, row.limit) for row in rows])
        with self._open_context(prompts, most) as (context, keep):
            timings.cache_bytes = context.cache_bytes
            timings.prompt_tokens -= keep
            start = perf_counter()
            advance(rows, Answer.push, context.prefill(prompts, chunk, keep), tokens, active)
            timings.prefill_seconds = perf_counter() - start
            before = self.decoder.experts
            yield
            # Forced tokens replace logits on the host, so the host must also draw.
            host = self.forced != TokenRules() or speculation
            draw = None if host else context.drawing([row.sampler for row in rows])
            drafts = [speculation.drafts(context.capacity) for _ in rows] if speculation else []
            try:
                while active.any():
                    start = perf_counter()
                    if speculation:
                        verify(context, rows, drafts, tokens, active)
                    elif draw is None:
                        scores = context.step(tokens, active)
                        timings.decoded_tokens += advance(rows, Answer.push, scores, tokens, active)
                    else:
                        timings.decoded_tokens += advance(rows, Answer.add, draw(tokens, active), tokens, active)
                    timings.decode_seconds += perf_counter() - start
                    timings.experts = self.decoder.experts - before
                    yield
            finally:
                for draft in drafts:
                    draft.close()


class Conversation(Generator):
    """A conversation with a model that begins with `messages`::

        talk = Conversation(weft.load("out/"), [{"role": "system", "content": "Be brief."}])
        print("".join(talk.say("What is the capital of France?")))

    `variables` are passed to the chat template. Only the part of a new prompt after the common prefix with the cached
    tokens is computed; recurrent states and rolling caches cannot rewind, so they are reused only if all their tokens
    are in the prefix. With a seed the same messages get the same answers.
    """

    def __init__(self, model: Generator, messages: Sequence[Message] = (), **variables: Any) -> None:
        super().__init__(model.decoder, stop_ids=model.stop_ids, folder=model.folder, forced=model.forced)
        self._model, self._messages, self._variables = model, list(messages), variables
        self._answer: Stream | None = None
        self._context: BatchContext | None = None
        self._lease = ExitStack()

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template."""
        return self._model.chat_template

    @property
    def messages(self) -> list[Message]:
        """Return all messages so far, including the part of the last answer that is generated."""
        answer = [] if self._answer is None else [{"role": "assistant", "content": self._answer.result.text}]
        return [*self._messages, *answer]

    def say(self, text: str, **options: Any) -> Stream:
        """Return a stream of the answer to the user's message `text`; end an earlier answer that is still streaming.

        `options` are those of `stream`. Raises WeftError as `stream` does, and if the folder has no chat template; the
        messages are then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        stream = self.stream(self.chat_prompt(messages, **self._variables), **options)
        # After `stream`, which raises on wrong arguments: then the messages stay unchanged.
        if self._answer is not None:
            self._answer.close()
        self._messages, self._answer = messages, stream
        return stream

    @contextmanager
    def _open_context(self, prompts: Sequence[list[int]], most: int) -> Iterator[tuple[BatchContext, int]]:
        # `generate` takes batches; the conversation's own caches have one row.
        if len(prompts) > 1:
            with super()._open_context(prompts, most) as lent:
                yield lent
            return
        if self._context is None or self._context.capacity < most:
            lease = ExitStack()
            context = lease.enter_context(self.decoder.context(1, most))
            if self._context is None:
                # The decoder lends contexts that were used before.
                context.reset()
            else:
                context.take(self._context)
            # Released only now: `take` reads the old caches.
            self._lease.close()
            self._lease, self._context = lease, context
        yield self._context, self._context.count_cached(prompts[0])
