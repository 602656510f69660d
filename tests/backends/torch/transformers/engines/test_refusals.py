"""Reasons why vLLM, SGLang and continuous batching cannot run a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.passes import Report

from ..folders import (
    folder_of,
    graph_of,
    lowered,
)


@pytest.mark.parametrize(
    ("name", "engine", "reason"),
    [
        ("preset/mamba-130m", "vLLM", "recurrent layers keep states"),
        ("variant/repeated", "SGLang", "layers share weights"),
        ("family/bloom", "vLLM", "a bias by distance"),
        ("family/gpt-oss", "vLLM", "attention has sinks"),
        ("family/gemma2", "transformers generate_batch", "scores have a soft cap"),
        ("variant/chunked", "transformers generate_batch", "attention in chunks"),
        ("variant/experts that choose", "transformers generate_batch", "experts choose among all tokens"),
        ("variant/relative", "vLLM", "relative keys and values"),
        ("variant/encoder, blocks", "vLLM", "blocks of keys"),
        ("variant/latent, expanded", "SGLang", "values and keys differ in width"),
    ],
)
def test_refusals_name_engine_and_reason(name: str, engine: str, reason: str, tmp_path: Path) -> None:
    built = folder_of(lowered(graph_of(name)), tmp_path)
    assert any(reason in why for why in built.refusals[engine])
    assert any(line.startswith(f"{engine}: ") and reason in line for line in built.explain(Report()))
