"""Element types of tensors.

A `DType` is an object, never a string. A dense type has a NumPy dtype (of ml_dtypes for bf16, fp8 and 4-bit integers).
A block-quantized type describes only storage: `block` elements in `block_bytes` bytes. Checkpoint readers decode it to
float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import WeftError


@dataclass(frozen=True)
class DType:
    """An element type: `name`, `kind` (float, int, uint, bool or block), `bits` per element (of a code for blocks)."""

    name: str
    kind: str
    bits: int
    block: int = 1
    block_bytes: int = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_block(self) -> bool:
        """True for block-quantized types, which describe storage: no op computes in them."""
        return self.kind == "block"

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy (or ml_dtypes) dtype; WeftError for a block-quantized type."""
        if self.is_block:
            raise WeftError(f"dtype {self.name} is block-quantized storage; dequantize it before computing with it")
        return np.dtype(_NUMPY.get(self.name) or f"{self.kind}{self.bits}")

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value of a float type."""
        finfo: Any = ml_dtypes.finfo  # ships no types
        return float(finfo(self.numpy).eps)

    def bytes_for(self, elements: int) -> int:
        """Return the bytes in memory of `elements` elements, rounded up to full blocks or bytes."""
        if self.is_block:
            return -(-elements // self.block) * self.block_bytes
        return -(-elements * self.bits // 8)


_NUMPY: dict[str, Any] = {  # other names in NumPy are kind and bits, such as uint16
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3": ml_dtypes.float8_e4m3fn,  # finite and NaN only, as in PyTorch and checkpoints
    "f8e5m2": ml_dtypes.float8_e5m2,
    "i4": ml_dtypes.int4,
    "u4": ml_dtypes.uint4,
    "bool": np.bool_,
}

f64 = DType("f64", "float", 64)
f32 = DType("f32", "float", 32)
f16 = DType("f16", "float", 16)
bf16 = DType("bf16", "float", 16)
f8e4m3 = DType("f8e4m3", "float", 8)
f8e5m2 = DType("f8e5m2", "float", 8)
i64 = DType("i64", "int", 64)
i32 = DType("i32", "int", 32)
i16 = DType("i16", "int", 16)
i8 = DType("i8", "int", 8)
i4 = DType("i4", "int", 4)
u64 = DType("u64", "uint", 64)
u32 = DType("u32", "uint", 32)
u16 = DType("u16", "uint", 16)
u8 = DType("u8", "uint", 8)
u4 = DType("u4", "uint", 4)
bool_ = DType("bool", "bool", 8)
# Block layouts, most of the GGUF specification: elements per block, bytes per block.
q4_0 = DType("q4_0", "block", 4, block=32, block_bytes=18)
q4_1 = DType("q4_1", "block", 4, block=32, block_bytes=20)
q5_0 = DType("q5_0", "block", 5, block=32, block_bytes=22)
q5_1 = DType("q5_1", "block", 5, block=32, block_bytes=24)
q8_0 = DType("q8_0", "block", 8, block=32, block_bytes=34)
f8e4m3_128 = DType("f8e4m3_128", "block", 8, block=128, block_bytes=132)  # a float32 scale, then 128 codes
mxfp4 = DType("mxfp4", "block", 4, block=32, block_bytes=17)
q2_k = DType("q2_k", "block", 2, block=256, block_bytes=84)
q3_k = DType("q3_k", "block", 3, block=256, block_bytes=110)
q4_k = DType("q4_k", "block", 4, block=256, block_bytes=144)
q5_k = DType("q5_k", "block", 5, block=256, block_bytes=176)
q6_k = DType("q6_k", "block", 6, block=256, block_bytes=210)
iq1_s = DType("iq1_s", "block", 1, block=256, block_bytes=50)
iq1_m = DType("iq1_m", "block", 1, block=256, block_bytes=56)
iq2_xxs = DType("iq2_xxs", "block", 2, block=256, block_bytes=66)
iq2_xs = DType("iq2_xs", "block", 2, block=256, block_bytes=74)
iq2_s = DType("iq2_s", "block", 2, block=256, block_bytes=82)
iq3_xxs = DType("iq3_xxs", "block", 3, block=256, block_bytes=98)
iq3_s = DType("iq3_s", "block", 3, block=256, block_bytes=110)
iq4_nl = DType("iq4_nl", "block", 4, block=32, block_bytes=18)
iq4_xs = DType("iq4_xs", "block", 4, block=256, block_bytes=136)
tq1_0 = DType("tq1_0", "block", 2, block=256, block_bytes=54)
tq2_0 = DType("tq2_0", "block", 2, block=256, block_bytes=66)

ALL: dict[str, DType] = {t.name: t for t in list(globals().values()) if isinstance(t, DType)}
_BY_NUMPY: dict[np.dtype[Any], DType] = {t.numpy: t for t in ALL.values() if not t.is_block}
_ALIASES = {"float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "bfloat16": "bf16", "float64": "f64"}


def parse(name: str, known: Iterable[str] = ALL) -> DType:
    """Return the dtype called `name`, or by an alias such as ``fp16`` or ``float16``.

    Raises:
        WeftError: if no dtype has that name; the message lists the names `known`.
    """
    dtype = ALL.get(_ALIASES.get(name, name))
    if dtype is None:
        raise WeftError(f"unknown dtype {name!r}; known are {', '.join(known)}")
    return dtype


def from_numpy(array: np.ndarray[Any, Any]) -> DType:
    """Return the dtype of `array`; raise WeftError if weft has no such dtype."""
    dtype = _BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise WeftError(f"numpy dtype {array.dtype} has no counterpart in weft; cast the array to another dtype first")
    return dtype
