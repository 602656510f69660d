"""Readers of tensors in memory, in a temporary file, and of adapters that are switched."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from weft.ir.errors import WeftError
from weft.ir.recipes import combinators as r
from weft.ir.recipes.readers import MemoryReader, SpilledTensors, SwitchedTensors, find_switched_tensors
from weft.ir.types import dtypes

RNG = np.random.default_rng(7)
A = RNG.standard_normal((12, 5)).astype(np.float32)
B = RNG.standard_normal((8, 5)).astype(np.float32)
READER = MemoryReader({"a": A, "b": B, "half": A.astype(np.float16), "wide": A.astype(np.float64), "ids": np.arange(9)})


def test_memory_reader_widens_small_floats_only() -> None:
    for key, dtype in (("half", np.float32), ("wide", np.float64), ("ids", np.int64)):
        assert READER.read(key, 2, 4).dtype == dtype
    np.testing.assert_array_equal(READER.read("a", 2, 4), A[2:4])
    assert (READER.shape("b"), READER.dtype("half")) == ((8, 5), dtypes.f16)
    with pytest.raises(WeftError, match="<memory> has no tensor 'c'"):
        READER.shape("c")


def test_spilled_tensors_add_computed_tensors() -> None:
    spilled = SpilledTensors(READER)
    spilled.put("new", A.astype(np.float64))
    spilled.put("number", np.array(2.5, np.float32))
    spilled.put("b", B + 1)
    np.testing.assert_array_equal(r.Slice(r.Source("new"), 0, 2, 9).evaluate(spilled), A[2:9].astype(np.float64))
    np.testing.assert_array_equal(r.Source("b").evaluate(spilled), B + 1)
    np.testing.assert_array_equal(r.Source("a").evaluate(spilled), A)
    assert r.Source("number").evaluate(spilled) == 2.5
    assert (spilled.dtype("new"), spilled.dtype("half")) == (dtypes.f64, dtypes.f16)
    assert spilled.computed_keys == ("new", "number", "b")
    assert set(spilled.keys()) == {*READER.keys(), "new", "number"}


def test_spilled_tensors_need_a_temporary_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(WeftError, match=r"cannot create a temporary file in .*: No such file"):
        SpilledTensors(READER)


def test_unique_key_appends_the_first_free_number() -> None:
    spilled = SpilledTensors.wrap(READER)
    assert SpilledTensors.wrap(spilled) is spilled
    assert spilled.unique_key("new") == "new"
    spilled.put("a.2", A)
    assert spilled.unique_key("a") == "a.3"


def test_switched_tensors_are_zero_unless_selected() -> None:
    factors = np.ones((3, 2), np.float32)
    switched = SwitchedTensors(READER, {"down": (3, 2), "up": (4, 3)}, {"poet": {"down": factors}})
    assert not switched.read("down", 0, 3).any()
    with switched.select("poet"):
        np.testing.assert_array_equal(switched.read("down", 1, 3), factors[1:3])
        assert switched.read("up", 1, 3).shape == (2, 3) and not switched.read("up", 1, 3).any()
    assert not switched.read("down", 0, 3).any()
    np.testing.assert_array_equal(switched.read("a", 0, 2), A[:2])
    assert (switched.shape("up"), switched.dtype("up"), switched.dtype("half")) == ((4, 3), dtypes.f32, dtypes.f16)
    assert switched.reads_slots(["a", "up"]) and not switched.reads_slots(["a"])
    assert find_switched_tensors(SpilledTensors(switched)) is switched
    assert find_switched_tensors(SpilledTensors(READER)) is None
