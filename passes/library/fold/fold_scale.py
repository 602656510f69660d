"""Folding factors into weights: of scores, embeddings, logits, residual branches, routers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.ir import Graph, Node, Param, ops

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import changed, drop_params
from .scaling import Edit, Factor, absorbed, apply, numbered, other_use, reading, spread, writing


@dataclass
class _Plan:
    """The nodes `sites` multiply by `factor`, which `edits` make needless."""

    sites: list[Node]
    factor: Factor
    edits: list[Edit]


@dataclass(frozen=True)
class FoldScale(Pass):
    """Fold factors into the weights that make, or read, what they multiply.

    The scale s of attention goes into W_q and its bias, s·(W_q x)·k = ((s W_q) x)·k, or into the weight of a norm of
    the queries; attention then multiplies by 1. A number or a vector that multiplies the result of linears, norms,
    experts or an embedding (affine, mul by a parameter: multipliers of embeddings, residuals and logits, LayerScale,
    ReZero) goes into their weights and biases, or into the columns of the linears that read it; the scale of a router
    into the experts' down. A head tied to an embedding passes the factor of the logits on to the final norm; a factor
    s of a tied embedding goes into the table, and 1/s into the final norm. With `untie`, a weight that is shared is
    copied instead where no other way is left. A power of two changes no digit of a weight.

    Condition: between factor and weights stands only what is linear, and nobody else reads it: a soft cap (tanh) after
    the factor lets it through, one before it does not. Weights that others share must be multiplied for all.

    Source: linearity; multipliers of Granite (IBM 2024), Cohere and Gemma; LayerScale (Touvron 2021, 2103.17239),
    ReZero (Bachlechner 2020, 2003.04887).

    Example fold-scale::

        graph example {
          input %x: f32[batch, seq, 4]
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          param %scale: f32[4] = normal([4], std=0.5, stream="scale")
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %relu: f32[batch, seq, 6] = relu(%up)
          %down: f32[batch, seq, 4] = linear(%relu, %down.weight)
          %scaled: f32[batch, seq, 4] = mul(%down, %scale)
          %halved: f32[batch, seq, 4] = affine(%scaled, by=0.5)
          output y = %halved
        }
    """

    name = "fold-scale"
    effect = "exact"
    purpose = "Fold into weights"
    tradeoff = "with untie, a table tied to the head is stored twice"
    untie: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        while True:  # a node takes one factor in a round
            refused: dict[str, str] = {}
            accepted = self._accepted(graph, refused)
            for plan in accepted:
                for site in plan.sites:
                    trace.fired(self.name, site.output.name)
                # frexp gives a mantissa of exactly ±0.5 for powers of two, and for nothing else.
                if isinstance(plan.factor, float) and abs(math.frexp(plan.factor)[0]) == 0.5:
                    trace.note(f"{self.name}: {plan.factor:g} is a power of two: no digit of a weight changes")
            for plan in accepted:
                apply(plan.edits)
                for site in plan.sites:
                    _remove(site)
            if not accepted:
                break
        for at, why in refused.items():
            trace.refuse(self.name, at, why)

    def _accepted(self, graph: Graph, refused: dict[str, str]) -> list[_Plan]:
        """Plans that do not meet in any node, and scale no weight for some of its readers only."""
        order, taken, plans = numbered(graph), set[Node](), list[_Plan]()
        for plan in _merged(_plans(graph, order, refused)):
            _compensate(plan, order)
            nodes = {e.node for e in plan.edits}.union(plan.sites)
            # A plan that meets an earlier one waits for the next round: its edits name nodes as they are now.
            if not taken & nodes:
                taken |= nodes
                plans.append(plan)
        # To a fixpoint: dropping a plan may leave another one's weight scaled for some of its readers only.
        while not self.untie:
            edited = {(e.node, e.index): e.what for plan in plans for e in plan.edits}
            broken = {id(plan): f"{why}; untie copies it" for plan in plans if (why := other_use(plan.edits, edited))}
            for plan in plans:
                refused.update((site.output.name, broken[id(plan)]) for site in plan.sites if id(plan) in broken)
            plans = [plan for plan in plans if id(plan) not in broken]
            if not broken:
                break
        return plans


def _plans(graph: Graph, order: Mapping[Node, int], refused: dict[str, str]) -> Iterator[_Plan]:
    """Yield a plan for each factor of the graph: the edits that move it into weights."""
    for node in graph.nodes:
        x = node.output
        edits: list[Edit] | str
        if node.op is ops.attention and (scale := _score_scale(node)) != 1:
            factor: Factor = scale
            edits = absorbed(node, 0, factor, order)
        elif node.op is ops.route and node.attrs["scale"] != 1:
            factor = float(node.attrs["scale"])
            edits = _experts(node, factor)
        elif (found := _multiplied(node)) is not None:
            index, factor = found
            edits = absorbed(node, index, factor, order)
            # First the weights that make the value, then those that read it; if both fail, the first reason is told.
            forward = reading(x, factor) if isinstance(edits, str) else edits
            edits = edits if isinstance(forward, str) else forward
        else:
            continue
        if isinstance(edits, str):
            refused[x.name] = edits
        else:
            yield _Plan([node], factor, edits)


def _score_scale(attention: Node) -> float:
    """Return the factor of the scores of `attention`."""
    scale, q = attention.attrs["scale"], attention.inputs[0]
    assert q is not None
    return float(1 / math.sqrt(q.width // attention.attrs["heads"]) if scale is None else scale)


def _multiplied(node: Node) -> tuple[int, Factor] | None:
    """The operand that `node` only multiplies, and the factor: a number, or a vector as wide as the result."""
    y = node.output
    if not y.type.dtype.is_float or not y.shape or not isinstance(y.shape[-1], int):
        return None
    if node.op is ops.affine and node.attrs["plus"] == 0 and node.attrs["by"] not in (0, 1):
        return 0, node.attrs["by"]
    if node.op is not ops.mul:
        return None
    for i, v in enumerate(node.inputs):
        x = node.inputs[1 - i]
        if isinstance(v, Param) and x is not None and not isinstance(x, Param) and x.type == y.type:
            if v.shape == y.shape[-1:]:
                return 1 - i, v.recipe
            if all(s == 1 for s in v.shape):
                return 1 - i, spread(v.recipe, y.width)
    return None


def _experts(route: Node, factor: Factor) -> list[Edit] | str:
    """The downs of the experts that `route` asks, perhaps up to their capacity."""
    edits, values = list[Edit](), [route.output]
    while values:
        value = values.pop()
        if value.is_output:
            return f"%{value.name} is an output of the graph"
        for node, i in value.uses:
            if node.op is ops.moe and i == 1:
                found = writing(node, factor)
                if isinstance(found, str):
                    return found
                edits += found
            elif node.op is ops.limit_capacity:
                values.append(node.output)
            elif node.op is not ops.load_balance_loss:  # which only asks what is not 0
                return f"%{value.name} is read by {node.op.name} (%{node.output.name})"
    return edits


def _merged(plans: Iterator[_Plan]) -> list[_Plan]:
    """`plans`, those of embeddings with one table as one."""
    found: dict[object, _Plan] = {}
    for plan in plans:
        table = next((e for e in plan.edits if e.node.op is ops.embedding), None)
        key = id(plan) if table is None else (table.param, table.what)
        if key in found:
            found[key].sites += plan.sites
            found[key].edits += plan.edits
        else:
            found[key] = plan
    return list(found.values())


def _compensate(plan: _Plan, order: Mapping[Node, int]) -> None:
    """Shrink the input of linears whose weights, tied to a table, grow, where possible."""
    for table in {e.param: e for e in plan.edits if e.node.op is ops.embedding}.values():
        for node, i in table.param.uses:
            if node.op is ops.linear and i == 1 and isinstance(table.factor, float):
                shrunk = absorbed(node, 0, 1 / table.factor, order)
                if not isinstance(shrunk, str):
                    plan.edits += [*shrunk, replace(table, node=node, index=i)]


def _remove(site: Node) -> None:
    """Take out the factor itself."""
    found = _multiplied(site)
    if found is None:
        changed(site, scale=1.0)
        return
    x, params = site.inputs[found[0]], site.inputs
    assert x is not None
    site.output.replace_uses(x)
    site.graph.erase(site)
    drop_params(x.graph, params)
