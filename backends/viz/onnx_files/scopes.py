"""Scopes of the operations of an ONNX file, inferred from the traces that exporters leave.

PyTorch's exporter writes the modules of a node into its metadata. Others put them into its name: "/model/layers.0/attn/
MatMul", "model/layer_._0/dense/MatMul". Where nothing tells, equal stretches of operations one after the other are
layers (`segments`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .constants import Constant
from .operation import Op
from .segments import segments

NUMBERED = re.compile(r"(.*?)[\W_]*(\d+)")
PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")  # a name that is a path already
QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
LISTED = re.compile(r"\[.*\]", re.DOTALL)
FEWEST = 4  # operations of a layer that a name as layer_0 makes one
DEEPEST = 32  # boxes in each other
LONGEST_WORD = 200  # characters of a part's name
HALVES = ("encoder", "decoder")

Scope = tuple[str, ...]


def exported_scope(metadata: Mapping[str, str]) -> Scope | None:
    """The modules that a node is in, from the metadata of PyTorch's exporter; None where it says nothing.

    `name_scopes` is a list as "['', 'model', 'model.layers.0', 'linear_3']", of which the last is the operation itself;
    `namespace` has the same with classes: ": Net/model: Model/model.layers.0: Layer/linear_3: aten.linear.default".
    """
    listed = metadata.get("pkg.torch.onnx.name_scopes", "")
    names = [a or b for a, b in QUOTED.findall(listed)] if LISTED.fullmatch(listed) else []
    if not names and "namespace" in metadata:
        names = [part.partition(":")[0].strip() for part in metadata["namespace"].split("/")]
    return _split(names[-2]) if len(names) > 1 else None


def named(ops: Sequence[Op], constants: Mapping[str, Constant]) -> list[tuple[str, str]]:
    """The scope of every operation, and the name that no other has, which begins with it."""
    scopes = [_scope(op) for op in ops]
    scopes = _between(ops, scopes) if any(scopes) else segments(ops, constants)
    scopes = _lists(scopes)
    for _ in range(4):
        if (stem := _common(scopes)) is None:
            break
        scopes = [scope[1:] if scope[:1] == (stem,) else scope for scope in scopes]
    taken = {".".join(scope[:i]) for scope in scopes for i in range(1, len(scope) + 1)}
    return [(".".join(scope), fresh(_path(op, scope), taken)) for op, scope in zip(ops, scopes, strict=True)]


def _scope(op: Op) -> Scope:
    if op.scopes is not None:
        return op.scopes
    *calls, own = op.names
    inner = _split(own)[:-1] if "/" in own or own.count(".") > own.count("..") * 2 else ()
    return (*(call.replace(".", "_").strip("/") for call in calls), *inner)


def _split(name: str) -> Scope:
    words = (word[:LONGEST_WORD] for word in re.split(r"[/.]", name.replace("_._", "_")) if re.search(r"\w", word))
    return tuple(words)[-DEEPEST:]


def _path(op: Op, scope: Scope) -> str:
    """The name of an operation: of its first result where that is a path in its scope, else its own; its operator where
    that only has a number behind it, which counts over the whole model."""
    stem = ".".join((*scope, ""))
    result = next((x for x in op.outputs if x), "")
    if (
        PLAIN.fullmatch(result)
        and result.startswith(stem)
        and "." not in result[len(stem) :]
        and not result[-1:].isdigit()
    ):
        return result
    words = _split(op.names[-1])
    counted = not words or re.fullmatch(rf"(node_)?{re.escape(op.kind)}_?\d*", words[-1], re.IGNORECASE)
    return stem + (op.kind if counted else words[-1])


def fresh(name: str, taken: set[str]) -> str:
    """`name`, with a number behind it where it is taken; takes it."""
    unique, n = name, 1
    while unique in taken:
        n += 1
        unique = f"{name}_{n}"
    taken.add(unique)
    return unique


def _between(ops: Sequence[Op], scopes: list[Scope]) -> list[Scope]:
    """`scopes`, where one is empty the common one of what its operation reads and of what first reads that."""
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
            filled[i] = _shared([max(sources, key=len), scopes[first[i]]])
    return filled


def _shared(scopes: Iterable[Scope]) -> Scope:
    """The beginning that all have."""
    columns = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*scopes, strict=False))
    return tuple(words[0] for words in columns)


def _lists(scopes: list[Scope]) -> list[Scope]:
    """`scopes`, words as layer_0, layer_1 … as numbered ones of a list."""
    for depth in range(max(map(len, scopes), default=0) * 2):
        sizes: dict[tuple[Scope, str], Counter[int]] = {}
        for scope in scopes:
            match = NUMBERED.fullmatch(scope[depth]) if len(scope) > depth and not scope[depth].isdigit() else None
            if match and match[1]:
                sizes.setdefault((scope[:depth], match[1]), Counter())[int(match[2])] += 1
        lists = {key for key, members in sizes.items() if len(members) > 1 and min(members.values()) >= FEWEST}
        scopes = [_listed(scope, depth, lists) for scope in scopes]
    return scopes


def _listed(scope: Scope, depth: int, lists: set[tuple[Scope, str]]) -> Scope:
    match = NUMBERED.fullmatch(scope[depth]) if len(scope) > depth else None
    if match is None or (scope[:depth], match[1]) not in lists:
        return scope
    return (*scope[:depth], match[1], match[2], *scope[depth + 1 :])


def _common(scopes: Sequence[Scope]) -> str | None:
    """The first word of all numbered scopes, if hardly anything stands beside it: a box around all says nothing."""
    first = {scope[0]: None for scope in scopes if scope}
    layered = {scope[0] for scope in scopes if any(word.isdigit() for word in scope[1:])}
    stem = next(iter(layered), None) if len(layered) == 1 else next(iter(first), None) if len(first) == 1 else None
    if stem is None or len(first) > 2 or stem in HALVES:
        return None
    of_list = any(scope[:1] == (stem,) and len(scope) > 1 and scope[1].isdigit() for scope in scopes)
    return None if of_list else stem
