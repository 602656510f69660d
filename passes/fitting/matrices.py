"""Weight matrices: the parameters of linears, experts and embeddings, which may be quantized."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.recipes.blocks.floats import compute_tensor_scale
from weft.ir.recipes.readers import Array, find_switched_tensors

from ..analysis.projections import TOKENWISE_TRAITS

OPERANDS = {ops.linear: ("weight",), ops.norm_linear: ("weight",), ops.embedding: ("table",)}
EXPERTS = ("gate", "up", "down")
STEPS = 6  # limit of ops from the scores of a router to its choice of experts: noise, biases, a softmax


@dataclass(frozen=True)
class Matrix:
    """A weight [..., out, in] that only linears, experts and embeddings read; `readers` are in graph order.

    `kind` is ``linear``, ``experts`` (a stack), ``table`` (of an embedding) or ``head`` (computes the logits, whether
    tied to a table or not).
    """

    param: Param
    kind: str
    readers: tuple[Node, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.param.type.concrete({}))


def find_matrices(graph: Graph) -> dict[Param, Matrix | str]:
    """Return the `Matrix` of each parameter that is a weight of linears, experts or embeddings, or a reason (str).

    The reason states why it must not be quantized. Parameters computed by a formula (`Recipe.is_constant`) are omitted.
    """
    result: dict[Param, Matrix | str] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    slots = find_switched_tensors(graph.reader)
    for param in graph.params.values():
        readers = sorted(param.users, key=lambda node: order[node])
        if not any(_is_weight_of(node, param) for node in readers) or param.recipe.is_constant:
            continue
        if any(_is_router(node) for node in readers):
            result[param] = "it is the weight of a router"
        elif slots is not None and slots.reads_slots(param.recipe.sources()):
            result[param] = "it belongs to an adapter that is chosen when the model runs"
        elif param.is_output:
            result[param] = "it is an output of the graph"
        elif other_reader := next((node for node in readers if not _is_weight_of(node, param)), None):
            result[param] = f"{other_reader.op.name} (%{other_reader.output.name}) also reads it"
        elif not all(isinstance(size, int) for size in param.shape):
            result[param] = "its shape is not fixed"
        else:
            result[param] = Matrix(param, _find_kind(param, readers), tuple(readers))
    return result


def group_matrices(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Group the matrices that must have one layout: q, k and v of one input. Other matrices are groups of one."""
    by_param = {matrix.param: matrix for matrix in matrices}
    grouped: list[list[Matrix]] = []
    for matrix in list(by_param.values()):
        if matrix.param not in by_param:
            continue
        node = matrix.readers[0]
        members = [matrix.param]
        if _is_attention_projection(node) and (x := node.inputs[0]) is not None:
            products = [product for product in x.users if product.op is node.op and _is_attention_projection(product)]
            members = [weight for product in products if isinstance(weight := product.operand("weight"), Param)]
        grouped.append([by_param.pop(param) for param in dict.fromkeys(members) if param in by_param])
    return grouped


def compute_tensor_scales(matrices: Iterable[Matrix]) -> dict[Matrix, tuple[float, ...]]:
    """Return the f32 scales that multiply the block scales of nvfp4: one per matrix of a stack, or a single one.

    Matrices that multiply the same value get the same scale, as runtimes compute q, k and v, or gate and up, by one
    product with one scale.

    Raises:
        WeftError: if a weight is not finite.
    """
    largest = {matrix: _find_largest(matrix.param) for matrix in matrices}
    by_input: dict[object, list[Matrix]] = {}
    for matrix in largest:
        by_input.setdefault(_make_input_key(matrix), []).append(matrix)
    scales: dict[Matrix, tuple[float, ...]] = {}
    for members in by_input.values():
        largest_shared = np.maximum.reduce([largest[matrix] for matrix in members])
        scales |= dict.fromkeys(members, tuple(map(compute_tensor_scale, largest_shared.tolist())))
    return scales


def _make_input_key(matrix: Matrix) -> object:
    """Return a key that is equal for matrices that one product may apply; tables and heads get unique keys."""
    node = matrix.readers[0]
    if matrix.kind == "experts":
        return node, "down" if node.operand("down") is matrix.param else "up"
    if matrix.kind != "linear" or node.op not in (ops.linear, ops.norm_linear):
        return matrix
    return node.op, node.inputs[0]


def _find_largest(param: Param) -> Array:
    """Return the largest magnitude, f32 [n], of each of the n matrices stacked in `param`; refuse NaN and ∞."""
    reader, stacked = param.graph.reader, param.type.rank > 2
    parts = [np.abs(rows).max(tuple(range(1, rows.ndim))) for rows in param.recipe.blocks(reader)]
    largest = np.concatenate(parts).astype(np.float32)
    if not np.isfinite(largest).all():
        raise WeftError(
            f"a weight of {', '.join(param.recipe.sources()) or param.name} is not finite: it cannot be quantized"
        )
    return largest if stacked else largest.max(keepdims=True)


def _is_attention_projection(node: Node) -> bool:
    """Return whether an attention reads the linear `node`, directly or after tokenwise ops with one reader each."""
    if node.op not in (ops.linear, ops.norm_linear):
        return False
    value = node.output
    while len(value.users) == 1:
        (user,) = value.users
        if user.op is ops.attention:
            return True
        if not TOKENWISE_TRAITS & user.op.traits:
            return False
        value = user.output
    return False


def has_matching_name(param: Param, patterns: Iterable[str]) -> bool:
    """Return whether one of the globs `patterns` matches the name of `param`, or one part of it between dots."""
    return any(
        fnmatchcase(param.name, p) or any(fnmatchcase(part, p) for part in param.name.split(".")) for p in patterns
    )


def _is_weight_of(node: Node, param: Param) -> bool:
    names = OPERANDS.get(node.op, EXPERTS if node.op is ops.moe else ())
    return sum(v is param for v in node.inputs) == sum(node.operand(name) is param for name in names)


def _find_kind(param: Param, readers: list[Node]) -> str:
    if any(node.op is ops.moe for node in readers):
        return "experts"
    logits = param.graph.outputs.get("logits")
    if logits is not None and any(node.op is not ops.embedding and _has_path(node.output, logits) for node in readers):
        return "head"
    return "table" if any(node.op is ops.embedding for node in readers) else "linear"


def _has_path(value: Value, goal: Value) -> bool:
    """Return whether single readers (elementwise ops, views, copies, linears) lead from `value` to `goal`."""
    while value is not goal:
        if len(value.users) != 1:
            return False
        (user,) = value.users
        if user.op is not ops.linear and not {Trait.ELEMENTWISE, Trait.VIEW, Trait.COPY} & user.op.traits:
            return False
        value = user.output
    return True


def _is_router(node: Node) -> bool:
    """Return whether an op that chooses experts reads `node`, directly or after fewer than `STEPS` elementwise ops."""
    values = set(node.outputs)
    for _ in range(STEPS):
        users = {user for value in values for user in value.users}
        if any(user.op in (ops.route, ops.expert_choice, ops.top_k) for user in users):
            return True
        plain = (user for user in users if Trait.ELEMENTWISE in user.op.traits or user.op is ops.softmax)
        values = {value for user in plain for value in user.outputs}
    return False
