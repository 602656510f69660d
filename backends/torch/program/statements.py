"""Statements over named tensors, modules and weights, each in a scope: the representation between graph and Python.

A lowering converts a node to statements. The `text` of a `Statement` is a Python expression with placeholders ``{0}``,
``{1}`` … for the operands. `codegen` then groups the statements of a scope into a method and writes its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.ir import ops
from weft.ir.graph import Node, Param
from weft.ir.recipes.blocks import Stored
from weft.ir.recipes.frequencies import AlibiSlopes, RopeFrequencies
from weft.ir.recipes.recipe import Recipe
from weft.ir.types import Shape, dtypes
from weft.ir.types.dtypes import DType

TORCH_NAMES = {  # of dtypes
    **{"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "bool": "bool"},
    **{"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8"},
    **{"u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8"},
}
MOVES = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze)  # their result is named after its reader
TOP = ""  # the scope of the model itself


@dataclass(eq=False)
class Var:
    """The result of a statement or an input of the model: a tensor or a Python value. name: preferred name. shape: None
    if unknown or not a tensor. type: annotation. default: source of the default value of an input, "" for none."""

    name: str
    shape: Shape | None = None
    type: str = "Tensor"
    default: str = ""
    skips: bool = False  # modules that read it are not called where it is None


@dataclass(frozen=True)
class Submodule:
    """A module at `path`, which the expression `init` constructs; `tensors` names its parameters and buffers."""

    path: str
    init: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParamRef:
    """A tensor at the dotted `path` in the model: a parameter, or if `constant` a buffer, never trained or cast."""

    path: str
    shape: tuple[Any, ...]  # ints, or named sizes
    constant: bool = False
    dtype: str = ""  # as torch spells it, unless it is the dtype of the model


@dataclass(frozen=True)
class CacheSlot:
    """The cache or state of a layer, None in a forward without a cache. `init` is the expression that constructs it
    from `batch`, `length` and ``{like}``, a weight that gives dtype and device; `type` is its annotation."""

    name: str
    init: str
    type: str


Operand = Var | Submodule | ParamRef | CacheSlot


@dataclass(eq=False)
class Statement:
    """``results = text``, where `operands` fill the placeholders of `text`. Without text it emits no code, but makes
    its operands available in `scope`. replaces: index of an operand whose name the first result may reuse. comment:
    trailing comment in the source, such as the new layout."""

    text: str
    operands: tuple[Operand, ...]
    results: tuple[Var, ...]
    scope: str
    replaces: int | None = None
    comment: str = ""
    early: bool = False  # shared by layers, so emitted before them
    node: Node | None = None  # that it computes


@dataclass
class Program:
    """The statements of a model in order, its inputs and outputs, and its weights."""

    name: str
    inputs: list[Var] = field(default_factory=list)
    outputs: dict[str, Operand] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    weights: dict[str, Param] = field(default_factory=dict)  # state_dict key -> parameter of the graph
    functions: dict[str, str] = field(default_factory=dict)  # generated for this model: source by name
    cached: bool = False
    nodes: list[Node] = field(default_factory=list)  # all nodes of the graph


def is_inside(path: str, scope: str) -> bool:
    """Return whether `path` is strictly below `scope`; every path is below ""."""
    return not scope or path.startswith(f"{scope}.")


def relative_to(path: str, scope: str) -> str:
    return path[len(scope) + 1 :] if scope else path


def write_formula(recipe: Recipe) -> str | None:
    """Return a Python expression that computes `recipe` on the device of operand ``{0}``. Return None for recipes other
    than ALiBi slopes and RoPE frequencies whose scaling is none, linear, ntk, dynamic, llama3 or truncated yarn."""
    if isinstance(recipe, AlibiSlopes):
        return f"alibi_slopes({recipe.heads}, {recipe.max_bias!r}, {{0}}.device)"
    if not isinstance(recipe, RopeFrequencies):
        return None
    r = recipe
    if r.scaling in ("none", "linear", "ntk", "dynamic"):
        divisor = f" / {simplify_number(r.factor)}" if r.scaling == "linear" else ""
        return f"rope_frequencies({r.dim}, {simplify_number(r.base(r.dim, r.theta))}, {{0}}.device){divisor}"
    if r.scaling == "llama3":
        settings = (r.factor, r.low_freq, r.high_freq, r.original)
    elif r.scaling == "yarn" and r.truncate:
        settings = (r.factor, r.beta_fast, r.beta_slow, r.original)
    else:
        return None
    arguments = ", ".join(repr(simplify_number(x)) for x in settings)
    theta = simplify_number(r.theta)
    return f"{r.scaling}_frequencies(rope_frequencies({r.dim}, {theta}, {{0}}.device), {theta}, {arguments})"


def get_stored_dtype(param: Param, dtype: DType) -> DType:
    """Return the dtype of a parameter in a model of `dtype`: integers and block data keep their dtype, constant tables
    are f32, and all other parameters have `dtype`."""
    kind = param.type.dtype
    if not kind.is_float or param.recipe.has(Stored):
        return kind
    return dtypes.f32 if param.recipe.is_constant else dtype


def simplify_number(x: float) -> float | int:
    """Return `x` as it is written in source: as an int if it is integral and |x| < 10¹⁵, else unchanged."""
    return int(x) if float(x).is_integer() and abs(x) < 1e15 else x
