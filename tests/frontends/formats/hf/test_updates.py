"""Recipes of updated weights, against numpy: scales, stacks of experts, replaced rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends.formats.hf.adapter import Adapter, Tokens, Update
from weft.frontends.formats.hf.safetensors import SafetensorsFile
from weft.frontends.formats.hf.updates import (
    find_transposed_keys,
    replace_rows,
    scale_by,
    stack_expert_updates,
    transpose_matrix,
)
from weft.ir import MemoryReader
from weft.ir.recipes import Add, Permute, Source

W = Source("w")


def test_factor_one_changes_nothing() -> None:
    assert scale_by(W, 1) is W
    np.testing.assert_array_equal(scale_by(W, 2.0).evaluate(MemoryReader({"w": np.ones(3)})), [2, 2, 2])


def test_transposed_weights_are_found_below_other_steps() -> None:
    assert list(find_transposed_keys(W)) == []
    assert list(find_transposed_keys(transpose_matrix(W))) == ["w"]
    assert list(find_transposed_keys(Add((transpose_matrix(W), Source("v"))))) == ["w"]
    assert list(find_transposed_keys(Permute(transpose_matrix(W), (1, 0)))) == []


@pytest.mark.parametrize("indices", [(0, 1), (4, 2), (2, 3, 0), (0, 1, 2, 3, 4)])
def test_rows_are_replaced_in_the_order_of_their_tokens(indices: tuple[int, ...]) -> None:
    table, rows = np.zeros((5, 3)), 1 + np.arange(3.0 * len(indices)).reshape(-1, 3)
    recipe = replace_rows(Source("t"), 5, Tokens("r", indices), Source("r"))
    wanted = table.copy()
    wanted[list(indices)] = rows
    np.testing.assert_array_equal(recipe.evaluate(MemoryReader({"t": table, "r": rows})), wanted)


@pytest.mark.parametrize("transpose", [False, True])
def test_experts_are_outer_rows_of_a_and_inner_columns_of_b(transpose: bool, tmp_path: Path) -> None:
    rng, experts, rank = np.random.default_rng(0), 3, 2
    a, b = rng.standard_normal((experts * rank, 4), np.float32), rng.standard_normal((5, rank * experts), np.float32)
    save_file({"a": a, "b": b}, tmp_path / "adapter_model.safetensors")
    adapter = Adapter(tmp_path, 0, {}, SafetensorsFile(tmp_path / "adapter_model.safetensors"))
    recipe = stack_expert_updates(Update("a", "b", scale=0.5, rank=rank, stacked=True), adapter, transpose)
    wanted = np.stack([0.5 * b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)])
    found = recipe.evaluate(MemoryReader({"adapter0:a": a, "adapter0:b": b}))
    np.testing.assert_allclose(found, wanted.swapaxes(1, 2) if transpose else wanted, rtol=1e-5, atol=1e-6)
