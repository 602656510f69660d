"""Matrix products of a decode step, fused with the activations, gates and additions after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.op import Op
from weft.ir.ops.activation import ACTIVATIONS
from weft.ir.recipes.blocks import Kept

from ... import Pass, Refusal, Rule, Trace, apply_rules
from ...edits.edit import backward_slice, erase_unused, replace_uses
from ...edits.pattern import ANY, Pattern, capture, either, maybe, param, value
from ..fuse.pack import find_packing_obstacle, has_different_layouts

MaybeValue = Value | None


def bind_gain(name: str) -> Value:
    """Return a pattern variable `name` that matches a parameter or a missing operand (a norm's weight or bias)."""
    return param(name, optional=True)


def build_product(role: str = "") -> Value:
    """Return a pattern of norm(x) Wᵀ + b, norm and bias being optional; `role` prefixes the names of W and b."""
    gains = bind_gain("norm_weight"), bind_gain("norm_bias")
    operands = value("x"), value(f"{role}weight"), maybe(f"{role}bias"), *gains
    return ops.norm_linear(*operands, kind=ANY("kind"), eps=ANY("eps"))


LAST_AXIS = ANY(where=lambda axis: axis in (-1, 2))  # of [batch, seq, width]


def select(match: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries of `match` whose key is in `names`."""
    return {name: match[name] for name in names if name in match}


NORM = "norm_weight", "norm_bias", "kind", "eps"


def pack_weights(weights: Sequence[MaybeValue], biases: Sequence[MaybeValue]) -> tuple[Value, MaybeValue] | Refusal:
    """Emit the op pack on `weights`, and on `biases` if any; return (packed weight, packed bias or None), or a Refusal.
    They must be different parameters of modules with one parent, all with a bias or none, in one dtype and layout."""
    if reason := find_packing_obstacle(weights, biases):
        return Refusal(reason)
    weight_params, bias_params = ([w for w in values if isinstance(w, Param)] for values in (weights, biases))
    names = " and ".join(f"%{w.name}" for w in weight_params)
    if bias_params and len(bias_params) < len(weight_params):
        return Refusal(f"only some of {names} have a bias")
    if len({*weight_params}) < len(weight_params):
        return Refusal(f"{names} are one weight")
    places = [w.name.rpartition(".") for w in (*weight_params, *bias_params)]
    parents = {module.rpartition(".")[0] if module else None for module, _, _ in places}
    if len(parents) > 1 or None in parents or any(kind not in ("weight", "bias") for _, _, kind in places):
        return Refusal(f"{names} are not weights of modules with one parent")
    if any(w.recipe.has(Kept) for w in weight_params) and has_different_layouts(weight_params):
        return Refusal(f"{names} are quantized in different ways")
    modules = [module.rpartition(".")[2] for module, _, _ in places[: len(weight_params)]]
    name = ("" if all(len(m) == 1 for m in modules) else "_").join(modules)
    return ops.pack(*weight_params, name=name), ops.pack(*bias_params, name=f"{name}_bias") if bias_params else None


def _build_glu(gate: Value, up: Value) -> Value:
    return ops.glu(gate, up, activation=ANY("activation"), limit=ANY("limit"), shift=ANY("shift"))


GLU_PATTERNS = {  # the operands of a glu
    "two products": lambda: _build_glu(build_product("gate_"), build_product("up_")),
    "halves of one": lambda: _build_glu(*ops.split.emit(build_product(), sizes=ANY("sizes", length=2), axis=LAST_AXIS)),
}


def _fuse_glu(**match: Any) -> Value | Refusal:
    weight_and_bias: tuple[MaybeValue, ...] | Refusal = (match.get("weight"), match.get("bias"))
    if "gate_weight" in match:
        weights, biases = ([match.get(f"{role}_{part}") for role in ("gate", "up")] for part in ("weight", "bias"))
        weight_and_bias = pack_weights(weights, biases)
    if isinstance(weight_and_bias, Refusal):
        return weight_and_bias
    return ops.norm_glu(match["x"], *weight_and_bias, **select(match, *NORM, "activation", "limit", "shift"))


def _build_activation(op: Op, attrs: Mapping[str, Any]) -> Pattern:
    return Pattern(lambda: op(build_product(), **attrs))


def _fuse_activation(activation: str = "", beta: float = 1.0, **match: Any) -> Value:
    name = activation or ("silu" if beta == 1 else f"swish({beta})")
    return ops.norm_linear(match["x"], match["weight"], match.get("bias"), **select(match, *NORM), activation=name)


class FuseActivation(Pass):
    """Fuse activations and gated units with the products before them.

    act(norm_linear(x, W)) becomes norm_linear{activation}; glu(norm_linear(x, W₁), norm_linear(x, W₂)) becomes
    norm_glu(x, pack(W₁, W₂)), and a glu of two halves of one product norm_glu(x, W). Run fuse-norm-linear{fold=false}.

    Condition: nothing else reads the products; gate and up read the same value after the same norm, and their weights
    are those of modules with one parent, so that they can be adjacent in memory.

    Source: the kernels of a decode step; Shazeer 2020 (2002.05202).

    Example fuse-activation::

        graph example {
          input %x: f32[batch, seq, 4]
          param %g: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %ffn.gate.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="gate")
          param %ffn.up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %gate: f32[batch, seq, 6] = norm_linear(%x, %ffn.gate.weight, _, %g)
          %up: f32[batch, seq, 6] = norm_linear(%x, %ffn.up.weight, _, %g)
          %y: f32[batch, seq, 6] = glu(%gate, %up, activation="silu")
          output y = %y
        }
    """

    name = "fuse-activation"
    needs = "fuse-norm-linear{fold=false}"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-norm-linear", "fuse-linear-residual")
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        present_ops = {node.op for node in graph.nodes}
        rules = [Rule(f"glu of {name}", Pattern(pattern), _fuse_glu) for name, pattern in GLU_PATTERNS.items()]
        for name, (op, attrs) in {**ACTIVATIONS, "": (ops.swish, {"beta": ANY("beta")})}.items():
            if op in present_ops:
                fuse = partial(_fuse_activation, activation=name)
                rules.append(Rule(name or "swish", _build_activation(op, attrs), fuse))
        apply_rules(graph, rules, trace)


def _build_residual_pattern(norm: Op | None) -> Pattern:
    def pattern() -> Value:
        y = ops.norm_linear(value("x"), value("weight"), maybe("bias"), kind="none", eps=ANY())
        if norm is not None:
            norm_bias = (bind_gain("norm_bias"),) if norm is ops.layer_norm else ()
            y = norm(y, bind_gain("norm_weight"), *norm_bias, eps=ANY("eps"))
        return ops.add(value("residual"), either(ops.affine(y, by=ANY("scale")), y))

    return Pattern(pattern)


NORMS_AFTER = {"none": None, "rms": ops.rms_norm, "layer": ops.layer_norm}  # norms after a product


def _build_mixture_residual() -> Value:
    names = "x", "chosen", "weights", "up", "down"
    stacks = *map(value, names), *map(maybe, ("gate", "up_bias", "down_bias", "gate_bias")), None
    norm = bind_gain("norm_weight"), bind_gain("norm_bias")
    return ops.add(value("residual"), ops.mixture(*stacks, *norm, **capture(*ops.mixture.attrs)))


def _find_stream_obstacle(residual: Value, like: Value, width: object) -> Refusal | None:
    fits = residual.shape == (*like.shape[:-1], width) and len(like.shape) == 3
    return None if fits else Refusal(f"%{residual.name} is not a stream of tokens")


def _fuse_mixture(**match: Any) -> Value | Refusal:
    x, residual = match["x"], match["residual"]
    if _rank_term(residual) == 2:
        return Refusal(f"%{residual.name} is a product, which is added to it")
    return _find_stream_obstacle(residual, x, x.width) or ops.mixture(**match)


def _fuse_residual(**match: Any) -> Value | Refusal:
    x, weight, residual = match["x"], match["weight"], match["residual"]
    if (refused := _find_stream_obstacle(residual, x, weight.shape[0])) is not None:
        return refused
    return ops.linear_residual(x, weight, residual, match.get("bias"), **select(match, *NORM, "scale"))


def list_terms(total: Value) -> list[Value]:
    """Return the terms of the sum `total`, in order; inner sums with one reader are split into their terms.
    Return [total] if `total` is not a sum of values of its shape."""
    node = total.producer
    if node is None or node.op is not ops.add or any(v is None or v.shape != total.shape for v in node.inputs):
        return [total]
    inner = (v for v in node.inputs if v is not None)
    return [term for v in inner for term in (list_terms(v) if len(v.uses) == 1 and not v.is_output else [v])]


def reorder_sums(graph: Graph, trace: Trace) -> None:
    """Reorder the terms of sums [batch, seq, width]: mixtures of experts and then products come after all other terms.
    Each mixture or product kernel can then add the partial sum of the terms before it. Sums of only products stay."""
    for node in graph.nodes:
        total = node.output
        if node.op is not ops.add or len(total.shape) != 3:
            continue
        if len(total.uses) == 1 and not total.is_output and total.uses[0][0].op is ops.add:
            reader = total.uses[0][0].output
            if len(list_terms(reader)) > 2 and total not in list_terms(reader):
                continue  # it is part of a longer sum
        summands = list_terms(total)
        ordered = sorted(summands, key=_rank_term)
        if _rank_term(ordered[0]) == 2:  # one of the products is the stream
            ordered = summands
        if _rank_term(ordered[-1]) == 0 or _is_chain(total, ordered):
            continue
        with graph.inserting(before=node):
            reordered = reduce(ops.add, ordered)
        trace.record_rewrite("order of a sum", total.name)
        replace_uses(total, reordered)
        erase_unused(graph, backward_slice([total], summands))


def _is_chain(total: Value, ordered: list[Value]) -> bool:
    """Return whether `total` is ((t0 + t1) + t2) + … with the terms `ordered` = [t0, t1, t2, …]."""
    *first_terms, last = ordered
    if not first_terms:
        return total is last
    node = total.producer
    partial_sum = None if node is None or node.op is not ops.add or node.inputs[1] is not last else node.inputs[0]
    return partial_sum is not None and _is_chain(partial_sum, first_terms)


def _rank_term(term: Value) -> int:
    """Return the position of `term` in a sum: 2 for a product without norm and activation, 1 for a mixture, else 0.
    Norms and factors after a product or mixture are ignored."""
    while (node := term.producer) is not None and len(term.uses) == 1 and not term.is_output:
        if node.op is ops.mixture:
            return 1
        if node.op is ops.norm_linear:
            return 2 if node.attrs["kind"] == "none" and node.attrs["activation"] == "identity" else 0
        if node.op not in (ops.affine, ops.rms_norm, ops.layer_norm) or node.inputs[0] is None:
            return 0
        term = node.inputs[0]
    return 0


class FuseLinearResidual(Pass):
    """Fuse a product with the residual addition after it: x + norm_linear(h, W) → linear_residual(h, W, x).

    A norm and a scale between product and addition are fused as well. A mixture of experts is fused with its addition
    in the same way. In longer sums, mixtures and then products are added last. Run fuse-norm-linear{fold=false} before.

    Condition: only the addition reads the product, and the norm_linear has no norm (kind=none).

    Source: the kernels of a decode step.

    Example fuse-linear-residual::

        graph example {
          input %x: f32[batch, seq, 4]
          input %h: f32[batch, seq, 6]
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          %down: f32[batch, seq, 4] = norm_linear(%h, %down.weight, kind="none")
          %y: f32[batch, seq, 4] = add(%x, %down)
          output y = %y
        }
    """

    name = "fuse-linear-residual"
    needs = "fuse-norm-linear{fold=false}"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-norm-linear", "fuse-activation")
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        reorder_sums(graph, trace)
        rules = [Rule("mixture", Pattern(_build_mixture_residual), _fuse_mixture)]
        rules += [
            Rule(f"{self.name} {kind}", _build_residual_pattern(norm), partial(_fuse_residual, kind=kind))
            for kind, norm in NORMS_AFTER.items()
        ]
        apply_rules(graph, rules, trace)


class PackLinears(Pass):
    """Fuse products of the same value: norm_linear(x, W₁), norm_linear(x, W₂) → norm_linear(x, pack(W₁, W₂)).

    A split cuts the packed result into the results of the products. Run fuse-norm-linear{fold=false} before.

    Condition: the products are in one scope and have the same norm, no activation, and weights of modules with one
    parent; all or none have a bias.

    Source: Megatron-LM (Shoeybi 2019, arXiv:1909.08053).

    Example pack-linears::

        graph example {
          input %x: f32[batch, seq, 4]
          param %a.weight: f32[3, 4] = normal([3, 4], std=0.5, stream="a")
          param %b.weight: f32[5, 4] = normal([5, 4], std=0.5, stream="b")
          %a: f32[batch, seq, 3] = norm_linear(%x, %a.weight, kind="rms")
          %b: f32[batch, seq, 5] = norm_linear(%x, %b.weight, kind="rms")
          output a = %a
          output b = %b
        }
    """

    name = "pack-linears"
    needs = "fuse-norm-linear{fold=false}"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("pack-qkv", "unpack")
    on_fused = True
    tradeoff = "the split copies its pieces where a backend cannot read them in place"

    def run(self, graph: Graph, trace: Trace) -> None:
        groups: dict[object, list[Node]] = {}
        for node in graph.nodes:
            if node.op is ops.norm_linear and node.attrs["activation"] == "identity":
                norm = node.operand("norm_weight"), node.operand("norm_bias"), *node.attrs.values()
                key = node.scope, node.inputs[0], norm, node.operand("bias") is None
                groups.setdefault(key, []).append(node)
        for group in (nodes for nodes in groups.values() if len(nodes) > 1):
            with graph.inserting(before=graph.nodes.find_first(group)):
                weight_and_bias = pack_weights([n.operand("weight") for n in group], [n.operand("bias") for n in group])
                if isinstance(weight_and_bias, Refusal):
                    trace.refuse(self.name, group[0].output.name, weight_and_bias.reason)
                    continue
                x, *gains = (group[0].operand(name) for name in ("x", "norm_weight", "norm_bias"))
                y = ops.norm_linear(x, *weight_and_bias, *gains, **group[0].attrs)
                pieces = ops.split.emit(y, sizes=tuple(n.output.width for n in group))
            trace.record_rewrite(self.name, group[0].output.name)
            for node, piece in zip(group, pieces, strict=True):
                replace_uses(node.output, piece)
            erase_unused(graph, group)
