"""Fuse simpler ops into top-k routers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weft.ir import Graph, Value, ops

from ... import ANY, Pass, Pattern, Refusal, Rule, Trace, apply_rules


def _keep(x: Value) -> Value:
    return x


def _softmax(x: Value) -> Value:
    return ops.softmax(x, axis=ANY("axis"))


def _renormalize(weights: Value) -> Value:
    return ops.div(weights, ops.sum(weights, axes=ANY("along"), keepdims=True))


def _build_router(before: Callable[[Value], Value], after: Callable[[Value], Value]) -> Pattern:
    """Return a pattern of the routing weights Σ_j after(b)_j · one_hot(i_j), with b, i the top k of before(logits)."""

    def pattern(logits: Value) -> Value:
        best, indices = ops.top_k.emit(before(logits), k=ANY("k"))
        placed = ops.mul(ops.unsqueeze(after(best), axes=ANY("at")), ops.one_hot(indices, depth=ANY("depth")))
        return ops.sum(placed, axes=ANY("over"), keepdims=False)

    return Pattern(pattern)


SIGMOID = {"scoring": "sigmoid"}
FORMS: dict[str, tuple[Callable[[Value], Value], Callable[[Value], Value], dict[str, Any]]] = {
    "softmax(topk)": (_keep, _softmax, {}),
    "renorm(topk(softmax))": (_softmax, _renormalize, {}),
    "topk(softmax)": (_softmax, _keep, {"renormalize": False}),
    "renorm(topk(sigmoid))": (ops.sigmoid, _renormalize, SIGMOID),
    "topk(sigmoid)": (ops.sigmoid, _keep, {**SIGMOID, "renormalize": False}),
    "sigmoid(topk)": (_keep, ops.sigmoid, {**SIGMOID, "renormalize": False}),
}


class FuseRouter(Pass):
    """Fuse top-k routers: ops that choose and weight k experts and scatter the weights become the op `route`.

    The softmax of the k largest logits equals the k largest probabilities divided by their sum, because e^x keeps the
    order and the common denominator cancels: softmax(topk(x)) = renorm(topk(softmax(x))). So both become a `route` that
    renormalizes. Sigmoids have no common denominator: sigmoid(topk(x)) = topk(sigmoid(x)) is not renormalized.

    Condition: the weights are those of the chosen experts, scattered by one_hot of their indices and summed over the k.
    A router that chooses experts by scores other than their weights (with a correction or noise) is not recognized.

    Source: Shazeer 2017 (1701.06538), equations 3 to 5; Mixtral (Jiang 2024, 2401.04088).

    Example fuse-router::

        graph example {
          input %logits: f32[batch, seq, 6]
          %best: f32[batch, seq, 2], %indices: i64[batch, seq, 2] = top_k(%logits, k=2)
          %weights: f32[batch, seq, 2] = softmax(%best)
          %column: f32[batch, seq, 2, 1] = unsqueeze(%weights, axes=[3])
          %places: f32[batch, seq, 2, 6] = one_hot(%indices, depth=6)
          %placed: f32[batch, seq, 2, 6] = mul(%column, %places)
          %combine: f32[batch, seq, 6] = sum(%placed, axes=[2])
          output combine = %combine
        }
    """

    name = "fuse-router"
    effect = "exact"
    purpose = "Fuse and take apart"

    def run(self, graph: Graph, trace: Trace) -> None:
        if any(node.op is ops.one_hot for node in graph.nodes):
            rules = [
                Rule(form, _build_router(before, after), partial(_fuse_route, settings=settings))
                for form, (before, after, settings) in FORMS.items()
            ]
            apply_rules(graph, rules, trace)


def _fuse_route(
    logits: Value,
    k: int,
    at: tuple[int, ...],
    over: tuple[int, ...],
    depth: int,
    settings: dict[str, Any],
    axis: int = -1,
    along: tuple[int, ...] = (-1,),
) -> Value | Refusal:
    rank = len(logits.shape)
    placed = [at[0], over[0] % (rank + 1)] == [rank, rank - 1] and len(at) == len(over) == 1
    if not placed or [a % rank for a in (axis, *along)] != [rank - 1] * 2:
        return Refusal("it normalizes, or sums, along other axes")
    if depth != logits.shape[-1]:
        return Refusal(f"it places weights among {depth} experts, with logits of {logits.shape[-1]}")
    return ops.route(logits, k=k, **settings)
