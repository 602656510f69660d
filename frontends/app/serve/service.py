"""The service that all endpoints call: it prepares requests and submits their jobs to the model."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from weft import __version__
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.backends.runtime.text.tokenizer import Encoding
from weft.ir.errors import WeftError

from .engine.constraints import Guide, build_grammar
from .engine.jobs import Channel, Job
from .engine.metrics import Metrics
from .engine.prompts import LARGE_INPUT, PromptEncoder
from .engine.worker import DecodingWorker, EncodingWorker, Worker
from .protocol import requests
from .protocol.errors import ApiError, bad_request
from .protocol.fields import RequestObject
from .protocol.response_requests import PARAMETERS, Message, ResponseRequest, join_calls
from .protocol.responses import Envelope, TokenBytes
from .protocol.scoring import ScoringRequest
from .protocol.tools import ToolFormat, ToolParser, find_tool_format
from .replies import ChatReply, CompletionReply, Reply
from .response_reply import ResponseReply, ResponseStore
from .server_settings import ServerSettings

T = TypeVar("T")
R = TypeVar("R", bound=RequestObject)
_log = logging.getLogger("weft.serve")


@dataclass
class RunningReply:
    """The running jobs of a request, the channel that receives their pieces, and the reply built from the pieces."""

    worker: Worker
    jobs: list[Job]
    channel: Channel
    reply: Reply
    stream: bool

    def close(self) -> None:
        """Cancel jobs that have not ended."""
        if not self.reply.is_done:
            self.worker.cancel(self.jobs)


class Service:
    """A served model, its worker, and the preparation of requests; call `start` before any request.

    Raises WeftError if the model's folder has no tokenizer, or an adapter has the name of the model.
    """

    def __init__(self, model: Generator | EncoderModel, settings: ServerSettings) -> None:
        self.model, self.settings, self.metrics = model, settings, Metrics()
        if model.folder is None or not (model.folder / "tokenizer.json").is_file():
            raise WeftError(f"{settings.name} has no tokenizer, so it cannot be served: compile a source that has one")
        _ = model.tokenizer  # read now, so that the first request does not wait
        self.created, self.closing, self.responses = int(time.time()), False, ResponseStore()
        self.fingerprint = _hash_model(model)
        vocab = model.vocab if isinstance(model, EncoderModel) else model.decoder.vocab
        self.prompts = PromptEncoder(model.folder, vocab, () if isinstance(model, EncoderModel) else model.stop_ids)
        self.worker: Worker
        adapters = {} if isinstance(model, EncoderModel) else model.adapters
        if settings.name in adapters:
            raise WeftError(f"an adapter has the name {settings.name} as well: choose another by --model-name")
        self.models: dict[str, Any] = {settings.name: model, **adapters}
        if isinstance(model, EncoderModel):
            self.worker = EncodingWorker(model, settings.max_batch, settings.max_queue, self.metrics)
            return
        model.prefixes.limit = settings.prefix_cache
        limits = settings.max_batch, settings.max_queue
        self.worker = DecodingWorker(model, *limits, self.metrics, settings.prompt_lookup)
        self.tools = find_tool_format(self.prompts.template.source) if self.prompts.template else None
        if self.prompts.template is None:
            _log.warning("chats are refused: %s", self.prompts.template_error)

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens of prompt and answer together, or of an encoder's input."""
        return self.model.max_length if isinstance(self.model, EncoderModel) else self.model.decoder.max_length

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the worker, which sends results to channels of the event loop `loop`."""
        self.worker.start(loop)

    def drain(self) -> None:
        """Reject new and waiting requests; running requests continue."""
        self.closing = True
        self.worker.drain()
        self.prompts.cancel()

    def close(self) -> None:
        """End the worker and all threads."""
        self.closing = True
        self.worker.stop()
        self.prompts.close()

    # -- requests; all of them also raise JobError if the queue is full or the server shuts down

    async def read_request(self, kind: type[R], raw: bytes) -> R:
        """Parse the body `raw` as a request of class `kind`; raise ApiError if it is invalid."""
        self.worker.check_room(1)
        if len(raw) <= LARGE_INPUT:
            return self._parse_request(kind, raw)
        return await self._translate_errors(self.prompts.run("large", lambda: self._parse_request(kind, raw)), "body")

    def _parse_request(self, kind: type[R], raw: bytes) -> R:
        """Parse a body as a request of class `kind`; its missing sampling options become the model's defaults."""
        body = requests.parse_body(raw)
        if kind in (requests.ChatRequest, requests.CompletionRequest):
            body = self._add_defaults(body, kind is requests.ChatRequest)
        return kind.read(body)

    def _add_defaults(self, body: dict[str, Any], has_limit: bool = True) -> dict[str, Any]:
        """Return the fields of a request with the model's defaults, of the length only if it `has_limit`."""
        defaults = self.model.defaults if isinstance(self.model, Generator) else {}
        used = {n: v for n, v in defaults.items() if body.get(n) is None and (has_limit or n != "max_tokens")}
        return {**body, **used}

    async def start_response(self, request: ResponseRequest, size: int) -> RunningReply:
        """Start the response to a request whose body has `size` bytes; raise ApiError if the request is invalid."""
        previous = request.previous_response_id
        if (history := [] if previous is None else self.responses.get(previous)) is None:
            message = f"Previous response with id '{previous}' not found."
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        messages = join_calls([*history, *request.input])

        def save(response: str, answer: list[Message]) -> None:
            self.responses.add(response, join_calls([*messages, *answer]))

        try:
            chat = requests.ChatRequest.read(self._add_defaults(request.to_chat(messages)))
            request.temperature, request.top_p = chat.temperature, chat.top_p
            return await self.start_chat(chat, size, partial(ResponseReply, request=request, save=save))
        except ApiError as error:  # with the names of the parameters of a response
            for name, field in PARAMETERS.items():
                error.message = error.message.replace(name, field)
                error.param = error.param and error.param.replace(name, field)
            raise

    async def start_chat(
        self, request: requests.ChatRequest, size: int, make_reply: Callable[..., Reply] | None = None
    ) -> RunningReply:
        """Start the answers to a chat request whose body has `size` bytes; raise ApiError if the request is invalid.
        `make_reply` has the arguments of `Reply`, and returns a reply of another form than a chat's."""
        model = self._require_decoder(request.model)
        if self.prompts.template is None:
            raise bad_request("This model has no chat template: use /v1/completions.", "messages", "unsupported_model")
        variables, form, choice = dict(request.chat_template_kwargs), None, request.choice
        if choice.mode != "none":
            if (form := self.tools) is None:
                message = "This model's chat template takes no tools, or writes calls in a format unknown here."
                raise bad_request(message, "tools", "unsupported_parameter")
            variables["tools"] = request.tools
        self.worker.check_room(request.n)
        ids = await self._translate_errors(self.prompts.encode_chat(request.messages, variables, size), "messages")
        guide = await self._build_guide(request.constraint, size)
        if form is not None and choice.is_forced:
            guide = await self._build_tool_guide(form, request, size)
        _check_ids(ids, model.decoder.max_prompt, model.decoder.vocab, "messages")
        kind = "chat.completion" if make_reply is None else "response"
        envelope = Envelope(kind, request.model, self.fingerprint)
        token_bytes = await self._load_token_bytes(request)
        counts, named = (request.n, request.n, len(ids)), choice.mode == "named"
        reply = (make_reply or ChatReply)(envelope, *counts, model.stop_ids, token_bytes, named=named)
        for answer in reply.choices if form is not None else ():
            answer.parser = ToolParser(form) if form is not None else None
        return self._start_answers(model, [ids], request, guide, reply)

    async def start_completions(self, request: requests.CompletionRequest, size: int) -> RunningReply:
        """Start the continuations of a request's prompts (body: `size` bytes); raise ApiError if it is invalid."""
        model, count = self._require_decoder(request.model), len(request.prompt) * request.n
        self.worker.check_room(count)
        prompts = [await self._encode_prompt(prompt, "prompt") for prompt in request.prompt]
        for ids in prompts:
            _check_ids(ids, model.decoder.max_prompt, model.decoder.vocab, "prompt")
        guide = await self._build_guide(request.constraint, size)
        echoes: list[str] = []
        if request.echo:
            texts = [text if isinstance(text, str) else model.tokenizer.decode(text) for text in request.prompt]
            echoes = [text for text in texts for _ in range(request.n)]
        envelope = Envelope("text_completion", request.model, self.fingerprint)
        tokens, token_bytes = sum(map(len, prompts)), await self._load_token_bytes(request)
        reply = CompletionReply(envelope, count, request.n, tokens, model.stop_ids, token_bytes, echoes=echoes)
        return self._start_answers(model, prompts, request, guide, reply)

    async def start_embeddings(self, request: requests.EmbeddingRequest) -> tuple[list[Job], Channel, int]:
        """Start a request's embeddings; return its jobs, their channel and the number of tokens, or raise ApiError."""
        self.check_model(request.model)
        model = self.model
        if not isinstance(model, EncoderModel):
            raise bad_request("This model has no embeddings: use /v1/completions.", "model", "unsupported_model")
        self.worker.check_room(len(request.input))
        prefix = model.prompt()
        texts = [prefix + text if isinstance(text, str) else text for text in request.input]
        rows = [await self._encode_prompt(text, "input") for text in texts]
        for ids in rows:
            _check_ids(ids, model.max_length, model.vocab, "input")
        return self._start_encoding([(ids, None) for ids in rows])

    async def start_scores(self, request: ScoringRequest) -> tuple[list[Job], Channel, int]:
        """Start a request's scores; return its jobs, their channel and the number of tokens, or raise ApiError."""
        if request.model is not None:
            self.check_model(request.model)
        model = self.model
        try:
            if not isinstance(model, EncoderModel) or model.task is None:
                raise WeftError("it has no classification head")
            model.require_ranking() if request.ranks else model.require_task(
                "text-classification", "next-sentence-prediction"
            )
        except WeftError as error:
            reason = str(error).replace(f"{model.folder} ", "it ")
            raise bad_request(f"This model cannot score this input: {reason}.", "model", "unsupported_model") from error
        texts, truncates = request.texts, request.truncate or request.truncate_prompt_tokens is not None
        self.worker.check_room(len(texts))

        def encode_all() -> list[Encoding]:
            inputs = [model.render_pair(*text) for text in texts] if request.ranks else texts
            return [model.encode_input(text, truncates) for text in inputs]

        rows = await self._translate_errors(self.prompts.run("large", encode_all), "input")
        return self._start_encoding([(row.ids, row) for row in rows])

    def _start_encoding(
        self, inputs: Sequence[tuple[Sequence[int], Encoding | None]]
    ) -> tuple[list[Job], Channel, int]:
        channel = Channel()
        jobs = [Job(channel, index, ids=ids, encoded=row) for index, (ids, row) in enumerate(inputs)]
        self.worker.submit(jobs)
        return jobs, channel, sum(len(job.ids) for job in jobs)

    def _start_answers(
        self,
        model: Generator,
        prompts: Sequence[list[int]],
        request: requests.GenerationRequest,
        guide: Guide | None,
        reply: Reply,
    ) -> RunningReply:
        channel, jobs = Channel(), list[Job]()
        for ids in prompts:
            for row in range(request.n):
                try:
                    answer = model.answer(
                        ids,
                        max_tokens=request.max_tokens,
                        stop=request.stop,
                        sampling=request.sampling,
                        row=row,
                        constraint=None if guide is None else guide.copy(),
                        logprobs=request.top_logprobs,
                    )
                except WeftError as error:
                    raise bad_request(str(error)) from error
                jobs.append(Job(channel, len(jobs), answer, streams=request.stream, adapter=model.decoder.adapter))
        self.worker.submit(jobs)
        reply.include_usage = request.stream_options.include_usage
        return RunningReply(self.worker, jobs, channel, reply, request.stream)

    # -- parts of requests

    def check_model(self, name: str) -> None:
        """Raise ApiError unless the model or an adapter has this `name`."""
        if name not in self.models:
            message = f"The model `{name}` does not exist or you do not have access to it."
            raise ApiError(404, message, "model", "model_not_found")

    def _require_decoder(self, name: str) -> Generator:
        self.check_model(name)
        if isinstance(self.model, EncoderModel):
            raise bad_request(
                "This model encodes text and does not generate any: use /v1/embeddings.", "model", "unsupported_model"
            )
        decoder: Generator = self.models[name]
        return decoder

    async def _encode_prompt(self, prompt: requests.Prompt, param: str) -> list[int]:
        return await self._translate_errors(self.prompts.encode(prompt), param) if isinstance(prompt, str) else prompt

    async def _translate_errors(self, preparation: Coroutine[Any, Any, T], param: str) -> T:
        """Return the result of `preparation`; turn its WeftError into an ApiError about the parameter `param`."""
        try:
            return await preparation
        except WeftError as error:
            raise bad_request(f"Invalid '{param}': {error}".replace(f"{self.model.folder}/", ""), param) from error

    async def _build_guide(self, spec: requests.ConstraintSpec | None, size: int) -> Guide | None:
        if spec is None:
            return None
        guide = self.prompts.build_guide(size, build_grammar, spec.kind, spec.value)
        return await self._translate_errors(guide, spec.param)

    async def _build_tool_guide(self, form: ToolFormat, request: requests.ChatRequest, size: int) -> Guide:
        special = None
        if form.special:
            special = await self._translate_errors(self.prompts.find_special_token(form.special), "tools")
        guide = self.prompts.build_guide(size, form.write_grammar, request.tools, request.choice, special)
        return await self._translate_errors(guide, "tools")

    async def _load_token_bytes(self, request: requests.GenerationRequest) -> TokenBytes | None:
        """Return the function from tokens to their bytes; None if the request wants no log-probabilities."""
        if request.top_logprobs is None:
            return None
        try:
            return await self.prompts.load_token_bytes()
        except WeftError:  # llguidance cannot read the tokenizer: use the tokenizer's text of a single token
            return lambda token: self.model.tokenizer.decode([token]).encode()


def _check_ids(ids: Sequence[int], longest: int, vocab: int, param: str) -> None:
    """Raise ApiError, naming `param`, unless a prompt has 1 to `longest` token ids below `vocab`."""
    if not ids:
        raise bad_request(f"Invalid '{param}': it has no tokens.", param)
    if len(ids) > longest:
        message = (
            f"This model's maximum context length is {longest} tokens. However, your {param} resulted in "
            f"{len(ids)} tokens. Please reduce the length of the {param}."
        )
        raise bad_request(message, param, "context_length_exceeded")
    if min(ids) < 0 or max(ids) >= vocab:
        raise bad_request(f"Invalid '{param}': its token ids must be from 0 to {vocab - 1}.", param)


def _hash_model(model: Generator | EncoderModel) -> str:
    """Return a hash of weft's version and the folder's JSON files; if it is equal, equal seeds give equal answers."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(model.folder.glob("*.json")) if model.folder is not None else ():
        digest.update(path.read_bytes())
    return f"fp_{digest.hexdigest()[:12]}"
