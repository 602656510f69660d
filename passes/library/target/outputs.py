"""Drop outputs that a target does not return, and convert bf16 outputs to f32."""

from __future__ import annotations

from weft.ir import Graph, ops
from weft.ir.types import dtypes

from ... import Pass, Trace
from ...core.equivalence import EXACT, EquivalenceCheck
from ..cleanup.dce import Dce


def list_losses(graph: Graph) -> list[str]:
    """Return the names of the outputs other than logits, caches and states; [] if `graph` is not a language model."""
    if "logits" not in graph.outputs or "task" in graph.meta:
        return []
    return [name for name in graph.outputs if name != "logits" and not name.startswith("present")]


class DropOutputs(Pass):
    """Remove the outputs `names`, such as the loss of routers, and the nodes that no other output depends on.

    Condition: the program that runs the model does not read these outputs; a loss is for training.

    Source: Shazeer 2017, arXiv:1701.06538, section 4, whose loss balances experts in training.

    Example drop-outputs{names=["aux_loss"]}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %w: f32[6, 4] = normal([6, 4], std=0.5, stream="w")
          %y: f32[batch, seq, 6] = linear(%x, %w)
          %loss: f32[] = mean(%x, axes=[0, 1, 2])
          output logits = %y
          output aux_loss = %loss
        }
    """

    name = "drop-outputs"
    effect = "changing"
    purpose = "Targets"
    on_fused = True
    see = ("quiet-routers", "drop-dropout")
    names: tuple[str, ...]

    def run(self, graph: Graph, trace: Trace) -> None:
        for name in self.names:
            if name not in graph.outputs:
                trace.note(f"{self.name}: {graph.name} has no output {name!r}; it has {', '.join(graph.outputs)}")
                continue
            trace.record_rewrite(self.name, graph.outputs[name].name)
            trace.note(
                f"{self.name}: warning: the output {name} is left out: `weft.torch` gives a module that returns it"
            )
            del graph.outputs[name]
        if trace.rewrites:
            Dce().run(graph, Trace())

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the remaining outputs are the same."""
        inputs = equivalence.make_inputs(before)
        expected, remaining = equivalence.run(before, inputs), equivalence.run(after, inputs)
        equivalence.check_close({name: expected[name] for name in remaining}, remaining, EXACT)


class WidenOutputs(Pass):
    """Return outputs in f32 that are computed in 16 bits: numpy does not support bf16, and JavaScript neither of both.

    Condition: none; every value of bf16 and f16 is exactly representable in f32.

    Source: Kalamkar 2019, arXiv:1905.12322.

    Example widen-outputs::

        graph example {
          input %x: bf16[batch, seq, 4]
          param %w: bf16[6, 4] = normal([6, 4], std=0.5, stream="w")
          %y: bf16[batch, seq, 6] = linear(%x, %w)
          output y = %y
        }
    """

    name = "widen-outputs"
    effect = "exact"
    purpose = "Targets"
    on_fused = True
    see = ("cast",)
    tradeoff = "the outputs take twice the memory"

    def run(self, graph: Graph, trace: Trace) -> None:
        for name, value in list(graph.outputs.items()):
            if value.type.dtype in (dtypes.bf16, dtypes.f16):
                graph.outputs[name] = ops.cast(value, to=dtypes.f32, name=name)
                trace.record_rewrite(self.name, graph.outputs[name].name)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no output has 16 bits")
