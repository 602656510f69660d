"""Log-probabilities by llama.cpp: what is asked of it, and what is refused. tests/engines runs llama.cpp itself."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.frontends.app.api.bisect.llama_cpp import LOG_PROBABILITIES, trace_log_probabilities
from weft.ir import WeftError

from .fake_llama import install


def test_log_probabilities_are_in_the_order_of_the_vocabulary(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, requests = weft.load_source(llamas[0]).graph, install(monkeypatch)
    trace = trace_log_probabilities(Path("model.gguf"), graph, [5, 6])
    values = trace.values[LOG_PROBABILITIES]
    np.testing.assert_allclose(values[:-1], -math.log(29))
    assert values.shape == (29,) and values[-1] == -math.inf and not trace.rounded
    assert requests == [{"prompt": [5, 6], "temperature": 0, "max_tokens": 1, "logprobs": 29, "cache_prompt": False}]


def test_weights_in_blocks_round_activations(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert trace_log_probabilities(smollm2_gguf, weft.load_source(smollm2_gguf).graph, [5]).rounded


def test_a_missing_package_and_a_broken_file_are_named(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = weft.load_source(llamas[0]).graph
    install(monkeypatch)
    with pytest.raises(WeftError, match=r"llama\.cpp cannot run broken\.gguf: failed to load model"):
        trace_log_probabilities(Path("broken.gguf"), graph, [1])
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(WeftError, match="pip install xllamacpp"):
        trace_log_probabilities(Path("model.gguf"), graph, [1])
