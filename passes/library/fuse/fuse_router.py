"""Fuse simpler ops into top-k routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.ir import Graph, Value, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.driver import Refusal, Rule, apply_rules
from ...edits.pattern import ANY, Pattern


def _scatter_weights(weights: Value, indices: Value) -> Value:
    """Return a pattern of the dense weights over all experts: Σ_j weights_j · one_hot(indices_j)."""
    placed = ops.mul(ops.unsqueeze(weights, axes=ANY("at")), ops.one_hot(indices, depth=ANY("depth")))
    return ops.sum(placed, axes=ANY("over"), keepdims=False)


def _renormalize(weights: Value) -> Value:
    return ops.div(weights, ops.sum(weights, axes=ANY("along"), keepdims=True))


def _build_softmax_of_top(logits: Value) -> Value:
    best, indices = ops.top_k.emit(logits, k=ANY("k"))
    return _scatter_weights(ops.softmax(best, axis=ANY("axis")), indices)


def _build_renormalized_top_of_softmax(logits: Value) -> Value:
    best, indices = ops.top_k.emit(ops.softmax(logits, axis=ANY("axis")), k=ANY("k"))
    return _scatter_weights(_renormalize(best), indices)


def _build_top_of_softmax(logits: Value) -> Value:
    best, indices = ops.top_k.emit(ops.softmax(logits, axis=ANY("axis")), k=ANY("k"))
    return _scatter_weights(best, indices)


def _build_renormalized_top_of_sigmoid(logits: Value) -> Value:
    best, indices = ops.top_k.emit(ops.sigmoid(logits), k=ANY("k"))
    return _scatter_weights(_renormalize(best), indices)


def _build_sigmoid_of_top(logits: Value) -> Value:
    best, indices = ops.top_k.emit(logits, k=ANY("k"))
    return _scatter_weights(ops.sigmoid(best), indices)


def _build_top_of_sigmoid(logits: Value) -> Value:
    best, indices = ops.top_k.emit(ops.sigmoid(logits), k=ANY("k"))
    return _scatter_weights(best, indices)


FORMS: dict[str, tuple[Callable[..., Value], dict[str, Any]]] = {
    "softmax(topk)": (_build_softmax_of_top, {}),
    "renorm(topk(softmax))": (_build_renormalized_top_of_softmax, {}),
    "topk(softmax)": (_build_top_of_softmax, {"renormalize": False}),
    "renorm(topk(sigmoid))": (_build_renormalized_top_of_sigmoid, {"scoring": "sigmoid"}),
    "topk(sigmoid)": (_build_top_of_sigmoid, {"scoring": "sigmoid", "renormalize": False}),
    "sigmoid(topk)": (_build_sigmoid_of_top, {"scoring": "sigmoid", "renormalize": False}),
}


@dataclass(frozen=True)
class FuseRouter(Pass):
    """Fuse top-k routers: ops that choose and weight k experts and scatter the weights become the op `route`.

    The softmax of the k largest logits equals the k largest probabilities divided by their sum, because e^x keeps the
    order and the common denominator cancels: softmax(topk(x)) = renorm(topk(softmax(x))). So both are the renormalized
    router of `route`. Sigmoids have no common denominator: sigmoid(topk(x)) = topk(sigmoid(x)) is not renormalized.

    Condition: the weights are those of the chosen experts, scattered by one_hot of their indices and summed over the k.
    Not recognized: a router that chooses experts by other scores than their weights (with a correction or noise).

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
                Rule(form, Pattern(fn), partial(_fuse_route, settings=settings))
                for form, (fn, settings) in FORMS.items()
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
