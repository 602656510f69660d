"""Readers of safetensors files that read a few rows of a tensor at a time.

The files are read with `os.preadv`, not mapped: pages of a mapped file count as resident memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from weft.backends.safetensors import DTYPES, INDEX
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, BlockTensorReader, TensorReader
from weft.ir.storage.documents import Record, open_regular, parse_json
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

from ..tiling import check_tiling

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of an adapter in the same folder; not read as the model's weights
_WRAPPERS = ("_orig_mod.", "module.")  # prefixes that torch.compile and DistributedDataParallel add to names
MAX_HEADER = 100_000_000  # bytes, the format's own limit
MOST_VALUES = 2_000_000  # in a header: some 200,000 tensors; Python takes 1.5 kB for one
MOST_AXES = 32  # numpy 1 has no more
_OF_BYTES = {  # a table look-up of 8-bit floats is several times faster than a cast
    dtype: np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    for dtype in (dtypes.f8e4m3, dtypes.f8e5m2)
}


@dataclass(frozen=True)
class _Tensor:
    dtype: DType
    shape: tuple[int, ...]
    offset: int  # of the first byte in the file

    @property
    def end(self) -> int:
        """Return the offset after the last byte."""
        return self.offset + self.dtype.bytes_for(math.prod(self.shape))


class SafetensorsFile:
    """A reader of the tensors of one safetensors file; the constructor opens the file and checks its header.

    Raises:
        WeftError: if the file is missing, not a safetensors file, truncated, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as e:
            raise WeftError(f"{path} cannot be opened: {e.strerror}") from e
        weakref.finalize(self, os.close, self._fd)
        self.metadata: dict[str, str] = {}
        self.tensors = self._header()

    def _header(self) -> dict[str, _Tensor]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or not 2 <= length <= MAX_HEADER:
            raise WeftError(f"{self.path} is not a safetensors file, as it has no header length; fetch it again")
        if 8 + length > size:
            raise WeftError(
                f"{self.path} is truncated or not safetensors: header of {length} bytes, file of {size}; fetch it again"
            )
        header = parse_json(os.pread(self._fd, length, 8), f"header of {self.path}", unique=True, values=MOST_VALUES)
        self.metadata = Record(f"the header of {self.path}", header).get("__metadata__", dict[str, str], {})
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        tensors = {key: self._tensor(key, entry, 8 + length) for key, entry in entries.items()}
        check_tiling(str(self.path), {key: (t.offset, t.end) for key, t in tensors.items()}, 8 + length, size)
        if size > (end := max((t.end for t in tensors.values()), default=8 + length)):
            raise WeftError(f"{self.path} is damaged: tensors end at byte {end}, the file at {size}; fetch it again")
        return tensors

    def _tensor(self, key: str, entry: Any, start: int) -> _Tensor:
        try:
            name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            # type(): isinstance accepts JSON's true as an integer.
            valid = isinstance(name, str) and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid or len(shape) > MOST_AXES:
            raise WeftError(f"{self.path}: the header entry of tensor {key!r} is damaged; fetch it again")
        if name not in DTYPES:
            raise WeftError(f"{self.path}: tensor {key!r} has dtype {name}, which is not supported: convert the file")
        if end - begin != (size := DTYPES[name].bytes_for(math.prod(shape))):
            where = f"{self.path}: tensor {key!r} of {name} {list(shape)}"
            raise WeftError(f"{where} has {end - begin} bytes instead of {size}; fetch the file again")
        return _Tensor(DTYPES[name], shape, start + begin)

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

    def dtype(self, key: str) -> DType:
        return self.tensors[key].dtype

    def read(self, key: str, start: int, stop: int) -> Array:
        t = self.tensors[key]
        row = math.prod(t.shape[1:])
        raw = np.empty((stop - start) * row, t.dtype.numpy)
        self._fill(raw.view(np.uint8).data, t.offset + start * row * raw.itemsize)
        return _widen(raw, t.dtype).reshape(stop - start, *t.shape[1:])

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                # One call may read less than requested: Linux reads at most 2 GiB at once.
                n_read = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as e:
                raise WeftError(f"{self.path} cannot be read: {e.strerror or e}") from e
            if not n_read:
                raise WeftError(f"{self.path} was shortened while it was read: run the command again")
            done += n_read


def _widen(raw: Array, dtype: DType) -> Array:
    if dtype == dtypes.bf16:  # the upper half of a float32
        bits = raw.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype in _OF_BYTES:
        return _OF_BYTES[dtype].take(raw.view(np.uint8))
    return raw.astype(np.float32, copy=False) if dtype.is_float else raw


class RoutedReader(ABC):
    """A reader that reads each tensor from the reader, and under the name, that `find` returns for it."""

    @abstractmethod
    def find(self, key: str) -> tuple[TensorReader, str]:
        """Return the reader that has the tensor `key`, and the tensor's name in that reader."""

    def shape(self, key: str) -> tuple[int, ...]:
        reader, name = self.find(key)
        return reader.shape(name)

    def dtype(self, key: str) -> DType:
        reader, name = self.find(key)
        return reader.dtype(name)

    def read(self, key: str, start: int, stop: int) -> Array:
        reader, name = self.find(key)
        return reader.read(name, start, stop)

    def read_blocks(self, key: str, start: int, stop: int) -> Array:
        reader, name = self.find(key)
        assert isinstance(reader, BlockTensorReader)
        return reader.read_blocks(name, start, stop)


