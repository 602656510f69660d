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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import INTEGER_BITS, unpack_codes

from .codes import Integers, has_act_order, is_scale_dtype, to_bytes
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
class _ColumnIntegers(Integers):
    """A matrix that is stored [in, out]."""

    columns: Columns = field(compare=False, repr=False)

    def scales(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.columns.read(reader, self.keys["scales"], start, stop)


@dataclass(frozen=True)
class GPTQ(_ColumnIntegers):
    """A GPTQ weight. lag: 1 if stored zero points are one less than their values, else 0."""

    lag: int

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        words = self.columns.read(reader, self.keys["qweight"], start, stop)
        return unpack_codes(to_bytes(words), self.bits, self.width)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        points = unpack_zero_points(read_all(reader, self.keys["qzeros"]), self.bits, self.lag, self.rows)
        return np.ascontiguousarray(points[:, start:stop].T)


def unpack_zero_points(words: Array, bits: int, lag: int, rows: int) -> Array:
    """Return the zero points u8 [groups, rows] in `words` i32 [groups, rows · bits / 32]; `lag` as in `GPTQ`."""
    if lag and bits != 3:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (words.view(np.uint32) + np.uint32(ones)).view(np.int32)
    points = unpack_codes(to_bytes(words), bits, rows)
    return (points + 1) & 7 if lag and bits == 3 else points


def read_gptq(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of a GPTQ folder, keyed by name.

    Raises:
        WeftError: if the config `scheme` states an unsupported format, or tensors are missing or do not fit.
    """
    stated = scheme.get("checkpoint_format") or scheme.get("format") or "gptq"
    kind = "marlin" if scheme.get("is_marlin_format") else stated
    bits, size = scheme.get("bits"), scheme.get("group_size", -1)
    if kind not in ("gptq", "gptq_v2"):
        raise WeftError(f"checkpoint_format={kind!r} is not supported, only 'gptq' and 'gptq_v2': convert it to one")
    if bits not in INTEGER_BITS or type(bits) is not int:
        raise WeftError(f"bits={bits!r} is not supported, only {', '.join(map(str, INTEGER_BITS))}")
    _check_group(size)
    single = not scheme.get("dynamic")  # else modules may differ in bits and groups
    lag, columns, tensors = int(kind == "gptq"), Columns(), dict[str, QuantizedTensor]()
    groups = 1 if size == -1 else f"in / {size}"
    layouts = f"f16, bf16 or f32 [{groups}, out], and qzeros i32 [{groups}, out · {bits} / 32]"
    misfit = partial(misfit_error, reader, expected=f"qweight must be i32 [in · {bits} / 32, out], scales {layouts}")
    for name, parts in _find_weights(keys):
        qweight, scales, qzeros = parts.values()
        shapes, ints = list(map(reader.shape, parts.values())), {reader.dtype(qweight), reader.dtype(qzeros)}
        if list(map(len, shapes)) != [2, 2, 2] or ints != {dtypes.i32}:
            raise misfit(*parts.values())
        (words, rows), (groups, columns_of_scales), zeros = shapes
        module_bits = bits if single or not rows else zeros[1] * 32 // rows
        width = words * 32 // module_bits if module_bits in INTEGER_BITS else 0
        group = width if size == -1 else size
        if not single and groups and -(-width // group) != groups:
            group = -(-width // groups)
        fits = width and zeros == (groups, -(-rows * module_bits // 32)) and columns_of_scales == rows and groups
        fits = fits and -(-width // group) == groups and not words * 32 % module_bits
        if not fits or not is_scale_dtype(reader.dtype(scales)):
            raise misfit(*parts.values())
        if scheme.get("desc_act"):
            require_key(qweight, f"{name}.g_idx", keys)
        parts["g_idx"] = f"{name}.g_idx" if f"{name}.g_idx" in keys else ""
        index = parts["g_idx"] if has_act_order(reader, parts["g_idx"], width, group, groups) else ""
        points = unpack_zero_points(read_all(reader, qzeros), module_bits, lag, rows)
        has_zeros = bool((points != 1 << (module_bits - 1)).any())
        scale = reader.dtype(scales)
        tensors[f"{name}.weight"] = GPTQ(parts, rows, width, module_bits, group, scale, has_zeros, index, columns, lag)
    return tensors


def _check_group(size: Any) -> None:
    if type(size) is not int or not (size == -1 or size > 0):
        raise WeftError(f"group_size={size!r} must be a positive integer, or -1 for one group")


def _find_weights(keys: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name of each module with a qweight, and the keys of its qweight, scales and qzeros."""
    for key in keys:
        if (name := key.removesuffix(".qweight")) != key:
            yield name, {part: require_key(key, f"{name}.{part}", keys) for part in ("qweight", "scales", "qzeros")}


@dataclass(frozen=True)
class AWQ(_ColumnIntegers):
    """An AWQ weight of 4 bits."""

    def codes(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unpack_outputs(reader, self.keys["qweight"], start, stop)

    def zeros(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self._unpack_outputs(reader, self.keys["qzeros"], start, stop)

    def _unpack_outputs(self, reader: TensorReader, key: str, start: int, stop: int) -> Array:
        """Return the integers u8 [stop - start, n] of outputs ``start:stop`` of the tensor `key` [n, out / 8]."""
        first = start // 8
        words = self.columns.read(reader, key, first, -(-stop // 8)).view(np.uint32)
        codes = words[:, None] >> (4 * _AWQ_ORDER.astype(np.uint32))[:, None] & np.uint32(15)
        return codes.astype(np.uint8).reshape(-1, words.shape[1])[start - 8 * first : stop - 8 * first]


def read_awq(reader: TensorReader, keys: Collection[str], scheme: Mapping[str, Any]) -> dict[str, QuantizedTensor]:
    """Return the quantized weights among the tensors `keys` of an AWQ folder, keyed by name.

    Raises:
        WeftError: if the config `scheme` states an unsupported layout, or tensors are missing or do not fit.
    """
    bits, size = scheme.get("bits", scheme.get("w_bit")), scheme.get("group_size", scheme.get("q_group_size", -1))
    version = str(scheme.get("version", scheme.get("format", "gemm"))).lower()
    if version not in _AWQ_VERSIONS:
        raise WeftError(f"version={version!r} is not supported, only 'gemm'")
    if bits != 4:
        raise WeftError(f"bits={bits!r} is not supported, only 4")
    _check_group(size)
    columns, tensors = Columns(), dict[str, QuantizedTensor]()
    for name, parts in _find_weights(keys):
        qweight, scales, qzeros = parts.values()
        shapes = list(map(reader.shape, parts.values()))
        width, rows = (shapes[0][0], 8 * shapes[0][1]) if len(shapes[0]) == 2 else (0, 0)
        group = width if size == -1 else size
        groups = width // group if group else 0
        ints = {reader.dtype(qweight), reader.dtype(qzeros)}
        fits = groups * group == width and shapes[1:] == [(groups, rows), (groups, rows // 8)]
        if not width or not fits or ints != {dtypes.i32} or not is_scale_dtype(reader.dtype(scales)):
            layouts = f"f16, bf16 or f32 [in / {group}, out], and qzeros i32 [in / {group}, out / 8]"
            expected = f"qweight must be i32 [in, out / 8], scales {layouts}"
            raise misfit_error(reader, *parts.values(), expected=expected)
        tensors[f"{name}.weight"] = AWQ(parts, rows, width, 4, group, reader.dtype(scales), True, "", columns)
    return tensors
