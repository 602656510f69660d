"""GGUF files as readers: every tensor type, rows only, and each way a file can be wrong."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from weft.frontends.formats.gguf import GGUFTensors
from weft.frontends.formats.gguf.header import list_dtypes
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader
from weft.ir.types import dtypes

SHAPE = (7, 3, 512)
DENSE = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
INTEGERS = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}


def write(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], Type]], **metadata: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), *value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=None if kind.name in {**DENSE, **INTEGERS} else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(kind: Type, rng: np.random.Generator, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    """Random storage of a tensor of `shape`: its numbers, or blocks whose bytes keep every float16 in them finite."""
    if kind.name in INTEGERS:
        return rng.integers(-100, 100, shape).astype(INTEGERS[kind.name])
    if kind.name in DENSE:
        return rng.standard_normal(shape).astype(DENSE[kind.name])
    row = list_dtypes()[kind.value].bytes_for(shape[-1])
    return rng.integers(0, 0x60, (*shape[:-1], row)).astype(np.uint8)


@pytest.mark.parametrize("kind", [Type(number) for number in list_dtypes()], ids=lambda kind: kind.name)
def test_rows_of_every_type_equal_a_whole_dequantization(kind: Type, tmp_path: Path, rng: np.random.Generator) -> None:
    raw = stored(kind, rng)
    reader = GGUFTensors(write(tmp_path / "a.gguf", {"before": (raw[:1], kind), "w": (raw, kind)}))
    dense = kind.name in {**DENSE, **INTEGERS}
    whole = raw.astype(np.float32) if kind.name in DENSE else raw if dense else dequantize(raw, kind)
    assert reader.dtype("w") is dtypes.parse(kind.name.lower())
    assert reader.shape("w") == SHAPE
    for start, stop in [(0, 7), (0, 1), (3, 5), (6, 7), (4, 4)]:
        got = reader.read("w", start, stop)
        np.testing.assert_array_equal(got, whole[start:stop], strict=True)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_vectors_may_be_cut_inside_a_block(kind: Type, tmp_path: Path, rng: np.random.Generator) -> None:
    raw = stored(kind, rng, (1024,))
    reader = GGUFTensors(write(tmp_path / "a.gguf", {"v": (raw, kind)}))
    whole = reader.read("v", 0, 1024)
    for start, stop in [(0, 1), (31, 33), (255, 700), (1023, 1024), (5, 5)]:
        np.testing.assert_array_equal(reader.read("v", start, stop), whole[start:stop], strict=True)


@pytest.mark.parametrize(("kind", "levels"), [(Type.Q8_0, 127), (Type.Q4_0, 8), (Type.Q4_1, 15), (Type.Q5_1, 31)])
def test_quantized_values_are_near_the_originals(
    kind: Type, levels: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    values = rng.standard_normal((16, 256)).astype(np.float32)
    reader = GGUFTensors(write(tmp_path / "a.gguf", {"w": (quantize(values, kind), kind)}))
    blocks = values.reshape(16, -1, 32)
    affine = kind in (Type.Q4_1, Type.Q5_1)
    spread = np.ptp(blocks, axis=-1) if affine else np.abs(blocks).max(axis=-1)
    step = spread / levels
    # Half a step, and the float16 rounding of the scale (times `levels`) and of the minimum. The signed 4-bit range
    # ends one step before the largest value of the other sign.
    bound = step * (1.0 if kind is Type.Q4_0 else 0.5) + 2.0**-11 * (spread + np.abs(blocks).max(axis=-1))
    error = np.abs(reader.read("w", 0, 16).reshape(blocks.shape) - blocks).max(axis=-1)
    assert (error <= bound).all()


def test_blocks_are_decoded_across_chunks(tmp_path: Path, rng: np.random.Generator) -> None:
    raw = stored(Type.Q4_0, rng, (300, 1024))  # 9600 blocks: more than two chunks
    reader = GGUFTensors(write(tmp_path / "a.gguf", {"w": (raw, Type.Q4_0)}))
    np.testing.assert_array_equal(reader.read("w", 1, 300), dequantize(raw, Type.Q4_0)[1:])


def test_metadata_comes_as_plain_python(tmp_path: Path) -> None:
    from gguf import GGUFValueType as V

    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("u", 7)
    writer.add_int64("i", -(2**40))
    writer.add_float32("f", 0.5)
    writer.add_bool("b", True)
    writer.add_string("s", "naïve ▁")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("ints", [1, 2, 3])
    writer.add_key_value("flags", [True, False], V.ARRAY, sub_type=V.BOOL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFTensors(str(path))
    expected = {
        "u": 7,
        "i": -(2**40),
        "f": 0.5,
        "b": True,
        "s": "naïve ▁",
        "strings": ["a", "", "ß"],
        "ints": [1, 2, 3],
    }
    assert reader.metadata == expected | {"flags": [True, False], "general.architecture": "llama"}
    assert type(reader.metadata["b"]) is bool
    assert list(reader.keys()) == []


def test_real_file_is_read_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    ours, theirs = GGUFTensors(smollm2_gguf), GGUFReader(smollm2_gguf)
    assert isinstance(ours, TensorReader)
    assert ours.version == 3
    assert dict(ours.metadata) == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.keys()) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.shape(tensor.name) == tuple(tensor.shape[::-1].tolist())
        assert ours.dtype(tensor.name).name == tensor.tensor_type.name.lower()
        rows = ours.shape(tensor.name)[0]
        expected = dequantize(np.array(tensor.data[rows // 2 :][:3]), tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name, rows // 2, rows // 2 + 3), expected)


def test_reading_rows_takes_memory_for_rows(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    rows, width = 65536, 4096  # 1 GiB of float32, never written: the file is sparse
    head = header([("w", (rows, width), 0, 0)])
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + 4 * rows * width)
    tracemalloc.start()
    reader = GGUFTensors(path)
    total = sum(float(reader.read("w", start, start + 16).sum()) for start in range(0, rows, 8192))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 0.0
    assert peak < 16 * width * 4 * 3 + 4_000_000  # three slices, and the constants of the gguf package


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def header(
    tensors: list[tuple[str, tuple[int, ...], int, int]],
    keys: bytes = b"",
    n_keys: int = 0,
    version: int = 3,
    n_tensors: int | None = None,
) -> bytes:
    """A header built by hand, padded to where the weights begin; tensors are (name, numpy shape, type, offset)."""
    count = len(tensors) if n_tensors is None else n_tensors
    out = b"GGUF" + struct.pack("<IQQ", version, count, n_keys) + keys
    for name, shape, kind, offset in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += string(name) + dims + struct.pack("<IQ", kind, offset)
    return out + b"\0" * (-len(out) % 32)


GOOD = [("w", (4, 32), 0, 0)]
DATA = b"\0" * 512
TWICE = string("k") + struct.pack("<IB", 0, 1)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "garbage": (b"PK\x03\x04" + DATA, r"is not a GGUF file: it begins with b'PK\\x03\\x04'"),
    "only the magic": (b"GGUF", "truncated"),
    "version 1": (header(GOOD, version=1) + DATA, "has GGUF version 1; supported are 2 and 3"),
    "version 9": (header(GOOD, version=9) + DATA, "has GGUF version 9"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + DATA, "big-endian"),
    "key count": (header(GOOD, n_keys=2**60) + DATA, "truncated or damaged|unknown value type"),
    "tensor count": (header(GOOD, n_tensors=2**60), "header counts 1152921504606846976 tensors, more than 1048576"),
    "string length": (
        header(GOOD, struct.pack("<Q", 2**62), 1) + DATA,
        "metadata key 0 of 1 needs 4611686018427387904 bytes",
    ),
    "value type": (
        header(GOOD, string("k") + struct.pack("<I", 99), 1) + DATA,
        "metadata k has the unknown value type 99",
    ),
    "array length": (
        header(GOOD, string("k") + struct.pack("<IIQ", 9, 4, 2**61), 1) + DATA,
        "metadata k needs .* bytes from byte",
    ),
    "nested arrays": (
        header(GOOD, string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, 1) + DATA,
        "metadata k has the unknown value type 9",
    ),
    "not UTF-8": (header(GOOD, string("k") + struct.pack("<I", 8) + string(b"a\xff"), 1) + DATA, "not UTF-8"),
    "repeated key": (header(GOOD, TWICE * 2, 2) + DATA, "metadata key k appears twice"),
    "alignment": (
        header(GOOD, string("general.alignment") + struct.pack("<II", 4, 12), 1) + DATA,
        "general.alignment=12 is not a power of two",
    ),
    "alignment text": (
        header(GOOD, string("general.alignment") + struct.pack("<I", 8) + string("x"), 1) + DATA,
        "general.alignment='x'",
    ),
    "repeated tensor": (header(GOOD * 2) + DATA, "tensor w appears twice"),
    "too many dimensions": (header([("w", (1,) * 5, 0, 0)]) + DATA, "tensor w has 5 axes"),
    "unknown type": (header([("w", (4, 32), 4000, 0)]) + DATA, "has tensor w of type 4000"),
    "type we cannot decode": (
        header([("w", (4, 256), Type.Q8_K.value, 0)]) + DATA,
        "has tensor w of type Q8_K, which is not supported; supported are .*Q6_K",
    ),
    "part of a block": (
        header([("w", (4, 48), Type.Q4_0.value, 0)]) + DATA,
        "rows of 48 .* Q4_0 needs a multiple of 32",
    ),
    "misaligned": (header([("w", (4, 4), 0, 8)]) + DATA, "offset 8 of tensor w .* alignment 32"),
    "weights cut": (header(GOOD) + DATA[:-1], "truncated: tensor w ends at byte 608, but the file at 607"),
    "offset past the end": (header([("w", (4, 32), 0, 1 << 40)]) + DATA, "truncated: tensor w"),
    "one over the other": (
        header([("w", (4, 32), 0, 0), ("v", (4, 32), 0, 256)]) + DATA * 2,
        "tensor 'v' at byte .* overlaps tensor 'w'",
    ),
    "a gap": (header([("w", (4, 32), 0, 0), ("v", (4, 32), 0, 544)]) + DATA * 4, "32 unused bytes after tensor 'w'"),
    "absurd shape": (header([("w", (2**62, 2**62), 0, 0)]) + DATA, "truncated: tensor w"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_at_opening(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeftError, match=message) as caught:
        GGUFTensors(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"none\.gguf does not exist"):
        GGUFTensors(tmp_path / "none.gguf")
    with pytest.raises(WeftError, match="is a folder, not a GGUF file"):
        GGUFTensors(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(WeftError, match="cannot be read: Not a directory"):
        GGUFTensors(tmp_path / "file" / "a.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {kind.name: (stored(kind, rng, (2, 256)), kind) for kind in (Type.F16, Type.Q8_0, Type.Q4_K, Type.F32)}
    path = write(tmp_path_factory.mktemp("gguf") / "a.gguf", tensors)
    reader = GGUFTensors(path)
    end = max(info.offset + info.nbytes for info in map(reader._info, reader.keys()))
    path.write_bytes(path.read_bytes()[:end])  # without the padding after the last tensor
    GGUFTensors(path)
    return path


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    cut.write_bytes(whole)
    step = 1
    length = len(whole) - 1
    while length >= 0:
        with cut.open("r+b") as file:
            file.truncate(length)
        with pytest.raises(WeftError, match=r"cut\.gguf is (truncated|not a GGUF file)"):
            GGUFTensors(cut)
        step = 37 if length > 700 else 1  # every byte of the header, some of the weights
        length -= step


@given(changes=st.lists(st.tuples(st.integers(0, 699), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_read_or_refused_but_never_crashes(small: Path, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(small.read_bytes())
    for at, value in changes:
        damaged[at % len(damaged)] = value
    path = small.with_name("damaged.gguf")
    path.write_bytes(damaged)
    with contextlib.suppress(WeftError):  # any other exception is the failure
        reader = GGUFTensors(path)
        assert all(map(reader.shape, reader.keys()))


def test_wrong_requests(small: Path, tmp_path: Path) -> None:
    reader = GGUFTensors(small)
    calls: list[Callable[[], object]] = [
        lambda: reader.read("nope", 0, 1),
        lambda: reader.shape("nope"),
        lambda: reader.dtype("nope"),
    ]
    for call in calls:
        with pytest.raises(WeftError, match="has no tensor nope"):
            call()
    for start, stop in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(WeftError, match=f"rows {start}:{stop} exceed the 2 rows of tensor F16"):
            reader.read("F16", start, stop)


def test_a_file_that_changes_while_open(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(small.read_bytes())
    reader = GGUFTensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeftError, match="was shortened after opening: tensor F32 is incomplete"):
        reader.read("F32", 0, 2)
    path.unlink()
    with pytest.raises(WeftError, match=r"a\.gguf cannot be read: No such file"):
        reader.read("F32", 0, 2)
