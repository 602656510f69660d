"""Generation with a decoder of any executor: prompts in, text and tokens out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
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
from ..text.tokenizer import (
    Prompt,
    Tokenizer,
    check_ids,
    check_sound,
    is_ids,
    is_sound,
    list_prompts,
    measure_prompt,
    quote_prompt,
)
from .answers import Answer, Constraint, add_tokens, verify_drafts
from .async_calls import call_in_thread
from .batch_context import BatchContext, split_chunks
from .beams import Beams, BeamSearch, EarlyStopping, run_beam_search
from .decoder import CachedDecoder
from .prefixes import PrefixCache
from .results import Result, Timings
from .sampler import Sampler, Sampling, SamplingOptions, TokenRules, check_count
from .speculation import Speculation


class StreamArguments(SamplingOptions, total=False):
    """The keyword arguments of `Generator.stream`."""

    max_tokens: int | None
    stop: str | Sequence[str]
    chunk: int | None
    prompt_lookup_num_tokens: int | None
    assistant: Generator | None
    num_assistant_tokens: int


class GenerateArguments(StreamArguments, total=False):
    """The keyword arguments of `Generator.generate`."""

    beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    returned: int


class Stream(Iterator[str]):
    """An iterator over the text pieces of one answer; `result` is the answer so far and grows with each piece."""

    def __init__(self, result: Result, pieces: Iterator[str]) -> None:
        self.result, self._pieces = result, pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the iteration: no further tokens are generated."""
        self._pieces = iter(())


class AsyncStream(AsyncIterator[str]):
    """An async iterator over the text pieces of one answer; `result` is the answer so far and grows with each piece."""

    def __init__(self, stream: Stream, executor: Executor) -> None:
        self._stream, self._executor = stream, executor

    @property
    def result(self) -> Result:
        """Return the answer so far."""
        return self._stream.result

    async def __anext__(self) -> str:
        try:
            piece: Any = await call_in_thread(self._executor, next, self._stream, None)
        except BaseException:  # a cancelled call may not have begun, so that the stream could go on
            self._stream.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return str(piece)

    async def aclose(self) -> None:
        """End the iteration: no further tokens are generated."""
        self._stream.close()


