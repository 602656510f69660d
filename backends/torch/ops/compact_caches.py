"""KV caches in FP8, with a scale for each key-value head, and as integers, with the scales of pass quantize-cache."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param
from weft.ir.recipes import Full, Recipe, Reshape
from weft.ir.recipes.cache_scales import HeadScales
from weft.ir.types import TensorType, dtypes
from weft.passes.analysis.projections import find_branch, slice_rows

from ..program.emitter import Emitter
from ..program.stateful_nodes import find_cached_nodes
from ..program.statements import Operand, ParamRef, Var

NORMS = (ops.rms_norm, ops.layer_norm)


def add_scales(e: Emitter, node: Node) -> tuple[ParamRef, ParamRef] | None:
    """Return the scales f32 [kv_heads] of the keys and of the values that the attention `node` caches; None without
    FP8. They are added to the weights of the program."""
    refs = make_scale_refs(e, node)
    for role, ref in zip("kv", refs or (), strict=False):
        recipe, _ = make_scale_recipe(node, role)
        e.program.weights[ref.path] = Param(e.graph, ref.path, TensorType(dtypes.f32, ref.shape), recipe)
    return refs


def make_scale_refs(e: Emitter, node: Node) -> tuple[ParamRef, ParamRef] | None:
    """Return references to the scales f32 [kv_heads] of the attention `node`'s keys and values; None without FP8."""
    if not (e.float8_caches and can_be_float8(node)):
        return None
    shape = (_count_heads(node),)
    k, v = (ParamRef(_name_scale(node, role), shape, constant=True, dtype="torch.float32") for role in "kv")
    return k, v


def can_be_float8(node: Node) -> bool:
    """Return whether `node` can cache keys and values in FP8: it has an operand v, and no cache of integer codes."""
    has_values = "v" in {o.name for o in node.op.operands} and node.operand("v") is not None
    return has_values and node.attrs.get("cache_bits") is None


def make_scale_recipe(node: Node, role: str) -> tuple[Recipe, str]:
    """Return the recipe of the scales of keys (`role` k) or values (v), and a reason (str). It is "" if weights give
    the scales, or a norm per head bounds the keys or values; else the scales are 1, and the reason states why."""
    heads, branch = _count_heads(node), find_branch(node, role)
    if isinstance(branch, str):
        return Full(1.0, (heads,)), branch
    width = node.required_operand(role).width // heads
    if branch.norm is not None:  # of each head: it bounds the keys by itself
        norm_weight = _find_recipe(branch.norm, "weight")
        if not norm_weight:
            return Full(1.0, (heads,)), ""
        column = Reshape(norm_weight[0], (branch.norm.required_operand("weight").width, 1))
        return HeadScales(column, heads, width, (), _find_recipe(branch.norm, "bias")), ""
    x = branch.linear.required_operand("x").producer
    if x is None or x.op not in NORMS:
        return Full(1.0, (heads,)), f"{role} is a linear map without a norm before it"
    params = [p for p in (branch.weight, branch.bias) if p is not None]
    weight, *biases = (p.recipe for p in params)
    if branch.is_packed:  # only the rows that the branch uses
        weight, *biases = (slice_rows(p.recipe, *branch.span, p.graph.reader) for p in params)
    return HeadScales(weight, heads, width, _find_recipe(x, "weight"), tuple(biases)), ""


def describe_limits(graph: Graph) -> list[str]:
    """Return a note for each cache of `graph` that cannot be in FP8, and for keys or values of unknown scale."""
    notes = []
    for node in find_kv_attentions(graph):
        where = f"%{node.output.name}"
        if not can_be_float8(node):
            notes.append(f"{where} does not store its latents in FP8: they belong to no head, and scales are per head")
            continue
        reasons = {role: make_scale_recipe(node, role)[1] for role in "kv"}
        notes += [f"{where} stores {role} with a scale of 1: {why}" for role, why in reasons.items() if why]
    return notes


def find_kv_attentions(graph: Graph) -> list[Node]:
    """Return the nodes of `graph` with a cache and an operand v in their op; the v of latent attention is None."""
    return [n for n in graph.nodes if n in find_cached_nodes(graph) and "v" in {o.name for o in n.op.operands}]


def _find_recipe(node: Node, operand: str) -> tuple[Recipe, ...]:
    """Return the recipe of a norm's parameter `operand` as a tuple of one; () if the norm has no such parameter."""
    param = node.operand(operand) if operand in {o.name for o in node.op.operands} else None
    return (param.recipe,) if isinstance(param, Param) else ()


def _count_heads(node: Node) -> int:
    return int(node.attrs.get("kv_heads") or node.attrs["heads"])


def _name_scale(node: Node, role: str) -> str:
    """Return the path of a scale in the scope of `node`, numbered from the second FP8 attention of a scope on."""
    cached = find_cached_nodes(node.graph)
    alike = [n for n in node.graph.nodes if n.scope == node.scope and n in cached and can_be_float8(n)]
    number = alike.index(node) + 1
    name = f"{role}_scale" + (f"_{number}" if number > 1 else "")
    return f"{node.scope}.{name}" if node.scope else name


def find_scales(e: Emitter, node: Node) -> list[Operand]:
    """Return the operands k_scale and v_scale that `node` has; parameters become weights of the program."""
    operands: list[Operand] = []
    for name in ("k_scale", "v_scale"):
        param = node.operand(name)
        if isinstance(param, Param):
            e.program.weights[param.name] = param
            shape = tuple(param.type.concrete({}))
            operands.append(ParamRef(param.name, shape, constant=True, dtype="torch.float32"))
        elif param is not None:
            operands.append(e[param])
    return operands


def emit_rounded_keys(e: Emitter, node: Node, k: Var, v: Var | None) -> tuple[Var, Var | None]:
    """Emit and return `k` and `v` of an attention without a cache, rounded as a cache would: to codes and back."""
    bits, factors = node.attrs["cache_bits"], find_scales(e, node)
    if v is None:
        return e.emit(f"update_quantized_keys(None, {{0}}, None, None, {{1}}, {bits})", k, *factors, name="k"), None
    text = f"update_quantized(None, {{0}}, {{1}}, None, None, {{2}}, {{3}}, {bits})"
    outputs = e.emit_tuple(text, k, v, *factors, names=("k", "v"))
    return outputs[0], outputs[1]
