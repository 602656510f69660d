"""Files of safetensors written block by block, read by the reference library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from weft.backends.safetensors import (
    DTYPES,
    INDEX,
    Tensor,
    count_written,
    encode_blocks,
    parse_stored,
    write_file,
    write_shards,
)
from weft.ir import WeftError
from weft.ir.types import dtypes


def tensor(values: np.ndarray, dtype: dtypes.DType = dtypes.f32) -> Tensor:
    """Return a tensor that yields its rows one by one."""

    def blocks() -> Iterator[np.ndarray]:
        yield from values[:, None] if values.ndim > 1 else [values]

    return Tensor(values.shape, dtype, blocks)


def test_library_reads_the_values_in_the_dtype_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    full, half = rng.standard_normal((3, 5)), rng.standard_normal(7)
    path = tmp_path / "model.safetensors"
    write_file(path, {"full": tensor(full), "half": tensor(half, dtypes.f16), "none": tensor(np.empty(0))})
    stored = load_file(path)
    np.testing.assert_array_equal(stored["full"], full.astype(np.float32))
    np.testing.assert_array_equal(stored["half"], half.astype(np.float16))
    assert stored["none"].shape == (0,)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # tensors are aligned


def test_shards_are_as_large_as_allowed_and_indexed(tmp_path: Path) -> None:
    tensors = {name: tensor(np.full(n, n)) for name, n in {"a": 2, "b": 2, "c": 9, "d": 1}.items()}  # 4 bytes each
    steps: list[int] = []
    write_shards(tmp_path, tensors, 16, steps.append)
    home = {"a": 1, "b": 1, "c": 2, "d": 3}  # c alone exceeds the limit
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {key: f"model-{at:05}-of-00003.safetensors" for key, at in home.items()}
    assert index["metadata"] == {"total_size": sum(steps)} == {"total_size": 14 * 4}
    for key, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[key], next(iter(tensors[key].blocks())))


@pytest.mark.parametrize(("limit", "files"), [(16, 1), (15, 2), (1, 2)])
def test_shard_may_be_filled_to_the_limit(limit: int, files: int, tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": tensor(np.ones(2)), "b": tensor(np.ones(2))}, limit)
    assert len(list(tmp_path.glob("*.safetensors"))) == files


def test_one_file_has_no_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": tensor(np.ones(4))})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_progress_adds_up_to_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    tensors = {"a": tensor(np.ones((2, 3))), "b": tensor(np.ones(1), dtypes.bf16)}
    reports: list[tuple[str, int, int]] = []
    write_shards(tmp_path, tensors, step=count_written(lambda *report: reports.append(report), tensors))
    assert reports == [("weights", done, 26) for done in (12, 24, 26)]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_that_a_dtype_lacks_are_refused_by_name(value: float) -> None:
    with pytest.raises(WeftError, match="embed"):
        list(encode_blocks("embed", tensor(np.array([1.0, value]), dtypes.f16)))


def test_checkpoints_are_written_in_three_dtypes() -> None:
    assert [parse_stored(name) for name in ("f32", "f16", "bf16")] == [dtypes.f32, dtypes.f16, dtypes.bf16]
    with pytest.raises(WeftError, match="a checkpoint cannot be written in i8; choose f32, f16, bf16"):
        parse_stored("i8")


def test_names_of_dtypes_are_those_of_the_format() -> None:
    names = {"F32": dtypes.f32, "BF16": dtypes.bf16, "F8_E4M3": dtypes.f8e4m3, "U8": dtypes.u8, "I64": dtypes.i64}
    assert {name: DTYPES[name] for name in names} == names
    assert dtypes.i4 not in DTYPES.values()