class Generator:
    """A language model: a decoder, and the tokenizer and chat template of its folder if it has them. For an
    encoder-decoder, prompts are the sources of the encoder and results the decoded sequences. `defaults` are the
    sampling options (and `max_tokens`) that its checkpoint recommends: servers use them, its methods do not. `prefixes`
    stores the caches of prompts and answers for conversations and servers; its `limit` bounds them, and 0 is off.
    `adapters` has the model with each adapter that its folder stores for run time, by name."""

    def __init__(
        self,
        decoder: CachedDecoder[Any],
        *,
        stop_ids: frozenset[int] = frozenset(),
        folder: Path | None = None,
        forced: TokenRules = TokenRules(),  # noqa: B008 - frozen
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.decoder, self.stop_ids, self.folder, self.forced = decoder, stop_ids, folder, forced
        self.defaults = defaults
        self.prefixes, self.adapters = PrefixCache(), dict[str, Generator]()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the folder's tokenizer. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError("the model was not opened from a folder, so it has no tokenizer: prompt it with token ids")
        return Tokenizer(self.folder)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the folder's chat template. Raises WeftError when there is none."""
        if self.folder is None:
            raise WeftError(
                "the model was not opened from a folder, so it has no chat template: use prompts, not messages"
            )
        return ChatTemplate(self.folder)

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of a chat up to the start of the next answer, as a prompt for `generate` or `stream`.

        `messages` are mappings with "role" and "content"; `variables` are passed to the chat template. Raises WeftError
        if the folder has no tokenizer or chat template, or the template fails.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, **variables), special=False)

    def conversation(self, messages: Sequence[Message] = (), **variables: Any) -> Conversation:
        """Return a conversation that begins with `messages`; `variables` are passed to the chat template."""
        return Conversation(self, messages, **variables)

    def encode(self, *_: object, **__: object) -> NoReturn:
        """Raise WeftError: a decoder predicts the next token and has no embeddings of texts."""
        raise WeftError(f"{self.folder} is a decoder, which computes no embeddings: use an encoder for `encode`")

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        assistant: Generator | None = None,
        num_assistant_tokens: int = 5,
        beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        returned: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Result]:
        """Continue one prompt or a batch of prompts; return a list of results in the order of the prompts.

        A prompt is text or token ids. Models that read sound take arrays of floats instead: waveforms [samples] or
        spectrograms [bins, frames]. A batch is a list of prompts.

        An answer ends with a stop token of the model, before a string in `stop`, after `max_tokens` tokens (None: no
        such bound), or at the model's maximum length. A model call has at most `chunk` prompt tokens, by default 512 on
        a CPU and 8192 on a GPU. `sampling` are the fields of `Sampling`; the default is greedy. With `beams` above 1,
        run a beam search (see `Beams`) and return the `returned` best sequences of each prompt, best first, with
        scores. Speculative decoding yields the same tokens in fewer model calls: drafts of up to
        `prompt_lookup_num_tokens` tokens come from the sequence so far, or drafts of up to `num_assistant_tokens`
        tokens from `assistant`, a smaller model with the same vocabulary. By default, one greedy answer of a decoder
        that verifies drafts fast has drafts of up to 8 tokens while they save time; 0 is none.

        Raises WeftError on a prompt that is empty or longer than the model's maximum, tokens outside the vocabulary,
        arguments outside their range or without effect in this combination, and text without a tokenizer.
        """
        batch = list_prompts(prompt)
        if not batch:
            return []
        how = Beams(beams, length_penalty, early_stopping, returned)
        if beams > 1:
            if sampling or stop:
                raise WeftError(
                    f"beams is {beams}, but a beam search takes no stop strings or sampling options: leave them out"
                )
            default = Speculation.num_assistant_tokens
            if prompt_lookup_num_tokens or assistant is not None or num_assistant_tokens != default:
                drafting = "prompt_lookup_num_tokens, assistant and num_assistant_tokens"
                raise WeftError(
                    f"beams is {beams}, but a beam search cannot draft tokens: leave out beams, or {drafting}"
                )
            return self._search_beams(batch, max_tokens, self._resolve_chunk(chunk), how)
        if how != Beams():
            raise WeftError("length_penalty, early_stopping and returned need a beam search: set beams above 1")
        options = Sampling.from_options(**sampling)
        greedy_row = len(batch) == 1 and options.temperature == 0
        drafts = self._new_speculation(prompt_lookup_num_tokens, assistant, num_assistant_tokens, greedy_row)
        chunk = self._resolve_chunk(chunk)
        rows = self._new_answers(batch, max_tokens, stop, options)
        for _ in self._run_answers(rows, chunk, drafts):
            pass
        return [row.result for row in rows]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        chunk: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
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
        options = Sampling.from_options(**sampling)
        greedy = options.temperature == 0
        drafts = self._new_speculation(prompt_lookup_num_tokens, assistant, num_assistant_tokens, greedy)
        chunk = self._resolve_chunk(chunk)
        row = self.answer(prompt, max_tokens=max_tokens, stop=stop, sampling=options)
        run = self._run_answers([row], chunk, drafts)
        return Stream(row.result, (piece for _ in run if (piece := row.pop_text())))

    async def agenerate(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[GenerateArguments]) -> list[Result]:
        """Return the results of `generate` for the same arguments, computed in a thread.

        With ONNX Runtime on a CPU, calls run at the same time, each with its own caches. Otherwise a call waits for the
        earlier ones. Cancelling the task ends the call before its next model call, which is a decode step or a chunk of
        a prompt. Raises WeftError as `generate` does.
        """
        return await call_in_thread(self.decoder.executor, self.generate, prompt, **options)

    async def astream(self, prompt: Prompt, **options: Unpack[StreamArguments]) -> AsyncStream:
        """Return an async iterator over pieces of the answer to one prompt, as `stream` does; a thread computes them.
        Cancelling a task that waits for a piece ends the answer, as with `agenerate`."""
        stream = await call_in_thread(self.decoder.executor, self.stream, prompt, **options)
        return AsyncStream(stream, self.decoder.executor)

    def logits(self, ids: Sequence[int], chunk: int | None = None) -> Floats:
        """Return the float32 logits of a sequence of token ids.

        Their shape is [len(ids), vocab] if the model returns logits of every position. Otherwise it is [chunks, vocab]:
        the sequence runs in pieces of `chunk` tokens (None: the device's default), each with the logits of its last
        token. Raises WeftError as `generate` does, and for an encoder-decoder.
        """
        if self.decoder.start is not None:
            raise WeftError(
                "an encoder-decoder gives no logits of token ids alone, without a source: use generate instead"
            )
        ids = self._encode_prompt(ids)
        chunk = self._resolve_chunk(chunk)
        with self.decoder.context(1, len(ids)) as context:
            context.reset()
            return np.concatenate([context.extend(part) for part in split_chunks(ids, chunk)])

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
        """Return a new answer for `Batch.join`. Arguments and errors are those of `generate` and `Answer`; `row` is
        added to the seed, so that answers with the same seed differ."""
        extras = {"constraint": constraint, "logprobs": logprobs}
        return self._new_answers([prompt], max_tokens, stop, sampling, row, **extras)[0]

    def _new_answers(
        self,
        batch: Sequence[Any],
        max_tokens: int | None,
        stop: str | Sequence[str],
        sampling: Sampling,
        first: int = 0,
        **extras: Any,
    ) -> list[Answer]:
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise WeftError(f"stop is {stop!r}, but it must be a nonempty string or a list of nonempty strings")
        tokenizer = self.tokenizer if self._has_text or stops else None
        rows = []
        for at, (prompt, limit) in enumerate(self._encode_prompts(batch, max_tokens), first):
            begin = self.decoder.start or prompt
            sampler = Sampler(sampling, begin, at)
            rows.append(Answer(prompt, begin, limit, self.stop_ids, sampler, self.forced, tokenizer, stops, **extras))
        return rows

    def _search_beams(self, batch: Sequence[Any], max_tokens: int | None, chunk: int, how: Beams) -> list[Result]:
        limits = self._encode_prompts(batch, max_tokens)
        prompts, most = [prompt for prompt, _ in limits], self._count_cached_tokens(limits)
        searches = [BeamSearch(how, limit, self.stop_ids, self.forced) for _, limit in limits]
        timings = Timings(prompt_tokens=sum(map(measure_prompt, prompts)))
        run_beam_search(self.decoder, prompts, most, searches, chunk, timings)
        results = []
        for (prompt, _), finished in zip(limits, searches, strict=True):
            for best in finished.best[: how.returned]:
                tokens, ended = list(best.tokens), best.tokens[-1] in self.stop_ids
                text = self.tokenizer.decode(tokens[:-1] if ended else tokens) if self._has_text else ""
                results.append(Result(prompt, tokens, text, "stop" if ended else "length", best.score, timings))
        return results

    def _new_speculation(
        self, lookup: int | None, assistant: Generator | None, most: int, greedy_row: bool
    ) -> Speculation:
        if lookup is None and not (greedy_row and assistant is None and self.decoder.drafts_pay):
            lookup = 0
        speculation = Speculation(lookup, None if assistant is None else assistant.decoder, most)
        if speculation:
            speculation.check(self.decoder)
        return speculation

    def _resolve_chunk(self, asked: int | None) -> int:
        if asked is None:
            return self.decoder.chunk
        check_count("chunk", asked)
        return asked

    @property
    def _has_text(self) -> bool:
        return self.folder is not None and (self.folder / "tokenizer.json").is_file()

    def _encode_prompts(self, batch: Sequence[Any], max_tokens: int | None) -> list[tuple[list[int], int]]:
        """Return (token ids or sound, maximum number of new tokens) for each prompt of `batch`. The maximum is
        `max_tokens`, or the number that the model's maximum length leaves, if that is less."""
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        results = []
        for prompt in map(self._encode_prompt, batch):
            room = self.decoder.max_length + 1 - len(self.decoder.start or prompt)  # the last token is never fed back
            results.append((prompt, room if max_tokens is None else min(room, max_tokens)))
        return results

    def _count_cached_tokens(self, limits: Sequence[tuple[list[int], int]]) -> int:
        """Return the largest number of tokens that a row caches, given (prompt, maximum of new tokens) of each row."""
        return max(len(self.decoder.start or prompt) + limit - 1 for prompt, limit in limits)

    def _encode_prompt(self, prompt: Prompt) -> Any:
        if self.decoder.sound is not None:
            return check_sound(self.decoder.sound, prompt)
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif is_ids(prompt):
            ids = [int(i) for i in prompt]
        else:
            raise WeftError(f"a prompt is {quote_prompt(prompt)}, but it must be a text or a list of token ids")
        check_ids("a prompt", ids, self.decoder.vocab, self.decoder.max_prompt, "compile with a larger --max-length")
        return ids

    @contextmanager
    def _open_context(self, prompts: Sequence[list[int]], most: int) -> Iterator[tuple[BatchContext, int]]:
        """Yield (a context for `prompts` of `most` tokens per row, the number of prompt tokens already cached)."""
        with self.decoder.context(len(prompts), most) as context:
            yield context, 0

    def _run_answers(self, rows: list[Answer], chunk: int, speculation: Speculation) -> Iterator[None]:
        """Generate the answers `rows` to their end, in place; yield None after the prefill and after each step."""
        prompts = [row.result.prompt for row in rows]
        timings = Timings(prompt_tokens=sum(map(measure_prompt, prompts)))
        for row in rows:
            row.result.timings = timings
        tokens, active = np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_)
        most = self._count_cached_tokens([(row.result.prompt, row.limit) for row in rows])
        with self._open_context(prompts, most) as (context, keep):
            timings.cache_bytes = context.cache_bytes
            timings.prompt_tokens, timings.cached_tokens = timings.prompt_tokens - keep, keep
            start = perf_counter()
            add_tokens(rows, Answer.draw_token, context.prefill(prompts, chunk, keep), tokens, active)
            timings.prefill_seconds = perf_counter() - start
            before = self.decoder.experts
            yield
            # Forced tokens replace logits on the host, so the host must also draw.
            host = self.forced != TokenRules() or speculation
            draw = None if host else context.new_sampling_step([row.sampler for row in rows])
            drafts = [speculation.new_drafts(context.capacity) for _ in rows] if speculation else []
            try:
                while active.any():
                    start = perf_counter()
                    if speculation and verify_drafts(context, rows, drafts, tokens, active):
                        pass
                    elif draw is None:
                        scores = context.step(tokens, active)
                        for draft in drafts:
                            draft.record(0, 0, perf_counter() - start)
                        timings.decoded_tokens += add_tokens(rows, Answer.draw_token, scores, tokens, active)
                    else:
                        drawn = draw(tokens, active)
                        timings.decoded_tokens += add_tokens(rows, Answer.add_token, drawn, tokens, active)
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

    `variables` are passed to the chat template. The conversation keeps its caches: only the part of a new prompt after
    the common prefix with the cached tokens is computed. Recurrent states and rolling caches cannot rewind, so they are
    reused only if the prompt begins with all cached tokens. The model's `prefixes` have the caches of other
    conversations and of earlier prompts. With a seed the same messages get the same answers.
    """

    def __init__(self, model: Generator, messages: Sequence[Message] = (), **variables: Any) -> None:
        super().__init__(model.decoder, stop_ids=model.stop_ids, folder=model.folder, forced=model.forced)
        self.prefixes = model.prefixes
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

        `options` are those of `stream`. Raises WeftError as `stream` does, and if the folder has no chat template; an
        error leaves the messages unchanged.
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
                context.copy_from(self._context)
            # Released only now: `copy_from` reads the old caches.
            self._lease.close()
            self._lease, self._context = lease, context
        keep = self._context.count_cached(prompts[0])
        if self.prefixes.count(self.decoder, prompts[0]) > keep:
            keep = self.prefixes.load(self.decoder, self._context, 0, prompts[0])
        try:
            yield self._context, keep
        finally:
            self.prefixes.save(self.decoder, self._context, 0, len(prompts[0]))
