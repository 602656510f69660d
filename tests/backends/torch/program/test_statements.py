"""Statements and their operands: paths of scopes, and identity of values."""

from __future__ import annotations

import pytest

from weft.backends.torch.program.statements import ParamRef, Var, is_inside, relative_to


@pytest.mark.parametrize(
    ("path", "scope", "inside"),
    [("a.b", "a", True), ("a", "a", False), ("ab.c", "a", False), ("a.b", "", True), ("", "", True)],
)
def test_paths_are_inside_a_scope_if_they_are_below_it(path: str, scope: str, inside: bool) -> None:
    assert is_inside(path, scope) is inside


def test_paths_are_relative_to_their_scope() -> None:
    assert relative_to("layers.0.attn.q", "layers.0") == "attn.q"
    assert relative_to("embed", "") == "embed"


def test_variables_are_compared_by_identity_and_weights_by_path() -> None:
    assert Var("x") != Var("x")
    assert ParamRef("w", (2,)) == ParamRef("w", (2,)) != ParamRef("w", (2,), constant=True)
