"""Scopes of the operations of an ONNX file, inferred from metadata and names that exporters write.

PyTorch's exporter writes the modules of a node into its metadata. Others put them into its name: "/model/layers.0/attn/
MatMul", "model/layer_._0/dense/MatMul". Without either, equal consecutive segments of operations are layers
(`find_layer_segments`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .onnx_constants import Constant
from .segments import find_layer_segments
from .types import OnnxOperation

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
            filled[i] = _find_prefix([max(sources, key=len), scopes[first[i]]])
    return filled


def _find_prefix(scopes: Iterable[Scope]) -> Scope:
    columns = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*scopes, strict=False))
    return tuple(words[0] for words in columns)


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
