"""Common subexpression elimination."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, Value
from weft.ir.op import Trait
from weft.ir.printer import format_recipe
from weft.ir.recipes import Full

from ..base import Pass
from ..trace import Trace


@dataclass(frozen=True)
class Cse(Pass):
    """Compute equal things once: nodes with the same op, operands and attributes, parameters with the same recipe and
    type.

    The first of them stays, with its name and scope. Operands of commutative ops may be swapped. Merging parameters
    is what ties an output head to an embedding table that the checkpoint stores once; those that are only filled with
    a number stay apart, for they are the initial values of different weights.
    """

    name = "cse"
    effect = "exact"

    def run(self, graph: Graph, trace: Trace) -> None:
        params: dict[Hashable, Param] = {}
        for p in list(graph.params.values()):
            if _filled(p.recipe):
                continue
            first = params.setdefault((p.type, format_recipe(p.recipe)), p)
            if first is not p:
                trace.fired("equal parameters", p.name)
                p.replace_uses(first)
                graph.erase_param(p)
        number: dict[Value | None, int] = {None: -1}
        nodes: dict[Hashable, Node] = {}
        for node in graph.nodes:
            operands = [number.setdefault(v, len(number)) for v in node.inputs]
            if Trait.COMMUTATIVE in node.op.traits:
                operands.sort()
            attrs = tuple((k, repr(v)) for k, v in node.attrs.items())  # repr tells 0.0 from -0.0
            same = nodes.setdefault((node.op.name, tuple(operands), attrs), node)
            if same is not node:
                trace.fired("equal nodes", node.output.name)
                for old, new in zip(node.outputs, same.outputs, strict=True):
                    old.replace_uses(new)
                graph.erase(node)


def _filled(recipe: Recipe) -> bool:
    return all(map(_filled, recipe.parts)) if recipe.parts else isinstance(recipe, Full)
