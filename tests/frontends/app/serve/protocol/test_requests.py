"""Requests: their bodies, sampling options, constraints and messages."""

from __future__ import annotations

import pytest

from weft.frontends.app.serve.server import Server

from ..serving import refusal


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"hi"', b"\xff", b"[" * 5000, b'{"a": 1} more'])
def test_bodies_other_than_json_objects_are_refused(server: Server, body: bytes) -> None:
    assert "could not parse the JSON body" in refusal(server, "completions", body)["message"]
