"""Replace the activation of every feed-forward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.ir import Graph, Node, Param, Value, interpret, ops
from weft.ir.ops.activation import activate, apply_activation, check_activation
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.feed_forward import GatedUnit, find_projection, match_activation, match_gate
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import erase_unused, rebuild_node, replace_uses


class ReplaceActivation(Pass):
    """Replace the activation of every feed-forward by `to`: relu, relu2, gelu, gelu_tanh, gelu_quick, silu, sigmoid,
    tanh, elu, identity, or swish(β).

    Gated units keep their gates, clamps and shifts; the feed-forwards of experts also change. ReLU gives zero
    activations, which runtimes can skip; gelu_tanh and gelu_quick are cheaper than the exact GELU. The model computes a
    different function and needs a little training.

    Condition: an activation belongs to a feed-forward if it reads a linear and is read by linears only, or by a product
    with another projection of the same value. Activations of poolers and convolutions, and of gates in attention and
    state spaces, stay.

    Source: ReLUfication (Mirzadeh 2023, 2310.04564); Shazeer 2020 (2002.05202) on gated units.

    Example replace-activation{to=relu}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %hidden: f32[batch, seq, 6] = gelu(%up, approximate="tanh")
          %down: f32[batch, seq, 4] = linear(%hidden, %down.weight)
          output y = %down
        }
    """

    name = "replace-activation"
    effect = "changing"
    purpose = "Exchange parts and grow"
    to: str

    def run(self, graph: Graph, trace: Trace) -> None:
        check_activation(self.to)
        for node, unit in list(_find_activations(graph)):
            output_name = node.output.name
            if isinstance(unit, GatedUnit):
                if unit.activation == self.to:
                    continue
                with graph.inserting(before=node):
                    y = ops.glu(unit.gate, unit.up, **(unit.attrs | {"activation": self.to}))
                replace_uses(node.output, y)
                erase_unused(graph, unit.nodes)
            elif isinstance(unit, tuple):
                name, x, nodes = unit
                if name == self.to:
                    continue
                with graph.inserting(before=node):
                    y = activate(x, self.to)
                replace_uses(node.output, y, rename=y is not x)
                erase_unused(graph, nodes)
            elif node.attrs["activation"] == self.to:
                continue
            else:
                rebuild_node(node, activation=self.to)
            trace.record_rewrite(self.name, output_name)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no feed-forward has an activation other than {self.to}")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs equal those of the graph before, with its activations computed by the formula of `to`."""
        inputs = equivalence.make_inputs(before)
        staged = equivalence.randomize_weights(before)
        sites = dict(_find_activations(staged))
        arrays: dict[Value, Array] = {}

        def read_value(value: Value | None) -> Array | None:
            if isinstance(value, Param):
                return np.asarray(value.recipe.evaluate(staged.reader), np.float64)
            return None if value is None else arrays[value]

        def record(node: Node, outputs: tuple[Array, ...]) -> None:
            arrays.update(zip(node.outputs, outputs, strict=True))
            if node not in sites:
                return
            unit = sites[node]
            if isinstance(unit, GatedUnit):
                attrs = unit.attrs | {"activation": self.to}
                outputs[0][...] = ops.glu.reference(arrays[unit.gate], arrays[unit.up], **attrs)
            elif isinstance(unit, tuple):
                outputs[0][...] = apply_activation(arrays[unit[1]], self.to)
            else:
                attrs = node.attrs | {"activation": self.to}
                outputs[0][...] = ops.moe.reference(*map(read_value, node.inputs), **attrs)

        arrays.update((staged.inputs[name], x) for name, x in inputs.items())
        equivalence.check_close(interpret(staged, inputs, watch=record), equivalence.run(after, inputs), EXACT)


def _find_activations(graph: Graph) -> Iterator[tuple[Node, GatedUnit | tuple[str, Value, tuple[Node, ...]] | None]]:
    """Yield (last node of the activation, activation) of each feed-forward, in graph order.
    The activation is a GatedUnit, or (name, input, nodes), or None if the node is a `moe`, which contains it."""
    for node in graph.nodes:
        if node.op is ops.moe:
            yield node, None
            continue
        unit = match_gate(node)
        if isinstance(unit, GatedUnit):
            yield node, unit
            continue
        parts = match_activation(node.output)
        linears = [n.op is ops.linear and i == 0 for n, i in node.output.uses]
        if parts is not None and linears and all(linears) and not node.output.is_output and find_projection(parts[1]):
            yield node, parts
