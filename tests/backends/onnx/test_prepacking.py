"""Weights packed at compile time: mapped by ONNX Runtime if they fit the CPU, ignored if not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import weft
from weft.ir import WeftError

from .small_decoder import decoder


def packed_entries(folder: Path) -> list[tuple[str, int, int]]:
    """Return (tensor, offset, length) of every prepacked block."""
    found = []
    for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked_"):
                offset, length, *_ = entry.value.rsplit("|", 1)[1].split(";")
                found.append((tensor.name, int(offset), int(length)))
    return found


def test_prepacked_weights_are_stored_and_used(tmp_path: Path) -> None:
    model, ids = decoder(dim=1024), [5, 9, 2, 77, 31]
    weft.compile(model, tmp_path / "plain")
    weft.compile(model, tmp_path / "packed", prepack=True)
    assert packed_entries(tmp_path / "plain") == []
    entries = packed_entries(tmp_path / "packed")
    assert {name for name, *_ in entries} >= {"layers.0.attn.qkv.weight", "layers.1.ffn.down.weight", "embed.weight"}
    assert any(length >= 2 << 20 for *_, length in entries)
    assert all(offset % (2 << 20 if length >= 2 << 20 else 4096) == 0 for _, offset, length in entries)
    want = weft.load(tmp_path / "plain").logits(ids)
    np.testing.assert_array_equal(weft.load(tmp_path / "packed").logits(ids), want)
    assert sorted(p.name for p in (tmp_path / "packed").iterdir()) == sorted(
        p.name for p in (tmp_path / "plain").iterdir()
    )
    _, offset, length = next(e for e in entries if e[0] == "layers.0.attn.qkv.weight")
    with (tmp_path / "packed" / "model.onnx.data").open("r+b") as file:
        file.seek(offset)
        file.write(bytes(length))
    if tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32):  # it compares what its kernels pack
        with pytest.raises(WeftError, match="that --prepack stored are damaged: compile again"):
            weft.load(tmp_path / "packed")
    else:
        assert np.abs(weft.load(tmp_path / "packed").logits(ids) - want).max() > 1e-3


def test_prepacking_for_another_cpu_is_ignored(tmp_path: Path) -> None:
    """Its hash differs from what the kernels pack here; then they keep their own, whatever the file holds."""
    ids = [5, 9, 2, 77, 31]
    weft.compile(decoder(dim=256), tmp_path / "out", prepack=True)
    want = weft.load(tmp_path / "out").logits(ids)
    path = tmp_path / "out" / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked_"):
                kernel, _, where = entry.value.replace("|", "+", 1).split("+", 2)
                entry.value = f"{kernel}+1234567890|{where}"
    onnx.save(proto, path)
    for _, offset, length in packed_entries(tmp_path / "out"):
        with (tmp_path / "out" / "model.onnx.data").open("r+b") as file:
            file.seek(offset)
            file.write(bytes(length))
    np.testing.assert_array_equal(weft.load(tmp_path / "out").logits(ids), want)


def test_failed_prepacking_is_reported_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ort.capi.onnxruntime_pybind11_state.Fail("write failed:\nNo space left on device")

    monkeypatch.setattr(ort, "InferenceSession", full)
    with pytest.raises(WeftError, match=r"could not pack the weights .*No space left.*disk space"):
        weft.compile(decoder(), tmp_path / "out", prepack=True)
    assert list(tmp_path.iterdir()) == []


def test_small_weights_are_not_prepacked(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="--prepack has no effect here, so leave it out: ONNX Runtime packs none"):
        weft.compile(decoder(dim=8), tmp_path / "out", prepack=True)
    assert list(tmp_path.iterdir()) == []


def test_prepack_supports_ort_cpu_only(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="--prepack is an option of target ort-cpu only"):
        weft.compile(decoder(), tmp_path / "out", target="onnx", prepack=True)
