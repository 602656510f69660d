"""Settings of a server: values that are refused."""

from __future__ import annotations

import pytest

from weft.frontends.app.serve.server_settings import ServerSettings
from weft.ir.errors import WeftError


@pytest.mark.parametrize("name", ["client_timeout", "drain"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_times_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(WeftError, match=name):
        ServerSettings(**{"name": "x", name: value})


def test_counts_names_and_keys_are_checked() -> None:
    assert ServerSettings("x", drain=0.0, api_key="a-secret").max_batch == 16
    for wrong, words in (
        ({"max_batch": 0}, "max_batch"),
        ({"prefix_cache": -1}, "prefix_cache is -1"),
        ({"name": ""}, "is empty or not printable: choose another by --model-name"),
        ({"name": "a\nb"}, "is empty or not printable"),
        ({"api_key": ""}, "the API key must consist of printable ASCII characters"),
        ({"api_key": "schlüssel"}, "the API key must consist of printable ASCII characters"),
        ({"client_timeout": 0.05}, "client_timeout is 0.05, but it must be a finite number of seconds, at least 0.1"),
    ):
        with pytest.raises(WeftError, match=words):
            ServerSettings(**{"name": "x", **wrong})
