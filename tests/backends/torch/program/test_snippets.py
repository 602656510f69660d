"""Snippets that generated sources copy: names that they use, imports, and files of kernels."""

from __future__ import annotations

import ast

from weft.backends.torch.program.snippets import (
    Snippet,
    find_bound_names,
    find_names,
    list_kernel_modules,
    read_library,
    select_snippets,
    write_imports,
)


def test_names_include_string_annotations() -> None:
    tree = ast.parse("def f(a: 'Tensor', b=len):\n    c = a + d.e\n    return 'two words'")
    assert find_names(tree) == {"Tensor", "len", "c", "a", "d"}
    assert find_bound_names(tree) == {"a", "b", "c"}


def test_snippets_are_selected_with_all_that_they_use_in_library_order() -> None:
    known = {
        "a": Snippet("a", "a", frozenset({"b", "torch"})),
        "b": Snippet("b", "b", frozenset({"a"})),
        "c": Snippet("c", "c", frozenset()),
        "d": Snippet("d", "d", frozenset({"c"})),
    }
    assert [s.name for s in select_snippets({"d", "unknown"}, known)] == ["c", "d"]
    assert [s.name for s in select_snippets(["b"], known)] == ["a", "b"]
    assert select_snippets([], known) == []


def test_library_has_complete_sources() -> None:
    rotate = read_library()["rotate"]
    assert rotate.source.startswith("def rotate(x: Tensor") and ast.parse(rotate.source)
    assert "torch" in rotate.uses and "cos" not in rotate.uses


def test_imports_are_grouped_and_sorted() -> None:
    used = {"torch", "Tensor", "math", "partial", "Any", "unknown", "norm_linear", "choose_tokens"}
    assert write_imports(used, "kernels") == [
        "import math",
        "from functools import partial",
        "from typing import Any",
        "",
        "import torch",
        "from kernels.choose_tokens import choose_tokens",
        "from kernels.norm_linear import norm_linear",
        "from torch import Tensor, nn",
    ]
    assert write_imports({"norm_linear"}) == write_imports(()) == []


def test_kernel_modules_are_listed_once() -> None:
    assert list_kernel_modules(["Codes", "dequantize", "refusal", "torch"]) == [
        "shared.launch",
        "shared.quantized_gemv",
    ]
