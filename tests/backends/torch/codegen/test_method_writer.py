"""Lines of generated methods: names of the hidden state, and short lists."""

from __future__ import annotations

import re

import pytest

from weft.backends.torch.codegen.method_writer import write_attribute, write_periodic_list
from weft.backends.torch.codegen.model_source import write_source

from ....lowered import lower
from ..generated import graph_of


@pytest.mark.parametrize("name", ["family/gpt2-tied", "family/gemma2", "family/bert", "family/opt", "family/bloom"])
def test_hidden_state_is_called_x(name: str) -> None:
    assert re.search(r"\n +x = run\(x, ", write_source(lower(graph_of(name))).text)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ("ab", "[a, b]"),
        ("aaaa", "[a] * 4"),
        ("ababa", "[a, b] * 2 + [a]"),
        ("aaabbbb", "[a] * 3 + [b] * 4"),
        ("aaaab", "[a] * 4 + [b]"),
        ("abcab", "[a, b, c, a, b]"),
    ],
)
def test_periodic_lists_are_written_as_products(texts: str, wanted: str) -> None:
    assert write_periodic_list([*texts]) == wanted
    assert eval(write_periodic_list([*texts]), {c: c for c in texts}) == [*texts]


def test_paths_are_accessed_by_attribute_and_index() -> None:
    assert write_attribute("module", "layers.0.attn.norm") == "module.layers[0].attn.norm"
    assert write_attribute("module", "") == "module"
