"""Fuse a residual addition with the norm that reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weft.ir import Graph, Op, Value, ops

from ... import ANY, Pass, Pattern, Refusal, Rule, Trace, apply_rules


def _add_rms(x: Value, y: Value, weight: Value | None) -> tuple[Value, ...]:
    total = ops.add(x, y)
    return ops.rms_norm(total, weight, eps=ANY("eps")), total


def _add_layer(x: Value, y: Value, weight: Value | None, bias: Value | None) -> tuple[Value, ...]:
    total = ops.add(x, y)
    return ops.layer_norm(total, weight, bias, eps=ANY("eps")), total


def _fuse_norm(
    x: Value, y: Value, weight: Value | None, eps: float, kind: str, bias: Value | None = None
) -> tuple[Value, ...] | Refusal:
    if x.type != y.type:
        return Refusal(f"%{x.name} and %{y.name} are of types {x.type} and {y.type}")
    return ops.add_norm.emit(x, y, weight, bias, kind=kind, eps=eps)


class FuseResidualNorm(Pass):
    """Fuse addition and norm: norm(x + y) → add_norm(x, y).

    The second output of add_norm is x + y, which other readers of the sum read. The norm no longer reads the sum from
    memory.

    Condition: x and y have the same shape and dtype.

    Source: SkipLayerNormalization and SkipSimplifiedLayerNormalization of ONNX Runtime.

    Example fuse-residual-norm::

        graph example {
          input %x: f32[batch, seq, 4]
          input %y: f32[batch, seq, 4]
          param %g: f32[4] = normal([4], std=1.0, stream="g")
          %sum: f32[batch, seq, 4] = add(%x, %y)
          %normed: f32[batch, seq, 4] = rms_norm(%sum, %g, eps=1e-6)
          %next: f32[batch, seq, 4] = add(%sum, %normed)
          output z = %next
        }
    """

    name = "fuse-residual-norm"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("unfuse-residual-norm",)

    def run(self, graph: Graph, trace: Trace) -> None:
        patterns: dict[str, tuple[Op, Callable[..., Any]]]
        patterns = {"rms": (ops.rms_norm, _add_rms), "layer": (ops.layer_norm, _add_layer)}
        rules = [
            Rule(f"fuse-residual-{kind}-norm", Pattern(pattern), partial(_fuse_norm, kind=kind))
            for kind, (op, pattern) in patterns.items()
            if any(node.op is op for node in graph.nodes)
        ]
        apply_rules(graph, rules, trace)
