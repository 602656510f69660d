"""Common subexpression elimination."""

from __future__ import annotations

from collections.abc import Hashable

from weft.ir import Graph, Node, Param, Recipe, Value
from weft.ir.op import Trait
from weft.ir.recipes import Full
from weft.ir.recipes.spelling import spell_recipe

from ... import Pass, Trace


class Cse(Pass):
    """Compute equal expressions once.

    Nodes are equal if they have the same op, attributes and operands (a commutative op: in any order). Parameters are
    equal if they have the same recipe and type. The first of equal ones stays, with its name and scope. This ties an
    output head to an embedding table that the checkpoint stores once. Parameters filled with a constant are not merged,
    since they are the initial values of different weights.

    Condition: none; ops have no side effects.

    Source: Cocke, Global common subexpression elimination (1970).

    Example cse::

        graph example {
          input %x: f32[batch, 4]
          input %y: f32[batch, 4]
          param %w: f32[4, 4] = normal([4, 4], std=1.0, stream="w")
          param %same: f32[4, 4] = normal([4, 4], std=1.0, stream="w")
          %sum: f32[batch, 4] = add(%x, %y)
          %swapped: f32[batch, 4] = add(%y, %x)
          %p: f32[batch, 4] = linear(%sum, %w)
          %q: f32[batch, 4] = linear(%swapped, %same)
          %z: f32[batch, 4] = mul(%p, %q)
          output z = %z
        }
    """

    name = "cse"
    effect = "exact"
    purpose = "Simplify"
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        params: dict[Hashable, Param] = {}
        for p in list(graph.params.values()):
            if _is_filled(p.recipe):
                continue
            first = params.setdefault((p.type, spell_recipe(p.recipe)), p)
            if first is not p:
                trace.record_rewrite("equal parameters", p.name)
                p.replace_uses(first)
                graph.erase_param(p)
        indices: dict[Value | None, int] = {None: -1}
        nodes: dict[Hashable, Node] = {}
        for node in graph.nodes:
            # Operands of commutative ops are sorted by these indices: values themselves have no order.
            operands = [indices.setdefault(v, len(indices)) for v in node.inputs]
            if Trait.COMMUTATIVE in node.op.traits:
                operands.sort()
            attrs = tuple((k, repr(v)) for k, v in node.attrs.items())  # repr distinguishes 0.0 from -0.0
            first_equal = nodes.setdefault((node.op.name, tuple(operands), attrs), node)
            if first_equal is not node:
                trace.record_rewrite("equal nodes", node.output.name)
                for old, new in zip(node.outputs, first_equal.outputs, strict=True):
                    old.replace_uses(new)
                graph.erase(node)


def _is_filled(recipe: Recipe) -> bool:
    return all(map(_is_filled, recipe.parts)) if recipe.parts else isinstance(recipe, Full)
