"""Weight matrices: the parameters that products multiply by and lookups read, as what may be quantized."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.recipes.blocks.floats import tensor_scale
from weft.ir.recipes.readers import Array, switched

from ..analysis.projections import THROUGH

OPERANDS = {ops.linear: ("weight",), ops.norm_linear: ("weight",), ops.embedding: ("table",)}
EXPERTS = ("gate", "up", "down")
STEPS = 6  # between the scores of a router and its choice: noise, biases, a softmax


@dataclass(frozen=True)
class Matrix:
    """A weight [..., out, in] that nothing but products and lookups read, and the nodes that do, in order.

    `kind` is ``linear``; ``experts``, a stack; ``table``, if it is looked up; or ``head``, if it makes the logits. A
    tied table is a head.
    """

    param: Param
    kind: str
    readers: tuple[Node, ...]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.param.type.concrete({}):
            count *= size
        return count


def matrices(graph: Graph) -> dict[Param, Matrix | str]:
    """Return every matrix that products or lookups read, or why it cannot be changed for them alone; routers are left
    out, whose choices a rounded weight would change."""
    found: dict[Param, Matrix | str] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    slots = switched(graph.reader)
    for param in graph.params.values():
        readers = sorted(param.users, key=lambda node: order[node])
        if not any(_reads(node, param) for node in readers) or param.recipe.constant:
            continue
        if any(_routes(node) for node in readers):
            found[param] = "it is the weight of a router"
        elif slots is not None and slots.reads_slots(param.recipe.sources()):
            found[param] = "it belongs to an adapter that is chosen when the model runs"
        elif param.is_output:
            found[param] = "it is an output of the graph"
        elif other := next((node for node in readers if not _reads(node, param)), None):
            found[param] = f"{other.op.name} (%{other.output.name}) reads it, too"
        elif not all(isinstance(size, int) for size in param.shape):
            found[param] = "its shape is not fixed"
        else:
            found[param] = Matrix(param, _kind(param, readers), tuple(readers))
    return found


def units(found: Iterable[Matrix]) -> list[list[Matrix]]:
    """Matrices that take the same layout: those behind the query, key and value of an attention that multiply the same
    value, which may be packed, and every other by itself."""
    by_param = {matrix.param: matrix for matrix in found}
    grouped: list[list[Matrix]] = []
    for matrix in list(by_param.values()):
        if matrix.param not in by_param:
            continue
        node = matrix.readers[0]
        beside = [matrix.param]
        if _feeds_attention(node) and (x := node.inputs[0]) is not None:
            same = [other for other in x.users if other.op is node.op and _feeds_attention(other)]
            beside = [weight for other in same if isinstance(weight := other.operand("weight"), Param)]
        grouped.append([by_param.pop(param) for param in dict.fromkeys(beside) if param in by_param])
    return grouped


def tensor_scales(found: Iterable[Matrix]) -> dict[Matrix, tuple[float, ...]]:
    """Return the numbers f32 that nvfp4 counts scales in: one for each matrix, or for each of a stack.

    Matrices that multiply the same value share it: runtimes multiply query, key and value, or gate and up, by one
    product, which has one scale.

    Raises:
        WeftError: where a weight is not finite.
    """
    largest = {matrix: _largest(matrix.param) for matrix in found}
    beside: dict[object, list[Matrix]] = {}
    for matrix in largest:
        beside.setdefault(_multiplied(matrix), []).append(matrix)
    scales: dict[Matrix, tuple[float, ...]] = {}
    for members in beside.values():
        most = np.maximum.reduce([largest[matrix] for matrix in members])
        scales |= dict.fromkeys(members, tuple(map(tensor_scale, most.tolist())))
    return scales


def _multiplied(matrix: Matrix) -> object:
    """The value that `matrix` multiplies, with what else must be the same; of tables and heads, themselves."""
    node = matrix.readers[0]
    if matrix.kind == "experts":
        return node, "down" if node.operand("down") is matrix.param else "up"
    if matrix.kind != "linear" or node.op not in (ops.linear, ops.norm_linear):
        return matrix
    return node.op, node.inputs[0]


def _largest(param: Param) -> Array:
    """The largest magnitude of a matrix, f32 [1], or of each one in a stack."""
    reader, stacked = param.graph.reader, param.type.rank > 2
    parts = [np.abs(rows).max(tuple(range(1, rows.ndim))) for rows in param.recipe.blocks(reader)]
    largest = np.concatenate(parts).astype(np.float32)
    if not np.isfinite(largest).all():
        raise WeftError(
            f"a weight of {', '.join(param.recipe.sources()) or param.name} is not finite: it cannot be quantized"
        )
    return largest if stacked else largest.max(keepdims=True)


def _feeds_attention(node: Node) -> bool:
    """Return whether what `node` makes is q, k or v of an attention, perhaps after rotations, reshapes and norms."""
    if node.op not in (ops.linear, ops.norm_linear):
        return False
    value = node.output
    while len(value.users) == 1:
        (user,) = value.users
        if user.op is ops.attention:
            return True
        if not THROUGH & user.op.traits:
            return False
        value = user.output
    return False


def named(param: Param, patterns: Iterable[str]) -> bool:
    """Return whether the name of `param`, or a part of it between dots, matches one of `patterns` (``*.down.*``)."""
    return any(
        fnmatchcase(param.name, p) or any(fnmatchcase(part, p) for part in param.name.split(".")) for p in patterns
    )


def _reads(node: Node, param: Param) -> bool:
    names = OPERANDS.get(node.op, EXPERTS if node.op is ops.moe else ())
    return sum(v is param for v in node.inputs) == sum(node.operand(name) is param for name in names)


def _kind(param: Param, readers: list[Node]) -> str:
    if any(node.op is ops.moe for node in readers):
        return "experts"
    logits = param.graph.outputs.get("logits")
    if logits is not None and any(node.op is not ops.embedding and _leads_to(node.output, logits) for node in readers):
        return "head"
    return "table" if any(node.op is ops.embedding for node in readers) else "linear"


def _leads_to(value: Value, goal: Value) -> bool:
    """Return whether `goal` is `value`, or made of it elementwise, by moving rows, or by a last linear map of them."""
    while value is not goal:
        users = value.users
        if len(users) != 1:
            return False
        (user,) = users
        if user.op is not ops.linear and not {Trait.ELEMENTWISE, Trait.VIEW, Trait.COPY} & user.op.traits:
            return False
        value = user.output
    return True


def _routes(node: Node) -> bool:
    """Return whether what `node` makes is the scores of a router, after a few steps of elementwise arithmetic."""
    values = set(node.outputs)
    for _ in range(STEPS):
        users = {user for value in values for user in value.users}
        if any(user.op in (ops.route, ops.expert_choice, ops.top_k) for user in users):
            return True
        plain = (user for user in users if Trait.ELEMENTWISE in user.op.traits or user.op is ops.softmax)
        values = {value for user in plain for value in user.outputs}
    return False
