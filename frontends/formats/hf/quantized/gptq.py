"""GPTQ and AWQ: quantized matrices that are stored [in, out], as integers packed into 32-bit words.

``gptq`` (https://arxiv.org/abs/2210.17323, as AutoGPTQ and GPTQModel write it): `qweight` [in · bits / 32, out] packs
along the inputs, a bit stream from the lowest bit on; `qzeros` [groups, out · bits / 32] along the outputs; `scales`
[groups, out]; `g_idx` [in], the group of every input. In the older ``checkpoint_format`` "gptq" a stored zero point is
one less than its value, in "gptq_v2" it is the value. GPTQModel subtracts the ones from entire words, so that a 0
borrows from the next zero point; adding them to entire words again restores the values in both cases. For 3 bits, where
codes cross words, it subtracts from each zero point, and 0 becomes 7.

``awq`` (https://arxiv.org/abs/2306.00978, its GEMM layout): `qweight` [in, out / 8] and `qzeros` pack eight outputs
into a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import INTEGER_BITS, unpack_codes

from .codes import Integers, is_act_order, is_scale_dtype, to_bytes
from .tensor import QuantizedTensor, misfit_error, read_all, require_key

_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position in the word of each of eight outputs
_AWQ_VERSIONS = ("gemm", "exllama", "ipex")  # the last two have the layout of gemm, and name only the kernels


class Columns:
    """A reader of columns of tensors [in, …], which a file stores by rows.

    It caches the last tensor of each kind (last part of the name), since rows of a weight, which are columns of such a
    tensor, are read a few at a time.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[TensorReader, str, Array]] = {}

    def read(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        """Return columns ``start:stop`` of tensor `key` as rows, [stop - start, in]."""
        kind = key.rpartition(".")[2]
        last = self._last.get(kind)
        if last is None or last[0] is not reader or last[1] != key:
            last = self._last[kind] = (reader, key, read_all(reader, key))
        return np.ascontiguousarray(last[2][:, start:stop].T)


@dataclass(frozen=True)
class GPTQ(Integers):
    """A GPTQ weight.

    qweight, scale_key, qzeros, g_idx ("" without it): keys of its tensors. lag: 1 if stored zero points are one less
    than their values, else 0.
    """

    qweight: str
    scale_key: str
    qzeros: str
    g_idx: str
    lag: int
    columns: Columns = field(compare=False, repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(key for key in (self.qweight, self.scale_key, self.qzeros, self.g_idx) if key)

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return unpack_codes(to_bytes(self.columns.read(reader, self.qweight, start, stop)), self.bits, self.width)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.columns.read(reader, self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        points = unpack_zero_points(read_all(reader, self.qzeros), self.bits, self.lag, self.rows)
        return np.ascontiguousarray(points[:, start:stop].T)


def unpack_zero_points(words: Array, bits: int, lag: int, rows: int) -> Array:
    """Return the zero points u8 [groups, rows] in `words` i32 [groups, rows · bits / 32]; `lag` as in `GPTQ`."""
    if lag and bits != 3:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (words.view(np.uint32) + np.uint32(ones)).view(np.int32)
    points = unpack_codes(to_bytes(words), bits, rows)
    return (points + 1) & 7 if lag and bits == 3 else points


def read_gptq(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of a GPTQ folder, by name.

    Raises:
        WeftError: if the config `scheme` states an unsupported format, or tensors are missing or do not fit.
    """
    kind = scheme.get("checkpoint_format") or scheme.get("format") or "gptq"
    bits, size = scheme.get("bits"), scheme.get("group_size", -1)
    if kind not in ("gptq", "gptq_v2") or scheme.get("is_marlin_format"):
        raise WeftError(f"checkpoint_format={kind!r} is not supported, only 'gptq' and 'gptq_v2': convert it to one")
    if bits not in INTEGER_BITS or type(bits) is not int:
        raise WeftError(f"bits={bits!r} is not supported, only {', '.join(map(str, INTEGER_BITS))}")
    _check_group(size)
    single = not scheme.get("dynamic")  # else modules may differ in bits and groups
    columns, tensors = Columns(), dict[str, QuantizedTensor]()
    for key in keys:
        name = key.removesuffix(".qweight")
        if name == key:
            continue
        scales, qzeros = (require_key(key, f"{name}.{part}", keys) for part in ("scales", "qzeros"))
        layouts = "i32 [in · bits / 32, out], floats [groups, out], i32 [groups, out · bits / 32]"
        expected, parts = f"of {bits} bits in groups of {size}: {layouts}", (key, scales, qzeros)
        ints = {reader.dtype(key), reader.dtype(qzeros)}
        if [len(reader.shape(k)) for k in parts] != [2, 2, 2] or ints != {dtypes.i32}:
            raise misfit_error(reader, *parts, expected=expected)
        (words, rows), (groups, columns_of_scales), zeros = (reader.shape(k) for k in parts)
        module_bits = bits if single or not rows else zeros[1] * 32 // rows
        width = words * 32 // module_bits if module_bits in INTEGER_BITS else 0
        group = width if size == -1 else size
        if not single and groups and -(-width // group) != groups:
            group = -(-width // groups)
        fits = width and zeros == (groups, -(-rows * module_bits // 32)) and columns_of_scales == rows and groups
        if (
            not fits
            or -(-width // group) != groups
            or words * 32 % module_bits
            or not is_scale_dtype(reader.dtype(scales))
        ):
            raise misfit_error(reader, *parts, expected=expected)
        g_idx = f"{name}.g_idx"
        if scheme.get("desc_act"):
            require_key(key, g_idx, keys)
        g_idx = g_idx if g_idx in keys else ""
        index = g_idx if g_idx and _has_act_order(reader, g_idx, width, group, groups) else ""
        lag = int(kind == "gptq")
        points = unpack_zero_points(read_all(reader, qzeros), module_bits, lag, rows)
        has_zeros = bool((points != 1 << (module_bits - 1)).any())
        layout = (rows, width, module_bits, group, reader.dtype(scales), has_zeros, index)
        tensors[f"{name}.weight"] = GPTQ(*layout, *parts, g_idx, lag, columns)
    return tensors


def _check_group(size: Any) -> None:
    if type(size) is not int or not (size == -1 or size > 0):
        raise WeftError(f"group_size={size!r} must be a positive integer, or -1 for one group")


def _has_act_order(reader: TensorReader, key: str, width: int, group: int, groups: int) -> bool:
    """Return whether the tensor `key`, the group of each input, differs from consecutive groups of `group` inputs.

    Raise WeftError if it does not list a group below `groups` for each of `width` inputs.
    """
    if reader.shape(key) != (width,) or not reader.dtype(key).is_int:
        raise WeftError(f"{key!r} {list(reader.shape(key))} must list the group of each of {width} inputs")
    index = read_all(reader, key)
    if width and not 0 <= index.min() <= index.max() < groups:
        raise WeftError(f"{key!r} puts an input into group {int(index.max())} or {int(index.min())} of {groups}")
    return is_act_order(index, group)


@dataclass(frozen=True)
class AWQ(Integers):
    """An AWQ weight of 4 bits; `qweight`, `scale_key` and `qzeros` are the keys of its tensors."""

    qweight: str
    scale_key: str
    qzeros: str
    columns: Columns = field(compare=False, repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.qweight, self.scale_key, self.qzeros)

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unpack_outputs(reader, self.qweight, start, stop)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.columns.read(reader, self.scale_key, start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unpack_outputs(reader, self.qzeros, start, stop)

    def _unpack_outputs(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        """Return the integers u8 [stop - start, n] of outputs ``start:stop`` of the tensor `key` [n, out / 8]."""
        first = start // 8
        words = self.columns.read(reader, key, first, -(-stop // 8)).view(np.uint32)
        codes = words[:, None] >> (4 * _AWQ_ORDER.astype(np.uint32))[:, None] & np.uint32(15)
        return codes.astype(np.uint8).reshape(-1, words.shape[1])[start - 8 * first : stop - 8 * first]


def read_awq(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of an AWQ folder, by name.

    Raises:
        WeftError: if the config `scheme` states an unsupported layout, or tensors are missing or do not fit.
    """
    bits, size = scheme.get("bits", scheme.get("w_bit")), scheme.get("group_size", scheme.get("q_group_size", -1))
    version = str(scheme.get("version", scheme.get("format", "gemm"))).lower()
    if version not in _AWQ_VERSIONS:
        raise WeftError(f"version={version!r} is not supported, only the layout of 'gemm'")
    if bits != 4:
        raise WeftError(f"bits={bits!r} is not supported, only 4")
    _check_group(size)
    columns, tensors = Columns(), dict[str, QuantizedTensor]()
    for key in keys:
        name = key.removesuffix(".qweight")
        if name == key:
            continue
        scales, qzeros = (require_key(key, f"{name}.{part}", keys) for part in ("scales", "qzeros"))
        parts = (key, scales, qzeros)
        shapes = [reader.shape(part) for part in parts]
        width, rows = (shapes[0][0], 8 * shapes[0][1]) if len(shapes[0]) == 2 else (0, 0)
        group = width if size == -1 else size
        groups = width // group if group else 0
        ints = {reader.dtype(key), reader.dtype(qzeros)}
        fits = groups * group == width and shapes[1:] == [(groups, rows), (groups, rows // 8)]
        if not width or not fits or ints != {dtypes.i32} or not is_scale_dtype(reader.dtype(scales)):
            expected = f"i32 [in, out / 8], floats [in / {group}, out], i32 [in / {group}, out / 8]"
            raise misfit_error(reader, *parts, expected=expected)
        layout = (rows, width, 4, group, reader.dtype(scales), True, "")
        tensors[f"{name}.weight"] = AWQ(*layout, *parts, columns)
    return tensors
