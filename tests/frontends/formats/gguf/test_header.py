"""The GGUF header, byte by byte: values, arrays, shapes, offsets, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from weft.frontends.formats.gguf.header import list_dtypes, name_ggml_type, read_header
from weft.ir import WeftError
from weft.ir.types import dtypes

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write(path: Path, keys: list[bytes], tensors: Sequence[bytes] = (), data: bytes = b"", version: int = 3) -> Path:
    """Write a file with these entries; the data begin at the next multiple of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_metadata_and_tensors(tmp_path: Path) -> None:
    keys = [
        text("a.count") + struct.pack("<II", U32, 7),
        text("a.names") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("x") + text("é"),
        text("a.floats") + struct.pack("<IIQ2f", ARRAY, 6, 2, 0.5, 2.0),
    ]
    header = read_header(write(tmp_path / "m.gguf", keys, [tensor("w", (4, 2), 0, 0)], bytes(32)))
    assert header.version == 3
    assert header.metadata == {"a.count": 7, "a.names": ["x", "é"], "a.floats": [0.5, 2.0]}
    entry = header.tensors["w"]
    assert (entry.shape, entry.dtype, entry.nbytes) == ((2, 4), dtypes.f32, 32)  # innermost axis last
    assert entry.offset % 32 == 0


@pytest.mark.parametrize(
    ("keys", "tensors", "version", "message"),
    [
        ([], [], 1, "has GGUF version 1; supported are 2 and 3"),
        ([], [], 1 << 24, "is a big-endian GGUF file"),
        ([text("a") + struct.pack("<II", U32, 7)] * 2, [], 3, "metadata key a appears twice"),
        ([text("general.alignment") + struct.pack("<II", U32, 24)], [], 3, "general.alignment=24 is not a power"),
        ([text("a") + struct.pack("<I", 99)], [], 3, "metadata a has the unknown value type 99"),
        ([], [tensor("w", (1,) * 5, 0, 0)], 3, "tensor w has 5 axes, more than 4"),
        ([], [tensor("w", (8,), 0, 4)], 3, "offset 4 of tensor w is not a multiple of alignment 32"),
        ([], [tensor("w", (8, 9), 0, 0)], 3, "is truncated: tensor w ends at byte"),
        ([], [tensor("w", (8,), 8, 0)], 3, "rows of 8 elements, but Q8_0 needs a multiple of 32"),
        ([], [tensor("w", (8,), 999, 0)], 3, "has tensor w of type 999, which is not supported"),
    ],
)
def test_refusals(keys: list[bytes], tensors: list[bytes], version: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", keys, tensors, bytes(32), version)
    with pytest.raises(WeftError) as e:
        read_header(path)
    assert str(e.value).startswith(str(path)) and message in str(e.value)


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    for path, message in (
        (tmp_path / "x", "is not a GGUF file"),
        (tmp_path, "is a folder"),
        (tmp_path / "y", "does not exist"),
    ):
        with pytest.raises(WeftError, match=message):
            read_header(path)


def test_ggml_types_have_their_numbers() -> None:
    assert list_dtypes()[0] is dtypes.f32 and list_dtypes()[8] is dtypes.parse("q8_0")
    assert (name_ggml_type(8), name_ggml_type(999)) == ("Q8_0", "999")
