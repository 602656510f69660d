"""A writer of safetensors files that streams tensors block by block."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.ir.recipes.streams import cast_finite
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType

DTYPES: Mapping[str, DType] = {
    # All dtypes with a numpy type; the format has no name for 4-bit integers.
    dtype.name.replace("f8", "f8_").upper(): dtype
    for dtype in dtypes.ALL.values()
    if not dtype.is_block and dtype.bits >= 8
}
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # at most in one file, unless one tensor is larger
STORED = (dtypes.f32, dtypes.f16, dtypes.bf16)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Step = Callable[[int], None]  # bytes just written
Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class Tensor(NamedTuple):
    """A tensor to write as `dtype`; writers call `blocks` for its elements, piece by piece in row-major order."""

    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterable[Array]]

    @property
    def nbytes(self) -> int:
        return self.dtype.bytes_for(math.prod(self.shape))


def count_written(progress: Progress, tensors: Mapping[str, Tensor]) -> Step:
    """Return a function to pass as `step` to a writer of `tensors`: it adds up the bytes written and calls
    progress("weights", bytes so far, bytes of all tensors)."""
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())

    def step(written: int) -> None:
        nonlocal done
        done += written
        progress("weights", done, total)

    return step


def parse_stored(dtype: str) -> DType:
    """Return the dtype called `dtype`. Raises WeftError unless checkpoints can be written in it: f32, f16 or bf16."""
    parsed = dtypes.parse(dtype, map(str, STORED))
    if parsed not in STORED:
        raise WeftError(f"a checkpoint cannot be written in {parsed}; choose {', '.join(map(str, STORED))}")
    return parsed


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES, step: Step = lambda done: None
) -> None:
    """Write `tensors`, in order, into `folder`: as model.safetensors, or as several files and an index if they exceed
    `shard_bytes`. Call `step` after each write with its number of bytes. Raises WeftError if a value is not finite, or
    exceeds the range of its dtype."""
    shards: list[dict[str, Tensor]] = [{}]
    for key, tensor in tensors.items():
        if shards[-1] and tensor.nbytes + sum(t.nbytes for t in shards[-1].values()) > shard_bytes:
            shards.append({})
        shards[-1][key] = tensor
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, step)
    if count > 1:
        home = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": home}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Mapping[str, Tensor], step: Step = lambda done: None) -> None:
    """Write `tensors` into the single file `path`; call `step` after each write with its number of bytes. Raises
    WeftError if a value is not finite, or exceeds the range of its dtype."""
    # Older versions of transformers refuse files that do not state a format.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, tensor in tensors.items():
            for block in encode_blocks(key, tensor):
                file.write(block.data)
                step(block.nbytes)


def encode_blocks(key: str, tensor: Tensor) -> Iterator[Array]:
    """Yield the bytes of `tensor`, named `key`, in its dtype, block by block. Raises WeftError if a value is not
    finite, or exceeds the range of the dtype."""
    for values in tensor.blocks():
        yield cast_finite(values, tensor.dtype, key).reshape(-1).view(np.uint8)
