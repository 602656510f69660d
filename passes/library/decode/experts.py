"""Mixtures of experts of a decode step: the choice of experts, and the chosen ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ir import Graph, Value, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.driver import Refusal, Rule, apply_rules
from ...edits.pattern import ANY, Pattern, capture, maybe, value
from .products import NORM, given, product

ROUTE = tuple(ops.route.attrs)
STACKS = "gate", "up_bias", "down_bias", "gate_bias"
UNIT = "activation", "limit", "shift"


def _mixed() -> Value:
    """A pattern: the experts that a router chooses."""
    combine = ops.route(value("logits"), maybe("correction"), **capture(*ROUTE))
    stacks = value("up"), value("down"), *map(maybe, STACKS)
    return ops.moe(value("x"), combine, *stacks, **capture(*UNIT, "active"))


def _scaled() -> Value:
    return ops.affine(_mixed(), by=ANY("by"))


def _chosen(by: float = 1.0, **match: Any) -> Value | Refusal:
    logits, k = match["logits"], match["k"]
    if (match["active"] or logits.shape[-1]) != k:
        return Refusal("not as many experts answer as the router chooses")
    if len(match["x"].shape) != 3 or len(logits.shape) != 3:
        return Refusal("tokens are not [batch, seq, width]")
    settings = {**given(match, *ROUTE), "scale": match["scale"] * by}
    chosen, weights = ops.choose_experts.emit(logits, match["correction"], **settings)
    stacks = (match[name] for name in ("up", "down", *STACKS))
    return ops.mixture(match["x"], chosen, weights, *stacks, **given(match, *UNIT))


@dataclass(frozen=True)
class FuseMixture(Pass):
    """Give a mixture of experts the k chosen ones instead of all: moe(x, route(logits)) → mixture(x, chosen, weights).

    A factor of the whole becomes one of the weights.

    Condition: nothing else reads the router's weights, and as many experts answer as it chooses.

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
        for name, pattern in {"scaled mixture": _scaled, "mixture": _mixed}.items():
            apply_rules(graph, [Rule(name, Pattern(pattern), _chosen)], trace)


def _routed() -> tuple[Value, ...]:
    logits = product()
    return ops.choose_experts.emit(logits, maybe("correction"), **capture(*ROUTE))


def _route(**match: Any) -> tuple[Value, ...]:
    operands = match["x"], match["weight"], match["bias"], match["correction"]
    return ops.norm_route.emit(*operands, **given(match, *NORM, *ROUTE))


@dataclass(frozen=True)
class FuseRoute(Pass):
    """Choose experts where the router's logits are computed: choose_experts(norm_linear(x, W)) → norm_route(x, W).

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
        apply_rules(graph, [Rule(self.name, Pattern(_routed), _route)], trace)
