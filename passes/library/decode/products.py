"""Products of a decode step with what stands behind them: activations, gates, additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.op import Op
from weft.ir.ops.activation import ACTIVATIONS
from weft.ir.recipes.blocks import BlockRecipe, block_layout

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.driver import Refusal, Rule, apply_rules
from ...edits.edit import backward_slice, drop, replace_uses
from ...edits.pattern import ANY, Pattern, captured, either, maybe, value

Maybe = Value | None


def product(role: str = "") -> Value:
    """A pattern: norm(x) Wᵀ + b, with a norm or without; weight and bias are called by their `role`."""
    operands = value("x"), value(f"{role}weight"), maybe(f"{role}bias"), maybe("norm_weight"), maybe("norm_bias")
    return ops.norm_linear(*operands, kind=ANY("kind"), eps=ANY("eps"))


LAST = ANY(where=lambda axis: axis in (-1, 2))  # of [batch, seq, width]


def given(match: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries of a `match` that have these names."""
    return {name: match[name] for name in names if name in match}


NORM = "norm_weight", "norm_bias", "kind", "eps"


def packed(weights: Sequence[Maybe], biases: Sequence[Maybe]) -> tuple[Value, Maybe] | Refusal:
    """The rows of `weights` as one weight, and `biases` as one where they are; a Refusal if they cannot lie side by
    side in memory, as the weights of modules that stand side by side."""
    given = [w for w in (*weights, *biases) if isinstance(w, Param)]
    names = " and ".join(f"%{w.name}" for w in given)
    if len(given) != len(weights) * (2 if any(biases) else 1):
        return Refusal("some have a bias, or a weight is computed")
    if len({*given}) < len(given):
        return Refusal(f"{names} are not different ones")
    homes = {_home(w) for w in given}
    if len(homes) != 1 or None in homes or not {w.name.rpartition(".")[2] for w in given} <= {"weight", "bias"}:
        return Refusal(f"{names} do not stand side by side")
    graph, stay = given[0].graph, any(w.recipe.has(BlockRecipe) for w in given)
    stay = stay or bool(graph.meta.get("keep_blocks"))
    if stay and len({str(block_layout(w.recipe, graph.reader)) for w in given[: len(weights)]}) > 1:
        return Refusal(f"{names} are quantized in different ways")
    modules = [w.name.split(".")[-2] for w in given[: len(weights)]]
    name = ("" if all(len(m) == 1 for m in modules) else "_").join(modules)
    together = ops.pack(*given[: len(weights)], name=name)
    return together, ops.pack(*given[len(weights) :], name=f"{name}_bias") if any(biases) else None


def _home(weight: Param) -> str | None:
    """The module around that of `weight`; None if it is in no module."""
    outer = weight.name.rpartition(".")[0]
    return outer.rpartition(".")[0] if outer else None


def _unit(gate: Value, up: Value) -> Value:
    return ops.glu(gate, up, activation=ANY("activation"), limit=ANY("limit"), shift=ANY("shift"))


UNITS = {  # what a glu reads
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
        rules = [Rule(f"glu of {name}", Pattern(pattern), _gated) for name, pattern in UNITS.items()]
        for name, (op, attrs) in {**ACTIVATIONS, "": (ops.swish, {"beta": ANY("beta")})}.items():
            rules.append(Rule(name or "swish", _activation(op, attrs), partial(_activated, activation=name)))
        apply_rules(graph, rules, trace)


def _added(norm: Op | None) -> Pattern:
    def pattern() -> Value:
        y = ops.norm_linear(value("x"), value("weight"), maybe("bias"), kind="none", eps=ANY())
        if norm is not None:
            more = (maybe("norm_bias"),) if norm is ops.layer_norm else ()
            y = norm(y, maybe("norm_weight"), *more, eps=ANY("eps"))
        return ops.add(value("residual"), either(ops.affine(y, by=ANY("scale")), y))

    return Pattern(pattern)


ADDED = {"none": None, "rms": ops.rms_norm, "layer": ops.layer_norm}  # norms after a product


def _onto() -> Value:
    names = "x", "chosen", "weights", "up", "down"
    stacks = *map(value, names), *map(maybe, ("gate", "up_bias", "down_bias", "gate_bias")), None
    norm = maybe("norm_weight"), maybe("norm_bias")
    return ops.add(value("residual"), ops.mixture(*stacks, *norm, **captured(*ops.mixture.attrs)))


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
    """The values [batch, seq, width] that additions sum up to `total`, through those that nothing else reads."""
    node = total.producer
    if node is None or node.op is not ops.add or any(v is None or v.shape != total.shape for v in node.inputs):
        return [total]
    inner = (v for v in node.inputs if v is not None)
    return [term for v in inner for term in (terms(v) if len(v.uses) == 1 and not v.is_output else [v])]


def in_order(graph: Graph, trace: Trace) -> None:
    """Let additions begin with what stands in memory, go on with mixtures of experts, and end with products, so that
    each is added where it is computed."""
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
    """0 of a value as it is, 1 of a mixture of experts, 2 of a product, whatever norm and factor come after it."""
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

    A norm after the product and a factor of it come along. Of longer sums the products are added one by one, after
    what stands in memory already and what experts add. Run fuse-norm-linear{fold=false} before.

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
