"""Replace norms by RMSNorm or LayerNorm."""

from __future__ import annotations

from typing import Literal

from weft.ir import Graph, Node, Value, WeftError, ops
from weft.ir.op import Trait

from ... import Pass, Trace
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.absorb import is_layer_norm


class ReplaceNorm(Pass):
    """Replace every norm by an RMSNorm or a LayerNorm (`kind` rms or layer) with the same weights, and `eps` if given.

    rms: x/√(mean(x²) + ε) ⊙ g + β; layer: (x − μ)/√(σ² + ε) ⊙ g + β. The bias of a LayerNorm stays, added after the
    RMSNorm. The model computes a different function and needs further training; if the residual stream can be centred,
    layernorm-to-rmsnorm is the exact alternative.

    Condition: it is an error if the graph has a norm_linear, whose weight may already contain that of its norm.

    Source: RMSNorm (Zhang & Sennrich 2019, 1910.07467); LayerNorm (Ba 2016, 1607.06450).

    Example replace-norm{kind=rms}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %norm.bias: f32[4] = normal([4], std=0.5, stream="beta")
          %norm: f32[batch, seq, 4] = layer_norm(%x, %norm.weight, %norm.bias)
          output y = %norm
        }
    """

    name = "replace-norm"
    effect = "changing"
    purpose = "Exchange parts and grow"
    tradeoff = "a LayerNorm takes two FLOPs per element more than an RMSNorm"
    kind: Literal["rms", "layer"]
    eps: float | None = None

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.eps is not None and not self.eps >= 0:
            raise WeftError(f"{self.name}: eps={self.eps} must not be negative")
        fused = next((n for n in graph.nodes if n.op is ops.norm_linear), None)
        if fused is not None:
            raise WeftError(f"{self.name}: %{fused.output.name} is fused; run {self.name} before fuse-norm-linear")
        for norm in graph.nodes:
            if Trait.NORM not in norm.op.traits:
                continue
            eps = norm.attrs["eps"] if self.eps is None else self.eps
            if is_layer_norm(norm) == (self.kind == "layer") and eps == norm.attrs["eps"]:
                continue
            trace.record_rewrite(self.name, norm.output.name)
            with graph.inserting(before=norm):
                graph.replace(norm, *self._emit_norm(norm, eps))

    def _emit_norm(self, norm: Node, eps: float) -> tuple[Value, ...]:
        bias = norm.operand("bias") if is_layer_norm(norm) else None
        if norm.op is ops.add_norm:
            operands = (*norm.inputs[:2], norm.operand("weight"), bias if self.kind == "layer" else None)
            outputs = ops.add_norm.emit(*operands, kind=self.kind, eps=eps)
        elif self.kind == "layer":
            outputs = ops.layer_norm.emit(norm.inputs[0], norm.operand("weight"), bias, eps=eps)
        else:
            outputs = ops.rms_norm.emit(norm.inputs[0], norm.operand("weight"), eps=eps)
        return outputs if bias is None or self.kind == "layer" else (ops.add(outputs[0], bias), *outputs[1:])

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs equal those of the graph before, with norms computed by the new formula."""
        expanded = before.clone()
        for node in expanded.nodes:
            if Trait.NORM in node.op.traits:
                with expanded.inserting(before=node):
                    expanded.replace(node, *self._expand_norm(node))
        inputs = equivalence.make_inputs(before)
        equivalence.check_close(equivalence.run(expanded, inputs), equivalence.run(after, inputs), EXACT)

    def _expand_norm(self, node: Node) -> tuple[Value, ...]:
        def compute_mean(x: Value) -> Value:
            return ops.mean(x, axes=(-1,), keepdims=True)

        x = node.required_operand("x")
        x = ops.add(x, node.inputs[1]) if node.op is ops.add_norm else x
        y = ops.sub(x, compute_mean(x)) if self.kind == "layer" else x
        eps = node.attrs["eps"] if self.eps is None else self.eps
        y = ops.div(y, ops.sqrt(ops.affine(compute_mean(ops.square(y)), plus=eps)))
        for op, name in ((ops.mul, "weight"), (ops.add, "bias")):
            operand = node.operand(name) if name in {o.name for o in node.op.operands} else None
            y = y if operand is None else op(y, operand)
        return (y, x)[: len(node.outputs)]
