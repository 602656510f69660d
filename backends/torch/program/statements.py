"""Statements over named tensors, modules and weights, each in a scope: the form between a graph and Python.

A lowering turns a node into one or a few `Statement`s. Their text is a Python expression in which ``{0}``, ``{1}`` …
stand for the operands. `structure` then gathers the statements of a scope into a method, and `source` writes it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.ir import ops
from weft.ir.graph import Node, Param
from weft.ir.types import Shape

TORCH_NAMES = {  # of dtypes
    **{"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "bool": "bool"},
    **{"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8"},
    **{"u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8"},
}
MOVES = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze)  # what numbers are called does not change
TOP = ""  # the scope of the model itself


@dataclass(eq=False)
class Var:
    """Result of a statement or input of the model: a tensor (of `shape`, if known), or a number.

    `name` is what it would like to be called; `type` is its annotation, and `default` what it is if it is left out.
    """

    name: str
    shape: Shape | None = None
    type: str = "Tensor"
    default: str = ""
    skips: bool = False  # modules that read it are not called where it is None


@dataclass(frozen=True)
class Submodule:
    """A module of torch (or of the parts) at `path` that a statement calls; `init` makes it, and what it `holds`."""

    path: str
    init: str
    holds: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParamRef:
    """A tensor that a module holds at `path`: a parameter; or a `constant`, which is never trained or rounded."""

    path: str
    shape: tuple[Any, ...]  # numbers, or what has them by a name
    constant: bool = False
    dtype: str = ""  # as torch spells it, if it is not that of the model


@dataclass(frozen=True)
class CacheSlot:
    """Cache or state of a layer, None without a cache; `init` makes it for `batch` and `length`."""

    name: str
    init: str
    type: str


Operand = Var | Submodule | ParamRef | CacheSlot


@dataclass(eq=False)
class Statement:
    """``results = text``, where `operands` fill the places of `text`; `replaces` is the operand that the (first) result
    takes the place of, so that it may take over its name; `comment` says what the eye should know (a new layout). One
    without a text asks that what it reads is handed to its scope."""

    text: str
    operands: tuple[Operand, ...]
    results: tuple[Var, ...]
    scope: str
    replaces: int | None = None
    comment: str = ""
    early: bool = False  # shared by layers: it stands before them
    node: Node | None = None  # what it stands for


@dataclass
class Program:
    """The statements of a model in order, the values it is given and returns, and where weights come from."""

    name: str
    inputs: list[Var] = field(default_factory=list)
    outputs: dict[str, Operand] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    weights: dict[str, Param] = field(default_factory=dict)  # state_dict key -> parameter of the graph
    functions: dict[str, str] = field(default_factory=dict)  # of this model only: text by name
    cached: bool = False
    nodes: list[Node] = field(default_factory=list)  # of the graph


def inside(path: str, scope: str) -> bool:
    """Return whether `path` lies under `scope`."""
    return not scope or path.startswith(f"{scope}.")


def relative(path: str, scope: str) -> str:
    return path[len(scope) + 1 :] if scope else path
