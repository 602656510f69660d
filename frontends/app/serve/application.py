"""The ASGI application: its endpoints, and the checks of a request before its endpoint runs."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from .connections import Connection, Json, collect_results, read_body, send_json, send_stream, to_api_error
from .engine.jobs import ClientGone, QueueFull, ServerClosing
from .protocol.errors import ApiError, bad_request
from .protocol.fields import RequestObject
from .protocol.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from .protocol.response_requests import ResponseRequest
from .protocol.responses import build_embeddings, describe_model, truncate_vector
from .protocol.scoring import ClassifyRequest, PredictRequest, RerankRequest, ScoreRequest
from .service import RunningReply, Service

R = TypeVar("R", bound=RequestObject)
KEYLESS_PATHS = ("/health",)  # for load balancers, which have no key
EXTRA_REQUESTS = 64  # open requests in addition to the running and waiting ones: rejected ones, lists, metrics
_log = logging.getLogger("weft.serve")


def build_application(service: Service) -> ASGIApp:
    """Return the ASGI application with the endpoints of `service`."""
    settings = service.settings

    async def read(kind: type[R], request: Request) -> tuple[R, int]:
        """Parse the body of `request` as a request of class `kind`; return it with the size of the body in bytes."""
        raw = await read_body(request, settings.max_body, settings.client_timeout)
        return await service.read_request(kind, raw), len(raw)

    def reply(answering: RunningReply) -> Any:
        return partial(send_stream if answering.stream else send_json, answering)

    async def chat(request: Request) -> Any:
        return reply(await service.start_chat(*await read(ChatRequest, request)))

    async def respond(request: Request) -> Any:
        return reply(await service.start_response(*await read(ResponseRequest, request)))

    async def complete(request: Request) -> Any:
        return reply(await service.start_completions(*await read(CompletionRequest, request)))

    def describe(name: str) -> dict[str, Any]:
        parent = None if name == settings.name else settings.name
        return describe_model(name, service.created, service.max_length, parent)

    def make_score_endpoint(kind: type[Any]) -> Callable[[Request], Awaitable[Response]]:
        async def score(request: Request) -> Response:
            query, _ = await read(kind, request)
            jobs, channel, tokens = await service.start_scores(query)
            logits = np.stack(await collect_results(service.worker, request, jobs, channel))
            counts = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
            facts = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": settings.name, "usage": counts}
            return Json(query.respond(service.model, logits, facts))

        return score

    async def embed(request: Request) -> Response:
        query, _ = await read(EmbeddingRequest, request)
        jobs, channel, tokens = await service.start_embeddings(query)
        vectors = await collect_results(service.worker, request, jobs, channel)
        if query.dimensions is not None:
            if query.dimensions > vectors[0].size:
                raise bad_request(f"This model's embeddings have only {vectors[0].size} dimensions.", "dimensions")
            vectors = [truncate_vector(vector, query.dimensions) for vector in vectors]
        return Json(build_embeddings(vectors, settings.name, tokens, query.encoding_format == "base64"))

    async def list_models(request: Request) -> Response:
        return Json({"object": "list", "data": list(map(describe, service.models))})

    async def show_model(request: Request) -> Response:
        service.check_model(name := request.path_params["name"])
        return Json(describe(name))

    async def health(request: Request) -> Response:
        return Json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.format_text(), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/embeddings", embed, methods=["POST"]),
        *(
            Route(f"{version}/{name}", make_score_endpoint(kind), methods=["POST"])
            for name, kind in {"rerank": RerankRequest, "score": ScoreRequest, "classify": ClassifyRequest}.items()
            for version in ("/v1", "")
        ),
        Route("/predict", make_score_endpoint(PredictRequest), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    return RequestChecks(Router(routes), service)


class RequestChecks:
    """An ASGI app that checks host, API key, content type and number of requests, and answers every error."""

    def __init__(self, router: Router, service: Service) -> None:
        self._router, self._service = router, service
        self._n_requests = 0
        self._max_requests = service.settings.max_batch + service.settings.max_queue + EXTRA_REQUESTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no WebSockets, and no work at the start or end of the server
        connection = Connection(send, self._service.settings.client_timeout)
        self._n_requests += 1
        try:
            await self._respond(scope, receive, connection)
            await connection.flush()
        except ClientGone:
            pass
        finally:
            self._n_requests -= 1
            if scope["method"] == "POST":
                status = connection.status
                state = "cancelled" if not status else "ok" if status < 400 else "refused" if status < 500 else "failed"
                with self._service.metrics.lock:
                    self._service.metrics.requests.add(1, state)

    async def _respond(self, scope: Scope, receive: Receive, connection: Connection) -> None:
        """Send the response of the endpoint, or of the error that it raises; raise ClientGone if the client is gone."""
        try:
            self._check(scope)
            await self._router({**scope, "app": self}, receive, connection.send)  # as an app's, it raises HTTPException
        except ClientGone:
            raise
        except Exception as error:
            failure = _make_route_error(scope, error) if isinstance(error, HTTPException) else to_api_error(error)
            if failure.status == 500 and failure is not error:
                _log.error("a request failed: %s: %s", type(error).__name__, error)
            if not connection.status:
                await Json(failure.json(), failure.status, failure.headers)(scope, receive, connection.send)
            elif not connection.ended:
                connection.abort()  # half a response must not look complete

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a wrong host, key or content type, JobError in a shutdown or beyond the request limit."""
        settings = self._service.settings
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if settings.hosts is not None and _parse_host(headers.get("host", "")) not in settings.hosts:
            # A page in a browser may point a host name here (DNS rebinding).
            raise ApiError(403, "Unknown host name: use the address that weft serve prints.", code="unknown_host")
        if settings.api_key is not None and scope["path"] not in KEYLESS_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            key_bytes = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
            if not key_bytes:
                raise ApiError(401, "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
            if not hmac.compare_digest(key_bytes, settings.api_key.encode()):
                raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        if self._service.closing and scope["path"] not in KEYLESS_PATHS:
            raise ServerClosing
        if self._n_requests > self._max_requests:
            raise QueueFull("Too many requests are open. Try again later.")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # Pages of other sites can only send other types without asking.
                raise ApiError(415, f"The content type of a request must be application/json, not {kind!r:.80}.")


def _parse_host(header: str) -> str:
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    return name.strip("[]").lower()


def _make_route_error(scope: Scope, error: HTTPException) -> ApiError:
    method, path = scope["method"], scope["path"]
    message = f"Not allowed to {method} on {path}." if error.status_code == 405 else f"Invalid URL ({method} {path})"
    return ApiError(error.status_code, message)
