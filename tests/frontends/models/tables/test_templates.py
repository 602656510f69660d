"""Templates of parameters stored in another layout, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import MoE
from weft.frontends.models.tables import templates as t
from weft.frontends.models.tables.family import Fetch, Template
from weft.frontends.models.tables.settings import Settings
from weft.ir import MemoryReader
from weft.ir.recipes import Source

SETTINGS = Settings(11, 8, 2, heads=4, ffn=6, kv_heads=2)  # heads of 2 features


def value(template: Template, tensors: dict[str, Any], part: str = "weight", **changes: Any) -> np.ndarray:
    settings = Settings(**vars(SETTINGS) | changes)
    recipe = template(Fetch(frozenset(tensors), "", {}, "0"), part, settings)
    return np.asarray(recipe.evaluate(MemoryReader({k: np.asarray(x, np.float32) for k, x in tensors.items()})))


def counting(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_transposed_weights_and_plain_biases() -> None:
    stored = {"w.weight": counting(2, 3), "w.bias": counting(3)}
    np.testing.assert_array_equal(value(t.transpose_linear("w"), stored), counting(2, 3).T)
    np.testing.assert_array_equal(value(t.transpose_linear("w"), stored, "bias"), counting(3))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_fused_queries_keys_and_values(part: str) -> None:
    rows = counting(16, 8) if part == "weight" else counting(16)
    plain = np.split(rows, [8, 12])
    # Grouped: for each of two key/value heads two queries, a key, a value.
    by_group = rows.reshape(2, 4, 2, *rows.shape[1:])
    grouped = [by_group[:, :2], by_group[:, 2], by_group[:, 3]]
    for i, which in enumerate("qkv"):
        np.testing.assert_array_equal(value(t.slice_qkv("w", which), {f"w.{part}": rows}, part), plain[i])
        found = value(t.slice_qkv("w", which, grouped=True), {f"w.{part}": rows}, part)
        np.testing.assert_array_equal(found, grouped[i].reshape(-1, *rows.shape[1:]))
    assert set(t.split_qkv("attn", "w")) == {"attn.q", "attn.k", "attn.v"}


def test_halves_of_gate_and_up() -> None:
    for i in range(2):
        np.testing.assert_array_equal(
            value(t.slice_half("w", i), {"w.weight": counting(12, 8)}), np.split(counting(12, 8), 2)[i]
        )
    assert t.name_gated_mlp("ffn", "mlp")["ffn.up"] == "mlp.up_proj"


def test_norm_weights_stored_minus_one() -> None:
    stored = {"n.weight": counting(8), "n.bias": counting(8)}
    np.testing.assert_array_equal(value(t.add_one("n"), stored), counting(8) + 1)
    np.testing.assert_array_equal(value(t.add_one("n"), stored, "bias"), counting(8))


def test_halves_of_heads_are_swapped() -> None:
    found = value(t.swap_halves("k", of_keys=True), {"k.weight": counting(4, 8)})
    np.testing.assert_array_equal(found, counting(4, 8)[[1, 0, 3, 2]])


def test_names_by_arrangement() -> None:
    template = t.pick_by_arrangement(pre="a", parallel="b")
    np.testing.assert_array_equal(value(template, {"b.weight": counting(2)}, arrangement="parallel"), counting(2))


def test_norms_of_heads() -> None:
    np.testing.assert_array_equal(value(t.flatten_heads("n"), {"n.weight": counting(4, 2)}), counting(8))
    heads = {f"n.{h}.weight": np.full(2, h) for h in range(4)}
    np.testing.assert_array_equal(value(t.concat_heads("n.{h}"), heads), [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(value(t.concat_heads("n.{h}", of_keys=True), heads), [0, 0, 1, 1])


def test_block_diagonal_matrices() -> None:
    recipe = t.build_block_diagonal([Source("a"), Source("b"), Source("c")], 1, 2)
    reader = MemoryReader({name: np.full((1, 2), i + 1.0, np.float32) for i, name in enumerate("abc")})
    np.testing.assert_array_equal(recipe.evaluate(reader), [[1, 1, 0, 0, 0, 0], [0, 0, 2, 2, 0, 0], [0, 0, 0, 0, 3, 3]])
    assert t.build_block_diagonal([Source("a")], 1, 2) == Source("a")


def test_multipliers_of_weights_and_biases() -> None:
    stored, factors = {"w.weight": counting(2, 2), "w.bias": counting(2)}, {"a": 2.0, "b": 3.0}
    template = t.scale_linear("w", "a", "b", bias=("b",))
    np.testing.assert_array_equal(value(template, stored, multipliers=factors), counting(2, 2) * 6)
    np.testing.assert_array_equal(value(template, stored, "bias", multipliers=factors), counting(2) * 3)


def test_experts_are_those_of_the_first_layer_that_has_some() -> None:
    moe = MoE(2, 3, 1)
    stored = {"w": counting(2, 6, 8)}
    np.testing.assert_array_equal(value(t.slice_expert_half("w", 1), stored, moe=(None, moe)), counting(2, 6, 8)[:, 3:])
    assert t.find_experts(Settings(**vars(SETTINGS) | {"moe": (None, moe)})) is moe
