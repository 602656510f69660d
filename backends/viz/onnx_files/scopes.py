"""Scopes of the operations of an ONNX file, inferred from metadata and names that exporters write.

PyTorch's exporter writes the modules of a node into its metadata. Others put them into its name: "/model/layers.0/attn/
MatMul", "model/layer_._0/dense/MatMul". Without either, equal consecutive segments of operations are layers.
Two operations are equal if they have the same operator, attributes and shapes of weights, and if each of their operands
is the same value, or was produced at the same distance before them. The run of segments that covers most operations is
found first; then the operations before and after it are searched (`find_layer_segments`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .onnx_constants import Constant, OnnxOperation

NUMBERED = re.compile(r"(.*?)[\W_]*(\d+)")
PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")  # a name that is a path already
QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
LISTED = re.compile(r"\[.*\]", re.DOTALL)
FEWEST = 4  # least number of operations with a name such as layer_0 to form a layer
DEEPEST = 32  # nested boxes
LONGEST_WORD = 200  # characters of a part's name
HALVES = ("encoder", "decoder")

Scope = tuple[str, ...]


def read_exported_scope(metadata: Mapping[str, str]) -> Scope | None:
    """Return the modules that contain a node, from the metadata of PyTorch's exporter; None if it has none.

    `name_scopes` is a list such as "['', 'model', 'model.layers.0', 'linear_3']", whose last item is the operation;
    `namespace` has the same with classes: ": Net/model: Model/model.layers.0: Layer/linear_3: aten.linear.default".
    """
    listed = metadata.get("pkg.torch.onnx.name_scopes", "")
    names = [a or b for a, b in QUOTED.findall(listed)] if LISTED.fullmatch(listed) else []
    if not names and "namespace" in metadata:
        names = [part.partition(":")[0].strip() for part in metadata["namespace"].split("/")]
    return _split_words(names[-2]) if len(names) > 1 else None


def name_operations(ops: Sequence[OnnxOperation], constants: Mapping[str, Constant]) -> list[tuple[str, str]]:
    """Return (scope, unique name) of every operation; the name begins with the scope."""
    scopes = [_infer_scope(op) for op in ops]
    scopes = _fill_gaps(ops, scopes) if any(scopes) else find_layer_segments(ops, constants)
    scopes = _split_numbers(scopes)
    for _ in range(4):
        if (stem := _find_common_root(scopes)) is None:
            break
        scopes = [scope[1:] if scope[:1] == (stem,) else scope for scope in scopes]
    used = {".".join(scope[:i]) for scope in scopes for i in range(1, len(scope) + 1)}
    return [(".".join(scope), make_unique(_name_op(op, scope), used)) for op, scope in zip(ops, scopes, strict=True)]


def _infer_scope(op: OnnxOperation) -> Scope:
    if op.scopes is not None:
        return op.scopes
    *calls, name = op.names
    inner = _split_words(name)[:-1] if "/" in name or name.count(".") > name.count("..") * 2 else ()
    return (*(call.replace(".", "_").strip("/") for call in calls), *inner)


def _split_words(name: str) -> Scope:
    words = (word[:LONGEST_WORD] for word in re.split(r"[/.]", name.replace("_._", "_")) if re.search(r"\w", word))
    return tuple(words)[-DEEPEST:]


def _name_op(op: OnnxOperation, scope: Scope) -> str:
    """Return a name for `op` that begins with `scope`.

    It is the name of the first result if that is directly in `scope` and ends without a digit. Else it is `scope` and
    the last word of the operation's name; a word that is only the operator and a model-wide number becomes the
    operator.
    """
    stem = ".".join((*scope, ""))
    result = next((x for x in op.outputs if x), "")
    local = result.removeprefix(stem)
    if PLAIN.fullmatch(result) and result == stem + local and "." not in local and not result[-1].isdigit():
        return result
    words = _split_words(op.names[-1])
    counted = not words or re.fullmatch(rf"(node_)?{re.escape(op.kind)}_?\d*", words[-1], re.IGNORECASE)
    return stem + (op.kind if counted else words[-1])


def make_unique(name: str, taken: set[str]) -> str:
    """Return `name`, with a number appended if `name` is in `taken`; add the result to `taken`."""
    unique, n = name, 1
    while unique in taken:
        n += 1
        unique = f"{name}_{n}"
    taken.add(unique)
    return unique


def _fill_gaps(ops: Sequence[OnnxOperation], scopes: list[Scope]) -> list[Scope]:
    """Return `scopes` with the empty ones filled, except those that the exporter recorded.

    An operation gets the common prefix of the longest scope of its producers and the scope of its first reader. Its
    scope stays empty if it has no producer or no reader.
    """
    makers = {x: i for i, op in enumerate(ops) for x in op.outputs if x}
    first: dict[int, int] = {}
    for i, op in enumerate(ops):
        for x in op.inputs:
            if x in makers:
                first.setdefault(makers[x], i)
    filled = list(scopes)
    for i, op in enumerate(ops):
        if filled[i] or op.scopes is not None or i not in first:
            continue
        sources = [filled[makers[x]] for x in op.inputs if x in makers]
        if sources:
            longest = max(sources, key=len)
            pairs = zip(longest, scopes[first[i]], strict=False)
            filled[i] = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return filled


def _split_numbers(scopes: list[Scope]) -> list[Scope]:
    """Return `scopes` with numbered words such as layer_0 split in two, if FEWEST operations have each number."""
    for depth in range(max(map(len, scopes), default=0) * 2):
        sizes: dict[tuple[Scope, str], Counter[int]] = {}
        for scope in scopes:
            match = NUMBERED.fullmatch(scope[depth]) if len(scope) > depth and not scope[depth].isdigit() else None
            if match and match[1]:
                sizes.setdefault((scope[:depth], match[1]), Counter())[int(match[2])] += 1
        lists = {key for key, members in sizes.items() if len(members) > 1 and min(members.values()) >= FEWEST}
        scopes = [_split_number(scope, depth, lists) for scope in scopes]
    return scopes


def _split_number(scope: Scope, depth: int, lists: set[tuple[Scope, str]]) -> Scope:
    match = NUMBERED.fullmatch(scope[depth]) if len(scope) > depth else None
    if match is None or (scope[:depth], match[1]) not in lists:
        return scope
    return (*scope[:depth], match[1], match[2], *scope[depth + 1 :])


def _find_common_root(scopes: Sequence[Scope]) -> str | None:
    """Return the first word of all scopes with layer numbers, or of all scopes if none has one. Return None if these
    words differ, if the word names a list of layers or is in HALVES, or if scopes begin with more than two words."""
    first = {scope[0]: None for scope in scopes if scope}
    layered = {scope[0] for scope in scopes if any(word.isdigit() for word in scope[1:])}
    stem = next(iter(layered), None) if len(layered) == 1 else next(iter(first), None) if len(first) == 1 else None
    if stem is None or len(first) > 2 or stem in HALVES:
        return None
    of_list = any(scope[:1] == (stem,) and len(scope) > 1 and scope[1].isdigit() for scope in scopes)
    return None if of_list else stem


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
