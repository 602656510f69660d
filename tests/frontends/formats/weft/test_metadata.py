"""Values of graph.meta in files are checked by key."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.formats.weft.metadata import check_metadata
from weft.ir import Graph, WeftError


def graph(**meta: Any) -> Graph:
    made = Graph("g")
    made.meta.update(meta)
    return made


def test_valid_values_are_accepted() -> None:
    source = {"format": "gguf", "path": "a.gguf", "adapters": ["b"]}
    sentence = {"modules": [], "max_seq_length": None}
    check_metadata(graph(kind="encoder", vocab=97, eos_token_ids=[0, 2], labels=["a"], source=source), "f")
    check_metadata(graph(sentence=sentence, sampling={"temperature": 0.5}, residual_scale=0.5, other=object), "f")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("kind", "oracle", "kind of model: decoder, encoder"),
        ("vocab", 0, "positive integer"),
        ("context", True, "positive integer"),
        ("eos_token_ids", [-1], "list of tokens"),
        ("bos_token_id", "a", "token"),
        ("labels", ["a", 1], "list of names"),
        ("task", "chess", "task: "),
        ("residual_scale", -1, "positive number"),
        ("sampling", {"magic": 1}, "table of sampling defaults by option"),
        ("sentence", {"modules": [{"type": "Magic", "config": {}}]}, "record of modules"),
        ("source", {"adapters": [1]}, "source, which has a format and a path"),
    ],
)
def test_invalid_values_are_named(key: str, value: Any, expected: str) -> None:
    with pytest.raises(WeftError) as e:
        check_metadata(graph(**{key: value}), "model.weft")
    assert str(e.value).startswith(f"model.weft: meta {key} = ") and f"is not a {expected}" in str(e.value)
