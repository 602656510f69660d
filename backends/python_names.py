"""The pass that renames scopes and values to valid Python names."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, WeftError
from weft.passes import Pass, Trace
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from .target import import_torch


@dataclass(frozen=True)
class PythonNames(Pass):
    """Rename scopes, values, parameters, inputs and outputs to valid names of Python attributes and variables.

    ``class`` becomes class_, ``a-b`` becomes a_b; attributes of nn.Module, and names to `avoid`, get an underscore;
    siblings keep distinct names. `usual` has pairs "old=new": a top-level module `old` with only a weight and perhaps a
    bias gets the name `new`, unless that is in use.

    Condition: none; inputs and outputs may have other names afterwards.

    Source: The Python Language Reference, section 2.3, Identifiers and keywords.

    Example python-names::

        graph example {
          input %x: f32[batch, seq, 4]
          param %lm-head.class: f32[4, 4] = normal([4, 4], std=0.5, stream="w")
          scope lm-head
            %lm-head.y: f32[batch, seq, 4] = linear(%x, %lm-head.class)
          output y = %lm-head.y
        }
    """

    name = "python-names"
    effect = "changing"
    purpose = "Targets"
    on_fused = True
    avoid: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()

    def run(self, graph: Graph, trace: Trace) -> None:
        import_torch()
        from .torch.lower.identifiers import rename_for_python  # needs torch for the attributes of nn.Module

        if wrong := next((pair for pair in self.usual if "=" not in pair), None):
            raise WeftError(f'{self.name}: usual="{wrong}" must have the form "old=new"')
        usual = dict(pair.split("=", 1) for pair in self.usual)
        for old in rename_for_python(graph, self.avoid, usual):
            trace.record_rewrite(self.name, old)
        if not trace.rewrites:
            trace.note(f"{self.name}: all names are already valid in Python")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that both graphs compute equal outputs for equal inputs. Inputs and outputs are matched by order, since
        their names may differ."""
        inputs = equivalence.make_inputs(before)
        renamed_inputs = dict(zip(after.inputs, inputs.values(), strict=True))
        want, got = equivalence.run(before, inputs), equivalence.run(after, renamed_inputs)
        equivalence.check_close(want, dict(zip(want, got.values(), strict=True)), EXACT)
