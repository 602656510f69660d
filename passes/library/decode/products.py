"""Products of a decode step with the activations, gates and additions after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.op import Op
from weft.ir.ops.activation import ACTIVATIONS
from weft.ir.recipes.blocks import Kept, block_layout

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.driver import Refusal, Rule, apply_rules
from ...edits.edit import backward_slice, drop, replace_uses
from ...edits.pattern import ANY, Pattern, capture, either, maybe, param, value
from ..fuse.pack import misfit

Maybe = Value | None


def gain(name: str) -> Value:
    """Return a variable of a pattern: the weight or bias of a norm, which kernels take from a module, or none."""
    return param(name, optional=True)


def product(role: str = "") -> Value:
    """Return a pattern of norm(x) Wᵀ + b, with a norm or without; `role` begins the names of weight and bias."""
    operands = value("x"), value(f"{role}weight"), maybe(f"{role}bias"), gain("norm_weight"), gain("norm_bias")
    return ops.norm_linear(*operands, kind=ANY("kind"), eps=ANY("eps"))


LAST = ANY(where=lambda axis: axis in (-1, 2))  # of [batch, seq, width]


def given(match: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries of a `match` that have these names."""
    return {name: match[name] for name in names if name in match}


NORM = "norm_weight", "norm_bias", "kind", "eps"


def packed(weights: Sequence[Maybe], biases: Sequence[Maybe]) -> tuple[Value, Maybe] | Refusal:
    """Pack `weights`, and `biases` where there are any, of modules with one parent: such can share memory.

    Returns:
        The packed weight and bias, or why there are none.
    """
    if reason := misfit(weights, biases):
        return Refusal(reason)
    ours, theirs = ([w for w in some if isinstance(w, Param)] for some in (weights, biases))
    names, graph = " and ".join(f"%{w.name}" for w in ours), ours[0].graph
    if theirs and len(theirs) < len(ours):
        return Refusal(f"only some of {names} have a bias")
    if len({*ours}) < len(ours):
        return Refusal(f"{names} are one weight")
    places = [w.name.rpartition(".") for w in (*ours, *theirs)]
    parents = {module.rpartition(".")[0] if module else None for module, _, _ in places}
    if len(parents) > 1 or None in parents or any(own not in ("weight", "bias") for _, _, own in places):
        return Refusal(f"{names} are not weights of modules with one parent")
    layouts = (
        {str(block_layout(w.recipe, graph.reader)) for w in ours} if any(w.recipe.has(Kept) for w in ours) else {""}
    )
    if len(layouts) > 1:
        return Refusal(f"{names} are quantized in different ways")
    modules = [module.rpartition(".")[2] for module, _, _ in places[: len(ours)]]
    name = ("" if all(len(m) == 1 for m in modules) else "_").join(modules)
    return ops.pack(*ours, name=name), ops.pack(*theirs, name=f"{name}_bias") if theirs else None


def _unit(gate: Value, up: Value) -> Value:
    return ops.glu(gate, up, activation=ANY("activation"), limit=ANY("limit"), shift=ANY("shift"))


UNITS = {  # the operands of a glu
    "two products": lambda: _unit(product("gate_"), product("up_")),
    "halves of one": lambda: _unit(*ops.split.emit(product(), sizes=ANY("sizes", length=2), axis=LAST)),
}


def _gated(**match: Any) -> Value | Refusal:
    one: tuple[Maybe, ...] | Refusal = (match.get("weight"), match.get("bias"))
    if "gate_weight" in match:
        one = packed(*([match.get(f"{role}_{part}") for role in ("gate", "up")] for part in ("weight", "bias")))
    if isinstance(one, Refusal):
        return one
    return ops.norm_glu(match["x"], *one, **given(match, *NORM, "activation", "limit", "shift"))


def _activation(op: Op, attrs: Mapping[str, Any]) -> Pattern:
    return Pattern(lambda: op(product(), **attrs))


