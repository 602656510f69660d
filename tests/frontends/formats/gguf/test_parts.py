"""GGUF files in several parts are one model, whichever is named; a part that is missing or another model's is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

import weft
from weft.frontends import load_source
from weft.frontends.formats.gguf import GGUFTensors
from weft.ir import WeftError

from ...command import done, refused

COUNT = 3


def rewrite(source: Path, out: Path, part: int | None = None, changes: dict[str, Any] | None = None) -> Path:
    """Write the file `source` again, with some `changes` of its keys; as `part` of `COUNT`, with a third of the
    tensors, as llama-gguf-split does."""
    reader, writer = GGUFReader(source), GGUFWriter(out, "llama")
    changes = changes or {}
    for key, field in reader.fields.items() if not part else ():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *changes):
            array = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=array)
    for key, value in changes.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    tensors = reader.tensors
    if part is not None:
        split = {"split.no": part, "split.count": COUNT, "split.tensors.count": len(tensors)}
        for key, value in split.items():
            if key not in changes:
                writer.add_uint16(key, value)
        tensors = tensors[part::COUNT]
    for t in tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def name(folder: Path, part: int) -> Path:
    return folder / f"m-{part + 1:05}-of-{COUNT:05}.gguf"


@pytest.fixture
def whole(save: Any, tmp_path: Path) -> Path:
    weft.export(save("llama", num_key_value_heads=2)[1], tmp_path / "whole.gguf")
    return tmp_path / "whole.gguf"


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    for part in range(COUNT):
        rewrite(whole, name(tmp_path / "parts", part), part)
    return tmp_path / "parts"


@pytest.mark.parametrize("part", range(COUNT))
def test_any_part_loads_the_complete_model(part: int, whole: Path, parts: Path, tmp_path: Path) -> None:
    reader, wanted = GGUFTensors(name(parts, part)), GGUFTensors(whole)
    assert set(reader.keys()) == set(wanted.keys())
    for key in list(wanted.keys()):
        rows = wanted.shape(key)[0]
        assert np.array_equal(reader.read(key, 0, rows), wanted.read(key, 0, rows))
    assert load_source(name(parts, part)).files == tuple(name(parts, i) for i in range(COUNT))
    done("opt", name(parts, part), "-o", tmp_path / "out")


def test_a_missing_part_is_named(parts: Path) -> None:
    name(parts, 1).unlink()
    for part in (0, 2):
        assert "is one of 3 parts, and m-00002-of-00003.gguf is missing: fetch it too" in refused(
            "inspect", name(parts, part)
        )


def test_parts_with_other_names_are_refused(parts: Path) -> None:
    name(parts, 0).rename(parts / "model.gguf")
    assert "of 3 parts: name the parts NAME-00001-of-00003.gguf" in refused("inspect", parts / "model.gguf")


def test_parts_of_several_models(whole: Path, parts: Path, tmp_path: Path) -> None:
    good = name(parts, 1).read_bytes()
    shutil.copy(name(parts, 2), name(parts, 1))
    with pytest.raises(WeftError, match=r"00002-of-00003\.gguf has split.no 2 of split.count 3, not 1 of 3"):
        load_source(name(parts, 0))
    rewrite(whole, name(parts, 1), 0, {"split.no": 1})
    with pytest.raises(WeftError, match=r"00002-of-00003\.gguf and .*00001-of-00003\.gguf both have the tensor"):
        load_source(name(parts, 0))
    name(parts, 1).write_bytes(good)
    rewrite(whole, name(parts, 0), 0, {"split.tensors.count": 999})
    with pytest.raises(WeftError, match="tensors instead of 999"):
        load_source(name(parts, 0))


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_lists_of_one_value_for_all_layers(key: str, whole: Path, tmp_path: Path) -> None:
    value = GGUFTensors(whole).metadata[f"llama.{key}"]
    changed = rewrite(whole, tmp_path / "lists.gguf", None, {f"llama.{key}": [value] * 3})
    graphs = [load_source(path).graph for path in (changed, whole)]
    for graph in graphs:
        del graph.meta["source"]
    assert str(graphs[0]) == str(graphs[1])
    changed = rewrite(whole, tmp_path / "differing.gguf", None, {f"llama.{key}": [value, value, value // 2]})
    assert key.rpartition(".")[2] in refused("inspect", changed) or "layers.2.ffn" in refused("inspect", changed)
