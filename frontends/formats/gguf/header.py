"""The GGUF header: typed metadata and the table of tensors.

Not parsed with `gguf.GGUFReader`, which maps the entire file, builds an array object per string (2 s and 200 MB for a
100 MB model) and reports a truncated or foreign file as an IndexError. Layout: the GGUF specification, versions 2 and
3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
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

from ..tiling import check_tiling

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4  # of arrays in arrays; deeper ones are garbage
MAX_VALUES = 1 << 24  # of all metadata together; in Python a value takes up to 60 times its bytes in the file
MAX_TENSORS = 1 << 20
# Scalar value types of the specification, by their number there.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file: `shape` in numpy order (axis 0 outermost), `offset` of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The format version, the metadata by key, and the tensors by name of a GGUF file."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Parse, check and return the header of the GGUF file at `path`.

    Raises:
        WeftError: if the file is missing, not GGUF, of an unsupported version or byte order, truncated in the header or
            the weights, inconsistent, or has a tensor of a type that weft cannot decode.
    """
    try:
        if path.is_dir():
            raise WeftError(f"{path} is a folder, not a GGUF file")
        with open(open_regular(path), "rb") as file:
            return _HeaderParser(path, file, os.fstat(file.fileno()).st_size).parse()
    except FileNotFoundError:
        raise WeftError(f"{path} does not exist") from None
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderParser:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 0
        self.values = 0

    def parse(self) -> Header:
        magic = self.file.read(4)
        self.at = len(magic)
        if magic != b"GGUF":
            raise self.error(f"is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        version = self.read_number("I", "the version")
        # The version is a small number, so in the other byte order its low half is 0.
        if version & 0xFFFF == 0 and version:
            raise self.error("is a big-endian GGUF file: convert it with gguf-convert-endian of the package gguf")
        if version not in VERSIONS:
            raise self.error(f"has GGUF version {version}; supported are {' and '.join(map(str, VERSIONS))}")
        n_tensors, n_keys = self.read_number("Q", "the tensor count"), self.read_number("Q", "the key count")
        if n_tensors > MAX_TENSORS:
            raise self.error(f"is damaged: its header counts {n_tensors} tensors, more than {MAX_TENSORS}")
        metadata: dict[str, Any] = {}
        for index in range(n_keys):
            key = self.read_string(f"metadata key {index} of {n_keys}")
            if key in metadata:
                raise self.error(f"is damaged: metadata key {key} appears twice")
            metadata[key] = self.read_value(self.read_number("I", f"the type of metadata {key}"), f"metadata {key}")
        alignment = metadata.get("general.alignment", 32)
        # type(): GGUF has booleans, and isinstance accepts them as integers.
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"is damaged: general.alignment={alignment!r} is not a power of two")
        entries = [self.read_entry(f"tensor {index} of {n_tensors}") for index in range(n_tensors)]
        # The data begin at the next multiple of the alignment; offsets of tensors count from there.
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, ggml_type, offset in entries:
            if name in tensors:
                raise self.error(f"is damaged: tensor {name} appears twice")
            tensors[name] = self.check_tensor(name, shape, ggml_type, offset, start, alignment)
        extents = {t.name: (t.offset, t.offset + t.nbytes) for t in tensors.values()}
        check_tiling(str(self.path), extents, start, self.size, alignment)
        return Header(version, metadata, tensors)

    def check_tensor(
        self, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, start: int, alignment: int
    ) -> TensorInfo:
        dtype = list_dtypes().get(ggml_type)
        if dtype is None:
            kind, supported = name_ggml_type(ggml_type), ", ".join(t.name.upper() for t in list_dtypes().values())
            raise self.error(f"has tensor {name} of type {kind}, which is not supported; supported are {supported}")
        if shape[-1] % dtype.block:
            raise self.error(
                f"is damaged: tensor {name} has rows of {shape[-1]} elements, but {dtype.name.upper()} needs "
                f"a multiple of {dtype.block}"
            )
        nbytes = dtype.bytes_for(math.prod(shape))
        if offset % alignment:
            raise self.error(f"is damaged: offset {offset} of tensor {name} is not a multiple of alignment {alignment}")
        if start + offset + nbytes > self.size:
            raise self.error(
                f"is truncated: tensor {name} ends at byte {start + offset + nbytes}, but the file at {self.size}; "
                "fetch it again"
            )
        return TensorInfo(name, shape, dtype, ggml_type, start + offset, nbytes)

    def read_entry(self, label: str) -> tuple[str, tuple[int, ...], int, int]:
        name = self.read_string(f"the name of {label}")
        n_dims = self.read_number("I", f"the rank of {name}")
        if n_dims > MAX_DIMS:
            raise self.error(f"is damaged: tensor {name} has {n_dims} axes, more than {MAX_DIMS}")
        # GGUF lists the innermost axis first.
        shape = tuple(self.read_number("Q", f"the shape of {name}") for _ in range(n_dims))[::-1] or (1,)
        return name, shape, self.read_number("I", f"the type of {name}"), self.read_number("Q", f"the offset of {name}")

    def add_values(self, values: int) -> None:
        """Add `values` to the number of metadata values read; raise WeftError above `MAX_VALUES`."""
        self.values += values
        if self.values > MAX_VALUES:
            raise self.error(f"is damaged: it has more than {MAX_VALUES} metadata values")

    def read_value(self, kind: int, label: str, depth: int = 0) -> Any:
        self.add_values(1)
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind], label)
        if kind == _STRING:
            return self.read_string(label)
        if kind != _ARRAY or depth >= MAX_NESTING:
            raise self.error(f"is damaged: {label} has the unknown value type {kind}")
        kind, count = self.read_number("I", label), self.read_number("Q", label)
        if kind == _STRING:
            return self.read_strings(count, label)
        if kind not in _SCALARS:
            return [self.read_value(kind, label, depth + 1) for _ in range(count)]
        # Scalars are read in one piece: scores and token types have one for every token.
        code = np.dtype("<" + _SCALARS[kind] if kind != _BOOL else np.bool_)
        raw = self.read_bytes(count * code.itemsize, label)
        self.add_values(count)
        return np.frombuffer(raw, code).tolist()

    def read_strings(self, count: int, label: str) -> list[str]:
        """Read and return an array of `count` strings, in one fast loop: vocabularies have 100,000 strings."""
        strings: list[str] = []
        read, length_of, remaining = self.file.read, _FORMS["Q"].unpack, self.size - self.at
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
        self.add_values(len(strings))
        if len(strings) < count:  # read the unsound string by `read_value`, which reports its fault
            strings += [self.read_value(_STRING, label) for _ in range(count - len(strings))]
        return strings

    def read_string(self, label: str) -> str:
        raw = self.read_bytes(self.read_number("Q", label), label)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"is damaged: {label} is not UTF-8 at byte {self.at - len(raw) + error.start}") from None

    def read_number(self, code: str, label: str) -> Any:
        form = _FORMS[code]
        return form.unpack(self.read_bytes(form.size, label))[0]

    def read_bytes(self, count: int, label: str) -> bytes:
        # A damaged count may be huge: compare it with the file before allocating memory.
        raw = self.file.read(count) if count <= self.size - self.at else b""
        if len(raw) < count:
            raise self.error(f"is truncated or damaged: {label} needs {count} bytes from byte {self.at} of {self.size}")
        self.at += count
        return raw

    def error(self, message: str) -> WeftError:
        return WeftError(f"{self.path} {message}")


_FORMS = {code: Struct("<" + code) for code in _SCALARS.values()}


@cache
def list_dtypes() -> dict[int, DType]:
    """Return the dtypes of the ggml tensor types that weft decodes, keyed by ggml's type number."""
    from gguf.constants import GGMLQuantizationType

    return {t.value: dtypes.ALL[t.name.lower()] for t in GGMLQuantizationType if t.name.lower() in dtypes.ALL}


def name_ggml_type(ggml_type: int) -> str:
    """Return ggml's name of the tensor type number `ggml_type`, or the number itself."""
    from gguf.constants import GGMLQuantizationType

    return {t.value: t.name for t in GGMLQuantizationType}.get(ggml_type, str(ggml_type))
