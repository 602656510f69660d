"""Errors as the API reports them."""

from __future__ import annotations

from typing import Any

_KINDS = {429: "requests", 500: "server_error", 503: "server_error"}
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


class ApiError(Exception):
    """An error for the client: message, HTTP `status`, the parameter at fault, and a machine-readable code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the error."""
        return _HEADERS.get(self.status, {})

    def json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Return an ApiError with status 400 about the request parameter `param` (None: the whole request)."""
    return ApiError(400, message, param, code)
