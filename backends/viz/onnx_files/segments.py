"""Detection of layers as equal consecutive segments of operations, for models without layer numbers in names.

Two operations are equal if they have the same operator, attributes and shapes of weights, and if each of their operands
is the same value, or was produced at the same distance before them. The run of segments that covers most operations is
found first; then the operations before and after it are searched.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .onnx_constants import Constant
from .types import OnnxOperation

SHORTEST = 5  # least number of operations in a layer


Array = np.ndarray[Any, np.dtype[np.int64]]


def find_layer_segments(ops: Sequence[OnnxOperation], constants: Mapping[str, Constant]) -> list[tuple[str, ...]]:
    """Return the scope of every operation, such as ("layers", "0"); () for those outside of layers."""
    scopes: list[tuple[str, ...]] = [()] * len(ops)
    kinds, reads = _encode_operations(ops, constants)
    names, pending = iter(("layers", *(f"layers_{i}" for i in range(2, len(ops) + 2)))), [(0, len(ops))]
    while pending:
        start, end = pending.pop()
        run = _find_longest(kinds[start:end], reads[start:end])
        if run is None:
            continue
        first, period, count = run
        first, name = _choose_phase(ops, first + start, period, count), next(names)
        count -= first + count * period > end
        for i in range(first, first + period * count):
            scopes[i] = (name, str((i - first) // period))
        pending += [(first + period * count, end), (start, first)]
    return scopes


def _encode_operations(ops: Sequence[OnnxOperation], constants: Mapping[str, Constant]) -> tuple[Array, Array]:
    """Return (kinds, reads): a number per operation, equal for operations that differ only in operands; and [operation,
    operand] the index of the producer (−1: a constant or absent; below −1: a number for each model input)."""
    numbers: dict[Hashable, int] = {}
    inputs: dict[str, int] = {}
    makers = {x: i for i, op in enumerate(ops) for x in op.outputs if x}
    widest = max((len(op.inputs) for op in ops), default=0)
    kinds = np.zeros(len(ops), np.int64)
    reads = np.full((len(ops), widest), -1, np.int64)
    for i, op in enumerate(ops):
        weights = []
        for k, x in enumerate(op.inputs):
            weight = constants.get(x)
            weights.append(None if weight is None else (weight.dtype, weight.shape, weight.text))
            if x and weight is None:
                reads[i, k] = makers[x] if x in makers else inputs.setdefault(x, -2 - len(inputs))
        attrs = tuple(sorted((name, a.SerializeToString()) for name, a in op.attrs.items()))
        kinds[i] = numbers.setdefault((op.kind, attrs, tuple(weights), len(op.outputs)), len(numbers))
    return kinds, reads


def _find_longest(kinds: Array, reads: Array) -> tuple[int, int, int] | None:
    """Return (first operation, operations per layer, number of layers) of the longest run of equal layers, of equally
    long ones that of the shortest layers; None if no layer repeats. See `_encode_operations` for the arguments."""
    best, segment = 0, None
    # Every period compares all operations: quadratic, hence in numpy.
    for period in range(SHORTEST, len(kinds) // 2 + 1):
        same = kinds[period:] == kinds[:-period]
        ahead = reads[period:] - reads[:-period]
        alike = same & ((ahead == period) | (ahead == 0)).all(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            first = _extend_back(start, period, same, reads)
            covered = (end - first) // period + 1
            if end - start >= SHORTEST and covered > 1 and covered * period > best:
                best, segment = covered * period, (first, period, covered)
    return segment


def _extend_back(start: int, period: int, same: Array, reads: Array) -> int:
    """Return the index at which the first layer begins: `start`, or up to period − 1 operations before it. Where later
    layers read a result of the previous layer, the first layer may read any one value from before it."""
    names: dict[int, int] = {}
    first = start
    for i in range(start - 1, max(start - period, -1), -1):
        if not same[i]:
            break
        for before, value in zip(reads[i].tolist(), reads[i + period].tolist(), strict=True):
            if value in (before, before + period):
                continue
            if value < 0 or before < 0 or names.setdefault(value, before) != before:
                return first
        first = i
    return first


def _choose_phase(ops: Sequence[OnnxOperation], first: int, period: int, count: int) -> int:
    """Return `first` moved forward by less than `period`, so that the fewest values cross boundaries of layers."""
    makers = {x: i for i, op in enumerate(ops) for x in op.outputs if x}
    last = list(range(len(ops)))
    for i, op in enumerate(ops):
        for x in op.inputs:
            if x in makers:
                last[makers[x]] = max(last[makers[x]], i)
    middle = first + period * max(0, count // 2 - 1)

    def crossing(cut: int) -> int:
        return sum(last[i] >= cut for i in range(max(0, cut - 2 * period), cut))

    return first + min(range(period), key=lambda shift: crossing(middle + shift))
