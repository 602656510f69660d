"""The GGUF header: typed metadata and the table of tensors.

Parsed here rather than with `gguf.GGUFReader`, which maps the whole file, builds an array object per string (2 s and
200 MB for a 100 MB model) and reports a cut or foreign file as an IndexError. Layout: the GGUF specification, versions
2 and 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.storage.documents import open_regular
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ..tiling import check_tiled

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4  # of arrays in arrays; deeper ones are garbage
MAX_VALUES = 1 << 24  # in all metadata; Python takes up to 60 times the bytes that a value has in the file
MAX_TENSORS = 1 << 20
# Scalar value types of the specification, by their number there.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a GGUF file: `shape` in numpy order, ggml type, and the `offset` and number of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensor list of a GGUF file."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Parse, check and return the header of the GGUF file at `path`.

    Raises:
        WeftError: if the file is missing, not GGUF, of an unsupported version or byte order, truncated (header or
            weights), inconsistent, or has a tensor of a type that weft cannot decode.
    """
    try:
        if path.is_dir():
            raise WeftError(f"{path} is a folder, not a GGUF file")
        with open(open_regular(path), "rb") as file:
            return _HeaderParser(path, file, os.fstat(file.fileno()).st_size).header()
    except FileNotFoundError:
        raise WeftError(f"{path}: no such GGUF file") from None
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderParser:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 0
        self.values = 0

    def header(self) -> Header:
        magic = self.file.read(4)
        self.at = len(magic)
        if magic != b"GGUF":
            raise self.bad(f"is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        version = self.number("I", "the version")
        # The version is a small number, so in the other byte order its low half is 0.
        if version & 0xFFFF == 0 and version:
            raise self.bad("is a big-endian GGUF file; convert it with the gguf package's gguf-convert-endian")
        if version not in VERSIONS:
            raise self.bad(f"is GGUF version {version}; supported are {' and '.join(map(str, VERSIONS))}")
        n_tensors, n_keys = self.number("Q", "the tensor count"), self.number("Q", "the key count")
        if n_tensors > MAX_TENSORS:
            raise self.bad(f"is damaged: it counts {n_tensors} tensors, more than {MAX_TENSORS}")
        metadata: dict[str, Any] = {}
        for index in range(n_keys):
            key = self.string(f"metadata key {index} of {n_keys}")
            if key in metadata:
                raise self.bad(f"repeats the metadata key {key}")
            metadata[key] = self.value(self.number("I", f"the type of metadata {key}"), f"metadata {key}")
        alignment = metadata.get("general.alignment", 32)
        # type(): GGUF has booleans, and isinstance takes them for integers.
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"has general.alignment {alignment!r}, which is not a power of two")
        entries = [self.entry(f"tensor {index} of {n_tensors}") for index in range(n_tensors)]
        # The data begin at the next multiple of the alignment; offsets of tensors count from there.
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, ggml_type, offset in entries:
            if name in tensors:
                raise self.bad(f"lists the tensor {name} twice")
            tensors[name] = self.tensor(name, shape, ggml_type, offset, start, alignment)
        extents = {t.name: (t.offset, t.offset + t.nbytes) for t in tensors.values()}
        check_tiled(str(self.path), extents, start, self.size, alignment)
        return Header(version, metadata, tensors)

    def tensor(
        self, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, start: int, alignment: int
    ) -> TensorInfo:
        dtype = storage_types().get(ggml_type)
        if dtype is None:
            supported = ", ".join(t.name.upper() for t in storage_types().values())
            raise self.bad(
                f"stores tensor {name} as {type_name(ggml_type)}, which weft cannot decode; it decodes {supported}"
            )
        if shape[-1] % dtype.block:
            raise self.bad(
                f"has tensor {name} with rows of {shape[-1]} elements, not whole {dtype.name.upper()} blocks "
                f"of {dtype.block}"
            )
        nbytes = dtype.bytes_for(math.prod(shape))
        if offset % alignment:
            raise self.bad(
                f"places tensor {name} at offset {offset}, which is not a multiple of its alignment {alignment}"
            )
        if start + offset + nbytes > self.size:
            raise self.bad(
                f"is truncated: tensor {name} ends at byte {start + offset + nbytes} but the file has {self.size}; "
                "fetch it again"
            )
        return TensorInfo(name, shape, dtype, ggml_type, start + offset, nbytes)

    def entry(self, label: str) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(f"the name of {label}")
        n_dims = self.number("I", f"the rank of {name}")
        if n_dims > MAX_DIMS:
            raise self.bad(f"gives tensor {name} {n_dims} dimensions; ggml has at most {MAX_DIMS}")
        # GGUF lists the innermost axis first.
        shape = tuple(self.number("Q", f"the shape of {name}") for _ in range(n_dims))[::-1] or (1,)
        return name, shape, self.number("I", f"the type of {name}"), self.number("Q", f"the offset of {name}")

    def count(self, values: int) -> None:
        """Add `values` to the number of metadata values, and raise WeftError above the limit."""
        self.values += values
        if self.values > MAX_VALUES:
            raise self.bad(f"holds more than {MAX_VALUES} values of metadata, which no model needs")

    def value(self, kind: int, label: str, depth: int = 0) -> Any:
        self.count(1)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], label)
        if kind == _STRING:
            return self.string(label)
        if kind != _ARRAY or depth >= MAX_NESTING:
            raise self.bad(f"has {label} of unknown value type {kind}")
        kind, count = self.number("I", label), self.number("Q", label)
        if kind == _STRING:
            return self.strings(count, label)
        if kind not in _SCALARS:
            return [self.value(kind, label, depth + 1) for _ in range(count)]
        # Scalars are read in one piece: scores and token types have one for every token.
        code = np.dtype("<" + _SCALARS[kind] if kind != _BOOL else np.bool_)
        raw = self.take(count * code.itemsize, label)
        self.count(count)
        return np.frombuffer(raw, code).tolist()

    def strings(self, count: int, label: str) -> list[str]:
        """Read and return an array of `count` strings in one loop: vocabularies and merges have 100,000 strings."""
        strings: list[str] = []
        read, length_of, remaining = self.file.read, _FORMS["Q"], self.size - self.at
        for _ in range(min(count, MAX_VALUES - self.values)):
            head = read(8)
            length = length_of(head)[0] if len(head) == 8 else remaining
            if 8 + length > remaining or len(raw := read(length)) < length:
                break
            try:
                strings.append(raw.decode())
            except UnicodeDecodeError:
                break
            remaining -= 8 + length
        self.file.seek(self.size - remaining)
        self.at = self.size - remaining
        self.count(len(strings))
        if len(strings) < count:  # read the unsound string by `value`, which reports its fault
            strings += [self.value(_STRING, label) for _ in range(count - len(strings))]
        return strings

    def string(self, label: str) -> str:
        raw = self.take(self.number("Q", label), label)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"has {label} that is not UTF-8 at byte {self.at - len(raw) + error.start}") from None

    def number(self, code: str, label: str) -> Any:
        form = _FORMS[code]
        return form(self.take(_SIZES[code], label))[0]

    def take(self, count: int, label: str) -> bytes:
        # A damaged count may be huge: compare it with the file before memory is taken.
        raw = self.file.read(count) if count <= self.size - self.at else b""
        if len(raw) < count:
            raise self.bad(
                f"is truncated or damaged: {label} needs {count} bytes at byte {self.at} but the file has {self.size}"
            )
        self.at += count
        return raw

    def bad(self, message: str) -> WeftError:
        return WeftError(f"{self.path} {message}")


_FORMS: dict[str, Callable[[bytes], tuple[Any, ...]]] = {code: Struct("<" + code).unpack for code in "BbHhIif?Qqd"}
_SIZES = {code: Struct("<" + code).size for code in _FORMS}


@cache
def storage_types() -> dict[int, DType]:
    """Return the dtypes of the ggml tensor types that weft decodes, by ggml's type number."""
    from gguf.constants import GGMLQuantizationType

    return {t.value: dtypes.ALL[t.name.lower()] for t in GGMLQuantizationType if t.name.lower() in dtypes.ALL}


def type_name(ggml_type: int) -> str:
    """Return ggml's name of a tensor type, or a phrase with its number if ggml has no name."""
    from gguf.constants import GGMLQuantizationType

    names = {t.value: t.name for t in GGMLQuantizationType}
    return names.get(ggml_type, f"the unknown type {ggml_type}")
