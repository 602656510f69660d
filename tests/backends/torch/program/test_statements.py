"""Statements and their operands: paths of scopes, and identity of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.lib import positions
from weft.backends.torch.program.statements import (
    ParamRef,
    Var,
    get_stored_dtype,
    is_inside,
    relative_to,
    write_formula,
)
from weft.ir import Graph, TensorType
from weft.ir.recipes import Literal, Normal
from weft.ir.recipes.frequencies import AlibiSlopes, RopeFrequencies
from weft.ir.recipes.readers import MemoryReader
from weft.ir.recipes.recipe import Recipe
from weft.ir.types import dtypes


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


SCALED: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"factor": 4.0},
    "ntk": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq": 1.0, "high_freq": 4.0, "original": 64},
    "yarn": {"factor": 4.0, "original": 64},
}
RECIPES: list[Recipe] = [RopeFrequencies(scaling=kind, dim=16, **more) for kind, more in SCALED.items()]


@pytest.mark.parametrize("recipe", [*RECIPES, AlibiSlopes(6), AlibiSlopes(8, 4.0)], ids=str)
def test_formula_computes_the_table(recipe: Recipe) -> None:
    text = write_formula(recipe)
    assert text is not None
    table = eval(text.format("x"), vars(positions) | {"x": torch.empty(0)})
    np.testing.assert_allclose(table.numpy(), recipe.evaluate(MemoryReader({})), rtol=1e-5)


def test_other_tables_have_no_formula() -> None:
    assert write_formula(Literal((1.0, 2.0), (2,))) is None
    assert write_formula(RopeFrequencies(scaling="yarn", dim=16, factor=4.0, original=64, truncate=False)) is None


def test_weights_have_the_dtype_of_the_model_and_tables_their_own() -> None:
    graph = Graph("dtypes")
    f32, i64 = (TensorType(kind, (2,)) for kind in (dtypes.f32, dtypes.i64))
    weight = graph.add_param("w", f32, Normal((2,), 0.5, "w"))
    table = graph.add_param("t", f32, Literal((1.0, 2.0), (2,)))
    indices = graph.add_param("i", i64, Literal((1.0, 2.0), (2,)))
    assert [get_stored_dtype(p, dtypes.bf16) for p in (weight, table, indices)] == [dtypes.bf16, dtypes.f32, dtypes.i64]
