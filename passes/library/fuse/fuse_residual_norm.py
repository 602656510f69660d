"""Fuse a residual addition with the norm that reads it."""

from __future__ import annotations

from functools import partial

from weft.ir import Graph, Op, Value, ops

from ... import ANY, Pass, Pattern, Refusal, Rule, Trace, apply_rules
from ...edits.pattern import maybe, value


def _build_add_norm(norm: Op) -> Pattern:
    gains = [maybe("weight"), maybe("bias")] if norm is ops.layer_norm else [maybe("weight")]
    total = ops.add(value("x"), value("y"))
    return Pattern(lambda: (norm(total, *gains, eps=ANY("eps")), total))


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
        rules = [
            Rule(f"fuse-residual-{kind}-norm", _build_add_norm(norm), partial(_fuse_norm, kind=kind))
            for kind, norm in (("rms", ops.rms_norm), ("layer", ops.layer_norm))
            if any(node.op is norm for node in graph.nodes)
        ]
        apply_rules(graph, rules, trace)


class UnfuseResidualNorm(Pass):
    """Split addition and norm: add_norm(x, y) → norm(x + y), and x + y for other readers of the sum.

    This is the inverse of fuse-residual-norm, for targets without such a kernel and passes that match plain norms. The
    sum is moved to the scope that its name begins with (the layer whose output it is), if a term is in that scope.

    Condition: none.

    Source: the definition of add_norm.

    Example unfuse-residual-norm::

        graph example {
          input %x: f32[batch, seq, 4]
          input %y: f32[batch, seq, 4]
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          %normed: f32[batch, seq, 4], %sum: f32[batch, seq, 4] = add_norm(%x, %y, %norm.weight)
          output normed = %normed
          output sum = %sum
        }
    """

    name = "unfuse-residual-norm"
    effect = "exact"
    purpose = "Fuse and take apart"
    on_fused = True
    see = ("fuse-residual-norm",)
    tradeoff = "the sum is written to memory and read again before it is normalized"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is not ops.add_norm:
                continue
            trace.record_rewrite(self.name, node.output.name)
            with graph.inserting(before=node):
                normed, total = node.op.expand(node)
            graph.replace(node, normed, total)
            _move_to_scope(total)


def _move_to_scope(total: Value) -> None:
    """Move the sum `total` to the scope in its name if a term is in it; to the scope "" only if all terms are."""
    addition, home = total.producer, total.name.rpartition(".")[0]
    assert addition is not None
    scopes = [term.producer.scope for term in addition.inputs if term is not None and term.producer is not None]
    if any(f"{scope}.".startswith(f"{home}.") for scope in scopes) if home else not any(scopes):
        addition.scope = home
