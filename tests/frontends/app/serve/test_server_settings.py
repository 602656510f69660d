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