@dataclass(frozen=True)
class PatchedReader(RoutedReader):
    """A reader of `base` in which the keys of `replacements` refer to tensors (reader, key) of other readers."""

    base: TensorReader
    replacements: Mapping[str, tuple[TensorReader, str]]

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        return dict.fromkeys((*self.base.keys(), *self.replacements))

    def find(self, key: str) -> tuple[TensorReader, str]:
        return self.replacements.get(key, (self.base, key))


class SafetensorsReader(RoutedReader):
    """A reader of a Hugging Face folder: model.safetensors, else the shards that its index names, else *.safetensors.

    Prefixes that torch.compile and DistributedDataParallel add are removed from names; `wrappers` lists those removed.

    Raises:
        WeftError: if there are no weights, a shard is missing on disk or in the index, or a file is invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        indexed = _map_tensors(folder)
        self.files = {name: SafetensorsFile(folder / name) for name in sorted(set(indexed.values()))}
        homes: dict[str, str] = {}  # by the files' contents, as in transformers: an index may leave tensors out
        for name, file in self.files.items():
            shared = homes.keys() & file.tensors.keys()
            if repeated := {key for key in shared if indexed.get(key) not in (name, homes[key])}:
                raise WeftError(
                    f"{folder}: tensor {min(repeated)!r} is in {homes[min(repeated)]} and in {name}, and no {INDEX} "
                    "names the one to use; remove one of the files from the folder"
                )
            homes |= {key: name for key in file.tensors if indexed.get(key, name) == name or key not in homes}
        for key, name in indexed.items():
            if key not in homes and key != name:
                raise WeftError(f"{folder / INDEX} places tensor {key!r} in {name}, which lacks it; fetch both again")
        plain, self.wrappers = _strip_wrappers(homes)
        self._home = {plain[key]: (name, key) for key, name in homes.items()}
        if len(self._home) < len(homes):
            raise WeftError(f"{folder}: a tensor exists twice, with and without {self.wrappers[0]!r} in its name")

    def __repr__(self) -> str:
        return f"SafetensorsReader({str(self.path)!r}, {len(self._home)} tensors)"

    @property
    def metadata(self) -> dict[str, str]:
        """Return the merged metadata of the headers of all files; for equal keys the last file wins."""
        return {name: text for file in self.files.values() for name, text in file.metadata.items()}

    def keys(self) -> Iterable[str]:
        return self._home.keys()

    def find(self, key: str) -> tuple[SafetensorsFile, str]:
        if key not in self._home:
            raise WeftError(f"{self.path} has no tensor {key!r}")
        name, stored = self._home[key]
        return self.files[name], stored


def _strip_wrappers(keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return each of `keys` mapped to its name without wrapper prefixes, and the list of the prefixes removed."""
    names = {key: key.replace(f".{_WRAPPERS[0]}", ".") for key in keys}
    prefixes = [_WRAPPERS[0]] if any(key != name for key, name in names.items()) else []
    while prefix := next((w for w in _WRAPPERS if names and all(name.startswith(w) for name in names.values())), ""):
        names = {key: name.removeprefix(prefix) for key, name in names.items()}
        prefixes.append(prefix)
    return names, list(dict.fromkeys(prefixes))


def list_weight_files(folder: Path) -> list[Path]:
    """Return the sorted paths of the model's safetensors files in `folder`, and of those that an index names. Adapter
    weights are left out; an index counts only without a model.safetensors."""
    paths = {path for path in folder.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS}
    if (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        paths |= {path for name in set(_read_index(folder).values()) if (path := folder / name).is_file()}
    return sorted(paths)


def _map_tensors(folder: Path) -> dict[str, str]:
    """Map tensor names to file names by the index; without it, or with model.safetensors, file names to themselves."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": "model.safetensors"}
    files = [path.relative_to(folder).as_posix() for path in list_weight_files(folder)]
    if not (folder / INDEX).is_file():
        if not files:
            is_pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
            hint = ", only pickled PyTorch weights: load the model and save_pretrained it as safetensors"
            raise WeftError(f"{folder} has no safetensors weights{hint if is_pickled else ''}")
        _check_shards(folder, files)
        return {name: name for name in files}
    names = _read_index(folder)
    for name in sorted(set(names.values())):
        if name not in files:
            raise WeftError(f"{folder} lacks the shard {name} that {INDEX} names; fetch it too")
    for name in files:
        if name not in names.values() and _match_shard(name):
            raise WeftError(f"{INDEX} does not name the shard {folder / name}: fetch both again")
    return names


def _read_index(folder: Path) -> dict[str, str]:
    try:
        names: dict[str, str] = dict(Record.read(folder / INDEX).get("weight_map", dict[str, str]))
    except WeftError as e:
        raise WeftError(f"{folder / INDEX} is not a safetensors index: {e}") from e
    if not names or any(PurePosixPath(file).is_absolute() or ".." in file.split("/") for file in names.values()):
        raise WeftError(f"{folder / INDEX} is not a safetensors index: its weight_map is empty or names other folders")
    return names


def _match_shard(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(.*-)(\d+)-of-(\d+)(\.safetensors)", name)


def _check_shards(folder: Path, names: list[str]) -> None:
    for name in names:
        if match := _match_shard(name):
            stem, digits, count, end = match.groups()
            for i in range(1, int(count) + 1):
                if (expected := f"{stem}{i:0{len(digits)}d}-of-{count}{end}") not in names:
                    raise WeftError(f"{folder} lacks the shard {expected}; fetch it too")
