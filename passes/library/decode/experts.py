"""Mixtures of experts in a decode step: the choice of experts, and the feed-forwards of the chosen experts."""

from __future__ import annotations

from typing import Any

from weft.ir import Graph, Value, ops

from ... import Pass, Refusal, Rule, Trace, apply_rules
from ...edits.pattern import ANY, Pattern, capture, maybe, value
from .products import NORM, build_product, select

ROUTE_ATTRS = tuple(ops.route.attrs)
OPTIONAL_STACKS = "gate", "up_bias", "down_bias", "gate_bias"
UNIT_ATTRS = "activation", "limit", "shift"


def _build_mixture() -> Value:
    combine = ops.route(value("logits"), maybe("correction"), **capture(*ROUTE_ATTRS))
    stacks = value("up"), value("down"), *map(maybe, OPTIONAL_STACKS)
    return ops.moe(value("x"), combine, *stacks, **capture(*UNIT_ATTRS, "active"))


def _fuse_mixture(by: float = 1.0, **match: Any) -> Value | Refusal:
    logits, k = match["logits"], match["k"]
    if (match["active"] or logits.shape[-1]) != k:
        return Refusal("the number of active experts differs from the number that the router chooses")
    if len(match["x"].shape) != 3 or len(logits.shape) != 3:
        return Refusal("tokens are not [batch, seq, width]")
    settings = {**select(match, *ROUTE_ATTRS), "scale": match["scale"] * by}
    chosen, weights = ops.choose_experts.emit(logits, match["correction"], **settings)
    stacks = (match[name] for name in ("up", "down", *OPTIONAL_STACKS))
    return ops.mixture(match["x"], chosen, weights, *stacks, **select(match, *UNIT_ATTRS))


class FuseMixture(Pass):
    """Compute only the k chosen experts of a mixture: moe(x, route(logits)) → mixture(x, chosen, weights).

    A constant that multiplies the result moves into the routing weights.

    Condition: only this mixture reads the router's result, and the number of active experts equals the router's k.

    Source: Shazeer 2017 (1701.06538).

    Example fuse-mixture::

        graph example {
          input %x: f32[batch, seq, 4]
          input %logits: f32[batch, seq, 3]
          param %up: f32[3, 6, 4] = normal([3, 6, 4], std=0.5, stream="up")
          param %down: f32[3, 4, 6] = normal([3, 4, 6], std=0.5, stream="down")
          %combine: f32[batch, seq, 3] = route(%logits, k=2)
          %y: f32[batch, seq, 4] = moe(%x, %combine, %up, %down, active=2)
          output y = %y
        }
    """

    name = "fuse-mixture"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-router", "fuse-route")
    on_fused = True
    tradeoff = "the choice becomes two values in memory: indices of experts, and their weights"

    def run(self, graph: Graph, trace: Trace) -> None:
        scaled = Pattern(lambda: ops.affine(_build_mixture(), by=ANY("by")))
        for name, pattern in {"scaled mixture": scaled, "mixture": Pattern(_build_mixture)}.items():
            apply_rules(graph, [Rule(name, pattern, _fuse_mixture)], trace)


def _build_choice() -> tuple[Value, ...]:
    return ops.choose_experts.emit(build_product(), maybe("correction"), **capture(*ROUTE_ATTRS))


def _fuse_route(**match: Any) -> tuple[Value, ...]:
    operands = match["x"], match["weight"], match["bias"], match["correction"]
    return ops.norm_route.emit(*operands, **select(match, *NORM, *ROUTE_ATTRS))


class FuseRoute(Pass):
    """Fuse the choice of experts with the linear of their router: choose_experts(norm_linear(x, W)) → norm_route(x, W).

    Condition: nothing else reads the logits. Run fuse-mixture and fuse-norm-linear{fold=false} before.

    Source: the kernels of a decode step.

    Example fuse-route::

        graph example {
          input %x: f32[batch, seq, 4]
          param %router.weight: f32[3, 4] = normal([3, 4], std=0.5, stream="router")
          %logits: f32[batch, seq, 3] = norm_linear(%x, %router.weight)
          %chosen: i64[batch, seq, 2], %weights: f32[batch, seq, 2] = choose_experts(%logits, k=2)
          output chosen = %chosen
          output weights = %weights
        }
    """

    name = "fuse-route"
    needs = "fuse-mixture, fuse-norm-linear{fold=false}"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-mixture", "fuse-norm-linear")
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        apply_rules(graph, [Rule(self.name, Pattern(_build_choice), _fuse_route)], trace)
