"""Errors as the API reports them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error that a client sees: HTTP `status`, the parameter at fault, and a code that programs may test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to it."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": "1"} if self.status in (429, 503) else {}

    def json(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Return the error of a request with a wrong value."""
    return ApiError(400, message, param=param, code=code)


def too_long(longest: int, tokens: int, param: str, noun: str) -> ApiError:
    """Return the error of a prompt that leaves no room for an answer."""
    message = (
        f"This model's maximum context length is {longest} tokens. However, your {noun} resulted in {tokens} tokens. "
        f"Please reduce the length of the {noun}."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str) -> ApiError:
    """Return the error of a request for another model."""
    message = f"The model `{name}` does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def server_error(message: str = "The server had an error while processing your request.") -> ApiError:
    """Return the error of what went wrong here; its cause stands in the server's log alone."""
    return ApiError(500, message, kind="server_error")


def shutting_down() -> ApiError:
    """Return the error of requests while the server ends."""
    return ApiError(503, "The server is shutting down.", code="service_unavailable", kind="server_error")


def queue_full(message: str) -> ApiError:
    """Return the error of requests that there is no room for."""
    return ApiError(429, message, code="rate_limit_exceeded", kind="requests")
