"""Specs of KV caches and of states of constant size."""

from __future__ import annotations

import pytest

from weft.ir.schema.states import Growth, StateKind, build_fixed_size_spec, list_cache_specs, list_cross_specs
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import sym

K, V = TensorType(dtypes.bf16, (sym("batch"), sym("seq"), 24)), TensorType(dtypes.bf16, (sym("batch"), sym("seq"), 12))


def test_cache_specs_have_heads_and_slots() -> None:
    key, value = list_cache_specs(K, V, None, heads=3)
    assert (str(key.type), str(value.type)) == ("bf16[batch, 3, capacity, 8]", "bf16[batch, 3, capacity, 4]")
    assert (key.past_operand, key.present_output, value.past_operand) == ("past_k", "present_k", "past_v")
    assert (key.kind, key.growth, key.slots) == (StateKind.KV, Growth.TEXT, 2)
    assert key.row_shape == (3, sym("capacity"), 8) and key.slot_shape == (3, 8)


def test_capacity_is_that_of_the_past_and_codes_are_integers() -> None:
    past = TensorType(dtypes.i8, (sym("batch"), 3, 77, 8))
    (latent,) = list_cache_specs(K, None, past, heads=3, rolling=True, window=64, bits=4)
    assert str(latent.type) == "i4[batch, 3, 77, 8]"
    assert (latent.kind, latent.growth, latent.window) == (StateKind.LATENT, Growth.WINDOW, 64)


@pytest.mark.parametrize(("kind", "dtype"), [(StateKind.SSM, "f32"), (StateKind.CONV, "bf16")])
def test_states_that_accumulate_are_f32(kind: StateKind, dtype: str) -> None:
    spec = build_fixed_size_spec(kind, K, 4, 5, suffix="_b")
    assert str(spec.type) == f"{dtype}[batch, 4, 5]" and spec.part == kind.value
    assert (spec.past_operand, spec.present_output, spec.growth) == ("past_b", "present_b", Growth.CONSTANT)


def test_cross_specs_are_only_read() -> None:
    key, value = list_cross_specs(K, V)
    assert (key.past_operand, value.past_operand, key.present_output) == ("k", "v", "")
    assert [s.part for s in list_cross_specs(K, None)] == ["key"]
    assert key.slot_shape == (24,)
    assert [g for g in Growth if g.can_rewind] == [Growth.TEXT, Growth.APPEND, Growth.SOURCE]
