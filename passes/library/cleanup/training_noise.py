"""Removal of dropout and of the noise of routers, which only act in training."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, WeftError, ops

from ... import Pass, Trace
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import backward_slice, erase_unused, replace_uses

INPUT = "router_noise."


def list_noise_inputs(graph: Graph) -> list[str]:
    """Return the names of the inputs of `graph` that are router noise (router_noise.i)."""
    return [name for name in graph.inputs if name.startswith(INPUT)]


class QuietRouters(Pass):
    """Remove the noise that is added to the logits of routers to help training.

    The inputs router_noise.i and the nodes that depend on them are removed: logits + noise ⊙ spread → logits.

    Condition: all noise is zero.

    Source: Shazeer 2017, arXiv:1701.06538, equation 4.

    Example quiet-routers::

        graph example {
          input %x: f32[batch, seq, 4]
          input %router_noise.0: f32[batch, seq, 3]
          param %w: f32[3, 4] = normal([3, 4], std=0.5, stream="router")
          param %ws: f32[3, 4] = normal([3, 4], std=0.5, stream="spread")
          %logits: f32[batch, seq, 3] = linear(%x, %w)
          %raw: f32[batch, seq, 3] = linear(%x, %ws)
          %spread: f32[batch, seq, 3] = softplus(%raw)
          %scaled: f32[batch, seq, 3] = mul(%router_noise.0, %spread)
          %noisy: f32[batch, seq, 3] = add(%logits, %scaled)
          output scores = %noisy
        }
    """

    name = "quiet-routers"
    effect = "conditional"
    purpose = "Simplify"

    def run(self, graph: Graph, trace: Trace) -> None:
        names = list_noise_inputs(graph)
        if not names:
            raise WeftError(f"quiet-routers: graph {graph.name} has no input {INPUT}0")
        for name in names:
            for scaled in graph.inputs[name].users:
                for noisy in scaled.output.users:
                    if (scaled.op, noisy.op) != (ops.mul, ops.add):
                        raise WeftError(f"quiet-routers: %{noisy.output.name} must add {name} times a spread to logits")
                    logits = next(v for v in noisy.inputs if v is not None and v is not scaled.output)
                    shared = logits.producer.inputs if logits.producer else ()
                    spread = backward_slice([scaled.output], shared)
                    noisy.output.replace_uses(logits)
                    graph.erase(noisy)
                    erase_unused(graph, spread)
                    trace.record_rewrite(self.name, logits.name)
            del graph.inputs[name]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the outputs are equal if the noise is zero."""
        inputs = equivalence.make_inputs(before)
        quiet_inputs = {name: np.zeros_like(x) if name.startswith(INPUT) else x for name, x in inputs.items()}
        remaining = {name: x for name, x in quiet_inputs.items() if name in after.inputs}
        equivalence.check_close(equivalence.run(before, quiet_inputs), equivalence.run(after, remaining), EXACT)


def has_dropout(graph: Graph) -> bool:
    """Return whether `graph` has a node `dropout`."""
    return any(node.op is ops.dropout for node in graph.nodes)


class DropDropout(Pass):
    """Remove dropout: dropout(x) → x, as in inference.

    Condition: none; a PyTorch module of the resulting graph trains without dropout.

    Source: Srivastava 2014, JMLR 15, section 4, which scales weights at test time; the op scales activations in
    training.

    Example drop-dropout::

        graph example {
          input %x: f32[batch, seq, 4]
          param %w: f32[4, 4] = normal([4, 4], std=0.5, stream="w")
          %hidden: f32[batch, seq, 4] = linear(%x, %w)
          %dropped: f32[batch, seq, 4] = dropout(%hidden, share=0.1)
          %y: f32[batch, seq, 4] = add(%x, %dropped)
          output y = %y
        }
    """

    name = "drop-dropout"
    effect = "exact"
    purpose = "Simplify"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is ops.dropout:
                trace.record_rewrite(self.name, node.output.name)
                replace_uses(node.output, node.required_operand("x"), rename=False)
                graph.erase(node)
