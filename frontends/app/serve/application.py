"""The application: endpoints, and what every request passes before them."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .connections import Connection, JsonReply, StreamReply, error_of, read_body, send_json, watching
from .engine.jobs import Channel, Closing, Full, Gone, Job
from .protocol.errors import ApiError, invalid, queue_full, server_error, shutting_down, unknown_model
from .protocol.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from .protocol.responses import embeddings, model, models, shortened, to_bytes
from .protocol.scoring import ClassifyRequest, PredictRequest, RerankRequest, ScoreRequest, ScoringRequest
from .service import Answering, Service

R = TypeVar("R", ChatRequest, CompletionRequest, EmbeddingRequest, ScoringRequest)
OPEN = ("/health",)  # for load balancers, which know no key
SPARE = 64  # requests beyond those that run or wait: refused ones, and those for lists and metrics
_log = logging.getLogger("weft.serve")


def application(service: Service) -> ASGIApp:
    """Return the application that serves a model."""
    settings = service.settings

    async def read(kind: type[R], request: Request) -> tuple[R, int]:
        """Return the request in a body, and the size of that."""
        raw = await read_body(request, settings.max_body, settings.client_timeout)
        return await service.read(kind, raw), len(raw)

    def reply(answering: Answering) -> Any:
        return StreamReply(answering) if answering.stream else JsonReply(answering)

    async def chat(request: Request) -> Any:
        return reply(await service.chat(*await read(ChatRequest, request)))

    async def complete(request: Request) -> Any:
        return reply(await service.complete(*await read(CompletionRequest, request)))

    async def values(request: Request, jobs: Sequence[Job], channel: Channel) -> list[Any]:
        """Return what `jobs` make, in their order."""
        made: dict[int, Any] = {}
        try:
            async with watching(request.receive, channel):
                while len(made) < len(jobs):
                    for piece in await channel.take():
                        if piece.error is not None:
                            raise error_of(piece)
                        made[piece.index] = piece.value
        finally:
            if len(made) < len(jobs):
                service.worker.cancel(jobs)
        return [made[index] for index in range(len(jobs))]

    def scoring(kind: type[Any]) -> Callable[[Request], Awaitable[Response]]:
        async def score(request: Request) -> Response:
            wanted, _ = await read(kind, request)
            jobs, channel, tokens = await service.score(wanted)
            logits = np.stack(await values(request, jobs, channel))
            counts = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
            facts = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": settings.name, "usage": counts}
            return _json(wanted.respond(service.model, logits, facts))

        return score

    async def embed(request: Request) -> Response:
        wanted, _ = await read(EmbeddingRequest, request)
        jobs, channel, tokens = await service.embed(wanted)
        found = await values(request, jobs, channel)
        if wanted.dimensions is not None:
            if wanted.dimensions > found[0].size:
                raise invalid(f"This model's embeddings have {found[0].size} dimensions, not more.", "dimensions")
            found = [shortened(vector, wanted.dimensions) for vector in found]
        return _json(embeddings(found, settings.name, tokens, wanted.base64))

    async def list_models(request: Request) -> Response:
        return _json(models(settings.name, service.created, service.longest))

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != settings.name:
            raise unknown_model(name)
        return _json(model(name, service.created, service.longest))

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/embeddings", embed, methods=["POST"]),
        *(
            Route(f"{version}/{name}", scoring(kind), methods=["POST"])
            for name, kind in {"rerank": RerankRequest, "score": ScoreRequest, "classify": ClassifyRequest}.items()
            for version in ("/v1", "")
        ),
        Route("/predict", scoring(PredictRequest), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers: dict[Any, Callable[[Request, Any], Any]] = {
        ApiError: _refusal,
        Full: _queue_full,
        Closing: _closing,
        HTTPException: _no_route,
        Exception: _defect,
    }
    return Gate(Starlette(routes=routes, exception_handlers=handlers), service)


class Gate:
    """The gate before the endpoints: limits, host, key and type of a request; and a response for every failure."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._requests = 0
        self._most = service.settings.max_batch + service.settings.max_queue + SPARE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no WebSockets, and nothing to do at the beginning or end of the server's life
        connection = Connection(send, self._service.settings.client_timeout)
        self._requests += 1
        try:
            self._check(scope)
            await self._app(scope, receive, connection.send)
            await connection.flush()
        except ApiError as error:
            await _send_error(connection.send, error)
        except Gone:
            pass
        except Exception as error:  # a defect of ours: the client learns no more than that
            _log.error("a request failed: %s: %s", type(error).__name__, error)
            if not connection.status:
                await _send_error(connection.send, server_error())
            elif not connection.ended:
                connection.abort()  # half a response must not look whole
        finally:
            self._requests -= 1
            if scope["method"] == "POST":
                self._count(connection.status)

    def _count(self, status: int) -> None:
        state = "cancelled" if not status else "ok" if status < 400 else "refused" if status < 500 else "failed"
        with self._service.metrics.lock:
            self._service.metrics.requests.add(1, state)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for requests that no endpoint should see."""
        settings = self._service.settings
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if settings.hosts is not None and _host(headers.get("host", "")) not in settings.hosts:
            # A page in a browser may make a name of its own point here (DNS rebinding).
            raise ApiError(403, "This server does not answer to that host name.", code="unknown_host")
        if settings.api_key is not None and scope["path"] not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
            if not given:
                raise ApiError(401, "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
            if not hmac.compare_digest(given, settings.api_key.encode()):
                raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        if self._service.closing and scope["path"] not in OPEN:
            raise shutting_down()
        if self._requests > self._most:
            raise queue_full("Too many requests are open. Try again later.")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # What pages of other sites may send without asking has other types.
                raise ApiError(415, "The content type of a request must be application/json.")


def _host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()


async def _send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.json(), error.status, **error.headers)


def _json(data: dict[str, Any]) -> Response:
    return Response(to_bytes(data), media_type="application/json")


async def _refusal(request: Request, error: ApiError) -> Response:
    return Response(to_bytes(error.json()), error.status, error.headers, "application/json")


async def _queue_full(request: Request, error: Full) -> Response:
    return await _refusal(request, queue_full(str(error)))


async def _closing(request: Request, error: Closing) -> Response:
    return await _refusal(request, shutting_down())


async def _defect(request: Request, error: Exception) -> Response:
    """Answer where something failed that should not; `Gate` hears of the error, too."""
    return await _refusal(request, server_error())


async def _no_route(request: Request, error: HTTPException) -> Response:
    """Answer requests for paths or methods that there are not."""
    method, path = request.method, request.url.path
    wrong = f"Not allowed to {method} on {path}." if error.status_code == 405 else f"Invalid URL ({method} {path})"
    return await _refusal(request, ApiError(error.status_code, wrong))