def _activated(activation: str = "", beta: float = 1.0, **match: Any) -> Value:
    name = activation or ("silu" if beta == 1 else f"swish({beta})")
    return ops.norm_linear(match["x"], match["weight"], match.get("bias"), **given(match, *NORM), activation=name)


@dataclass(frozen=True)
class FuseActivation(Pass):
    """Compute activations and gated units with the products under them.

    act(norm_linear(x, W)) becomes norm_linear{activation}; glu(norm_linear(x, W₁), norm_linear(x, W₂)) becomes
    norm_glu(x, pack(W₁, W₂)), as does the unit of one product that is split. Run fuse-norm-linear{fold=false} before.

    Condition: nothing else reads the products; gate and up read the same value after the same norm, and their weights
    are those of modules side by side, so that they can lie one after the other in memory.

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
        there = {node.op for node in graph.nodes}
        rules = [Rule(f"glu of {name}", Pattern(pattern), _gated) for name, pattern in UNITS.items()]
        for name, (op, attrs) in {**ACTIVATIONS, "": (ops.swish, {"beta": ANY("beta")})}.items():
            if op in there:
                rules.append(Rule(name or "swish", _activation(op, attrs), partial(_activated, activation=name)))
        apply_rules(graph, rules, trace)


def _added(norm: Op | None) -> Pattern:
    def pattern() -> Value:
        y = ops.norm_linear(value("x"), value("weight"), maybe("bias"), kind="none", eps=ANY())
        if norm is not None:
            more = (gain("norm_bias"),) if norm is ops.layer_norm else ()
            y = norm(y, gain("norm_weight"), *more, eps=ANY("eps"))
        return ops.add(value("residual"), either(ops.affine(y, by=ANY("scale")), y))

    return Pattern(pattern)


ADDED = {"none": None, "rms": ops.rms_norm, "layer": ops.layer_norm}  # norms after a product


def _onto() -> Value:
    names = "x", "chosen", "weights", "up", "down"
    stacks = *map(value, names), *map(maybe, ("gate", "up_bias", "down_bias", "gate_bias")), None
    norm = gain("norm_weight"), gain("norm_bias")
    return ops.add(value("residual"), ops.mixture(*stacks, *norm, **capture(*ops.mixture.attrs)))


def _no_stream(residual: Value, like: Value, width: object) -> Refusal | None:
    fits = residual.shape == (*like.shape[:-1], width) and len(like.shape) == 3
    return None if fits else Refusal(f"%{residual.name} is no stream of tokens")


def _mixed(**match: Any) -> Value | Refusal:
    x, residual = match["x"], match["residual"]
    if _rank(residual) == 2:
        return Refusal(f"%{residual.name} is a product, which is added to it")
    return _no_stream(residual, x, x.width) or ops.mixture(**match)


def _residual(**match: Any) -> Value | Refusal:
    x, weight, residual = match["x"], match["weight"], match["residual"]
    if (refused := _no_stream(residual, x, weight.shape[0])) is not None:
        return refused
    return ops.linear_residual(x, weight, residual, match.get("bias"), **given(match, *NORM, "scale"))


def terms(total: Value) -> list[Value]:
    """Return the terms [batch, seq, width] of the sum `total`, also those of inner sums that nothing else reads."""
    node = total.producer
    if node is None or node.op is not ops.add or any(v is None or v.shape != total.shape for v in node.inputs):
        return [total]
    inner = (v for v in node.inputs if v is not None)
    return [term for v in inner for term in (terms(v) if len(v.uses) == 1 and not v.is_output else [v])]


def in_order(graph: Graph, trace: Trace) -> None:
    """Reorder sums: first values in memory, then mixtures of experts, then products, which add the sum before them."""
    for node in graph.nodes:
        total = node.output
        if node.op is not ops.add or len(total.shape) != 3:
            continue
        if len(total.uses) == 1 and not total.is_output and total.uses[0][0].op is ops.add:
            reader = total.uses[0][0].output
            if len(terms(reader)) > 2 and total not in terms(reader):
                continue  # it is a part of a longer one
        found = terms(total)
        ordered = sorted(found, key=_rank)
        if _rank(ordered[0]) == 2:  # one of the products is the stream
            ordered = found
        if _rank(ordered[-1]) == 0 or _is_chain(total, ordered):
            continue
        with graph.inserting(before=node):
            made = ordered[0]
            for term in ordered[1:]:
                made = ops.add(made, term)
        trace.fired("order of a sum", total.name)
        replace_uses(total, made)
        drop(graph, backward_slice([total], found))


def _is_chain(total: Value, ordered: list[Value]) -> bool:
    """Return whether `total` adds up `ordered` one after the other."""
    *before, last = ordered
    if not before:
        return total is last
    made = total.producer
    first = None if made is None or made.op is not ops.add or made.inputs[1] is not last else made.inputs[0]
    return first is not None and _is_chain(first, before)


def _rank(term: Value) -> int:
    """Return the place of `term` in a sum: 0 for a value in memory, 1 for a mixture of experts, 2 for a product.

    Norms and factors after a mixture or a product do not count.
    """
    while (node := term.producer) is not None and len(term.uses) == 1 and not term.is_output:
        if node.op is ops.mixture:
            return 1
        if node.op is ops.norm_linear:
            return 2 if node.attrs["kind"] == "none" and node.attrs["activation"] == "identity" else 0
        if node.op not in (ops.affine, ops.rms_norm, ops.layer_norm) or node.inputs[0] is None:
            return 0
        term = node.inputs[0]
    return 0


@dataclass(frozen=True)
class FuseLinearResidual(Pass):
    """Add a product to the residual stream where it is computed: x + norm_linear(h, W) → linear_residual(h, W, x).

    A norm after the product and a factor of it are included. In longer sums the products are added one by one, after
    values in memory and mixtures of experts. Run fuse-norm-linear{fold=false} before.

    Condition: nothing else reads the product, and no norm is fused before it.

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
        in_order(graph, trace)
        rules = [Rule("mixture", Pattern(_onto), _mixed)]
        rules += [
            Rule(f"{self.name} {kind}", _added(norm), partial(_residual, kind=kind)) for kind, norm in ADDED.items()
        ]
        apply_rules(graph, rules, trace)


