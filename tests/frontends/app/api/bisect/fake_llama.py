"""A stand-in for xllamacpp that gives all tokens the same probability."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make the stand-in importable; return a list of the requests that it will get."""
    requests: list[dict[str, Any]] = []

    class Server:
        def __init__(self, params: Any) -> None:
            self.path = params.model.path

        def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
            if "broken" in self.path:
                raise RuntimeError("failed to load model")
            requests.append(request)
            vocab = request["logprobs"]
            likely = [{"id": i, "logprob": -math.log(vocab)} for i in reversed(range(vocab - 1))]
            return {"choices": [{"logprobs": {"content": [{"top_logprobs": likely}]}}]}

    class CommonParams(types.SimpleNamespace):
        def __init__(self) -> None:
            super().__init__(model=types.SimpleNamespace())

    module = types.SimpleNamespace(
        CommonParams=CommonParams,
        Server=Server,
        ggml_type=types.SimpleNamespace(GGML_TYPE_F32=0),
        llama_flash_attn_type=types.SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_DISABLED=0),
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    return requests
