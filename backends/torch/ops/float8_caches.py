"""Caches of keys and values in FP8: the scales of their heads."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param
from weft.ir.recipes import Full, Recipe, Reshape
from weft.ir.recipes.cache_scales import HeadScales
from weft.ir.types import TensorType, dtypes
from weft.passes.analysis.projections import Branch, branch_of, rows

from ..program.emitter import Emitter
from ..program.statements import ParamRef
from ..program.states import cached_nodes

NORMS = (ops.rms_norm, ops.layer_norm)


def scales(e: Emitter, node: Node) -> tuple[ParamRef, ParamRef] | None:
    """The scales f32 [kv_heads] of the keys and of the values that attention `node` caches; None if not in FP8."""
    refs = held_scales(e, node)
    for role, ref in zip("kv", refs or (), strict=False):
        e.program.weights[ref.path] = Param(e.graph, ref.path, TensorType(dtypes.f32, ref.shape), recipe(node, role)[0])
    return refs


def held_scales(e: Emitter, node: Node) -> tuple[ParamRef, ParamRef] | None:
    """The scales of attention `node` as its module holds them; None if its caches are not in FP8."""
    if not (e.float8_caches and can_be_float8(node)):
        return None
    k, v = (ParamRef(_name(node, role), (_heads(node),), constant=True, dtype="torch.float32") for role in "kv")
    return k, v


def can_be_float8(node: Node) -> bool:
    """Return whether the keys and values of attention `node` can be kept in FP8."""
    return node.operand("v") is not None and node.attrs.get("cache_bits") is None


def recipe(node: Node, role: str) -> tuple[Recipe, str]:
    """The recipe of the scales of keys (`role` k) or values (v), and why it is 1 if their size cannot be told."""
    heads, branch = _heads(node), branch_of(node, role)
    if isinstance(branch, str):
        return Full(1.0, (heads,)), branch
    width = node.required(role).width // heads
    if branch.norm is not None:  # of heads
        gain = _given(branch.norm, "weight")
        if not gain:
            return Full(1.0, (heads,)), ""
        column = Reshape(gain[0], (branch.norm.required("weight").width, 1))
        return HeadScales(column, heads, width, (), _given(branch.norm, "bias")), ""
    x = branch.linear.required("x").producer
    if x is None or x.op not in NORMS:
        return Full(1.0, (heads,)), f"{role} is a linear map of what no norm has made"
    weight, *biases = (_own(branch, whole) for whole in (branch.weight, branch.bias) if whole is not None)
    return HeadScales(weight, heads, width, _given(x, "weight"), tuple(biases)), ""


def untold(graph: Graph) -> list[str]:
    """Describe the caches that cannot be in FP8, and those whose scales are 1."""
    found = []
    for node in attentions(graph):
        where = f"%{node.output.name}"
        if not can_be_float8(node):
            found.append(f"{where} keeps its latents as they are: their scales would be those of no head")
            continue
        reasons = {role: recipe(node, role)[1] for role in "kv"}
        found += [f"{where} keeps {role} with a scale of 1: {why}" for role, why in reasons.items() if why]
    return found


def attentions(graph: Graph) -> list[Node]:
    """List the attentions that keep keys and values."""
    return [n for n in graph.nodes if n in cached_nodes(graph) and "v" in {o.name for o in n.op.operands}]


def _own(branch: Branch, whole: Param) -> Recipe:
    """The rows of a weight or bias that make the start of `branch`."""
    return rows(whole.recipe, *branch.span, whole.graph.reader) if branch.packed else whole.recipe


def _given(node: Node, operand: str) -> tuple[Recipe, ...]:
    """The recipe of an operand of a norm, if it has one."""
    given = node.operand(operand) if operand in {o.name for o in node.op.operands} else None
    return (given.recipe,) if isinstance(given, Param) else ()


def _heads(node: Node) -> int:
    return int(node.attrs.get("kv_heads") or node.attrs["heads"])


def _name(node: Node, role: str) -> str:
    """The name of a scale beside the attention's own weights, numbered where a module has several attentions."""
    cached = cached_nodes(node.graph)
    alike = [n for n in node.graph.nodes if n.scope == node.scope and n in cached and can_be_float8(n)]
    number = alike.index(node) + 1
    own = f"{role}_scale" + (f"_{number}" if number > 1 else "")
    return f"{node.scope}.{own}" if node.scope else own