@dataclass(frozen=True)
class PackLinears(Pass):
    """Compute products of the same value by one: norm_linear(x, W₁), norm_linear(x, W₂) → norm_linear(x, pack(W₁, W₂)).

    What each would have made are pieces of the result. Run fuse-norm-linear{fold=false} before.

    Condition: they have the same norm, no activation, all a bias or none, and weights of modules side by side.

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
        alike: dict[object, list[Node]] = {}
        for node in graph.nodes:
            if node.op is ops.norm_linear and node.attrs["activation"] == "identity":
                norm = node.operand("norm_weight"), node.operand("norm_bias"), *node.attrs.values()
                key = node.scope, node.inputs[0], norm, node.operand("bias") is None
                alike.setdefault(key, []).append(node)
        for group in (nodes for nodes in alike.values() if len(nodes) > 1):
            with graph.inserting(before=graph.nodes.first(group)):
                one = packed([n.operand("weight") for n in group], [n.operand("bias") for n in group])
                if isinstance(one, Refusal):
                    trace.refuse(self.name, group[0].output.name, one.reason)
                    continue
                x, *gains = (group[0].operand(name) for name in ("x", "norm_weight", "norm_bias"))
                y = ops.norm_linear(x, *one, *gains, **group[0].attrs)
                pieces = ops.split.emit(y, sizes=tuple(n.output.width for n in group))
            trace.fired(self.name, group[0].output.name)
            for node, piece in zip(group, pieces, strict=True):
                replace_uses(node.output, piece)
            drop(graph, group)
