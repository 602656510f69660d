"""The application: endpoints, and what every request passes before them."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from .connections import Connection, Json, JsonReply, StreamReply, error_of, read_body, watching
from .engine.jobs import Channel, Closing, Full, Gone, Job
from .protocol.errors import ApiError, invalid
from .protocol.fields import Model
from .protocol.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from .protocol.responses import embeddings, model, shortened
from .protocol.scoring import ClassifyRequest, PredictRequest, RerankRequest, ScoreRequest
from .service import Answering, Service

R = TypeVar("R", bound=Model)
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
                            raise error_of(piece.error)
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
            return Json(wanted.respond(service.model, logits, facts))

        return score

    async def embed(request: Request) -> Response:
        wanted, _ = await read(EmbeddingRequest, request)
        jobs, channel, tokens = await service.embed(wanted)
        found = await values(request, jobs, channel)
        if wanted.dimensions is not None:
            if wanted.dimensions > found[0].size:
                raise invalid(f"This model's embeddings have {found[0].size} dimensions, not more.", "dimensions")
            found = [shortened(vector, wanted.dimensions) for vector in found]
        return Json(embeddings(found, settings.name, tokens, wanted.encoding_format == "base64"))

    async def list_models(request: Request) -> Response:
        return Json({"object": "list", "data": [model(settings.name, service.created, service.longest)]})

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return Json(model(settings.name, service.created, service.longest))

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

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
    return Gate(Router(routes), service)


class Gate:
    """The gate before the endpoints: limits, host, key and type of a request; and a response for every failure."""

    def __init__(self, router: Router, service: Service) -> None:
        self._router, self._service = router, service
        self._requests = 0
        self._most = service.settings.max_batch + service.settings.max_queue + SPARE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no WebSockets, and nothing to do at the beginning or end of the server's life
        connection = Connection(send, self._service.settings.client_timeout)
        self._requests += 1
        try:
            await self._respond(scope, receive, connection)
            await connection.flush()
        except Gone:
            pass
        finally:
            self._requests -= 1
            if scope["method"] == "POST":
                self._count(connection.status)

    async def _respond(self, scope: Scope, receive: Receive, connection: Connection) -> None:
        """Send the response of an endpoint or of an error. Raises Gone where the client does not take it."""
        try:
            self._check(scope)
            await self._router({**scope, "app": self}, receive, connection.send)  # as an app's, it raises HTTPException
        except Gone:
            raise
        except Exception as error:
            refused = _no_route(scope, error) if isinstance(error, HTTPException) else error_of(error)
            if refused.status == 500 and refused is not error:
                _log.error("a request failed: %s: %s", type(error).__name__, error)
            if not connection.status:
                await Json(refused.json(), refused.status, refused.headers)(scope, receive, connection.send)
            elif not connection.ended:
                connection.abort()  # half a response must not look whole

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
            raise Closing
        if self._requests > self._most:
            raise Full("Too many requests are open. Try again later.")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # What pages of other sites may send without asking has other types.
                raise ApiError(415, "The content type of a request must be application/json.")


def _host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()


def _no_route(scope: Scope, error: HTTPException) -> ApiError:
    """Return the error of a request for a path or method that there is not."""
    method, path = scope["method"], scope["path"]
    wrong = f"Not allowed to {method} on {path}." if error.status_code == 405 else f"Invalid URL ({method} {path})"
    return ApiError(error.status_code, wrong)
