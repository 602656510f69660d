"""Errors in the format of OpenAI's API: body, type and headers by status."""

from __future__ import annotations

import pytest

from weft.frontends.app.serve.protocol.errors import ApiError, bad_request


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {}),
        (401, "invalid_request_error", {"www-authenticate": "Bearer"}),
        (404, "invalid_request_error", {}),
        (429, "requests", {"retry-after": "1"}),
        (500, "server_error", {}),
        (503, "server_error", {"retry-after": "1"}),
    ],
)
def test_type_and_headers_follow_from_the_status(status: int, kind: str, headers: dict[str, str]) -> None:
    error = ApiError(status, "no", "n", "some_code")
    assert error.json() == {"error": {"message": "no", "type": kind, "param": "n", "code": "some_code"}}
    assert error.headers == headers and str(error) == "no"


def test_bad_request_has_status_400_and_may_name_no_parameter() -> None:
    error = bad_request("wrong")
    assert (error.status, error.param, error.code) == (400, None, "invalid_value")
    assert bad_request("wrong", "top_p", None).json()["error"]["param"] == "top_p"
