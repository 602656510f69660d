"""Fold factors of scores, embeddings, logits, residual branches and routers into weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.ir import Graph, Node, Param, ops

from ... import Pass, Trace
from ...edits.edit import erase_unused_params, rebuild_node
from .scaling import (
    Edit,
    Factor,
    absorb_factor,
    apply_edits,
    find_other_use,
    list_reader_edits,
    list_writer_edits,
    repeat_scalar,
)


@dataclass
class _Plan:
    """A plan to remove the multiplications by `factor` at the nodes `sites`: `edits` multiply weights instead."""

    sites: list[Node]
    factor: Factor
    edits: list[Edit]


class FoldScale(Pass):
    """Fold constant factors into the weights that compute the multiplied values, or into those that read them.

    The scale s of attention goes into W_q and its bias, s·(W_q x)·k = ((s W_q) x)·k, or into the weight of a norm of
    the queries; attention then multiplies by 1. A number or vector that multiplies the result of linears, norms,
    experts or an embedding (affine, mul by a parameter: multipliers of embeddings, residuals and logits, LayerScale,
    ReZero) goes into their weights and biases, or into the columns of the linears that read the product. The scale of a
    router goes into the down projection of the experts. If the head is tied to an embedding, the factor of the logits
    goes into the final norm; a factor s of a tied embedding goes into the table, and 1/s into the final norm. With
    `untie`, a shared weight is copied if its other readers need it unchanged. Powers of two change only exponents.

    Condition: only linear ops are between factor and weights, without other readers: a soft cap (tanh) after the factor
    is allowed, one before it is not. A shared weight must be multiplied for all of its readers.

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
        while True:  # each node absorbs one factor per round
            refusals: dict[str, str] = {}
            plans_of_round = self._accept(graph, refusals)
            for plan in plans_of_round:
                for site in plan.sites:
                    trace.record_rewrite(self.name, site.output.name)
                # frexp returns a mantissa of exactly ±0.5 for powers of two only.
                if isinstance(plan.factor, float) and abs(math.frexp(plan.factor)[0]) == 0.5:
                    trace.note(f"{self.name}: {plan.factor:g} is a power of two: no digit of a weight changes")
            for plan in plans_of_round:
                apply_edits(plan.edits)
                for site in plan.sites:
                    _remove_factor(site)
            if not plans_of_round:
                break
        for at, why in refusals.items():
            trace.refuse(self.name, at, why)

    def _accept(self, graph: Graph, refusals: dict[str, str]) -> list[_Plan]:
        """Return the plans of this round, which share no nodes. Unless `untie`, drop plans that scale a weight for only
        some of its readers; `refusals` then gets a reason, keyed by the output name of each site of the plan."""
        order, used_nodes, plans = {n: i for i, n in enumerate(graph.nodes)}, set[Node](), list[_Plan]()
        for plan in _merge_plans(_find_plans(graph, order, refusals)):
            _compensate_tied_head(plan, order)
            nodes = {e.node for e in plan.edits}.union(plan.sites)
            # A plan with nodes of an earlier one waits for the next round: its edits refer to the nodes of this round.
            if not used_nodes & nodes:
                used_nodes |= nodes
                plans.append(plan)
        # To a fixpoint: without a dropped plan, another one may scale a weight for some of its readers only.
        while not self.untie:
            edited = {(e.node, e.index): e.change for plan in plans for e in plan.edits}
            obstacles = {
                id(plan): f"{why}; untie copies it" for plan in plans if (why := find_other_use(plan.edits, edited))
            }
            for plan in plans:
                refusals.update((site.output.name, obstacles[id(plan)]) for site in plan.sites if id(plan) in obstacles)
            plans = [plan for plan in plans if id(plan) not in obstacles]
            if not obstacles:
                break
        return plans


def _find_plans(graph: Graph, order: Mapping[Node, int], refusals: dict[str, str]) -> Iterator[_Plan]:
    """Yield a plan for each factor in `graph` that can be folded; set refusals[output name of its node] for others."""
    for node in graph.nodes:
        x = node.output
        edits: list[Edit] | str
        if node.op is ops.attention and (scale := _find_score_scale(node)) != 1:
            factor: Factor = scale
            edits = absorb_factor([(node, 0)], factor, order)
        elif node.op is ops.route and node.attrs["scale"] != 1:
            factor = float(node.attrs["scale"])
            edits = _list_expert_edits(node, factor)
        elif (product := _find_product(node)) is not None:
            index, factor = product
            edits = absorb_factor([(node, index)], factor, order)
            # First the producers of the value, then its readers; if both fail, the first reason is reported.
            forward = list_reader_edits(x, factor) if isinstance(edits, str) else edits
            edits = edits if isinstance(forward, str) else forward
        else:
            continue
        if isinstance(edits, str):
            refusals[x.name] = edits
        else:
            yield _Plan([node], factor, edits)


def _find_score_scale(attention: Node) -> float:
    head_dim, scale = attention.required_operand("q").width // attention.attrs["heads"], attention.attrs["scale"]
    return float(1 / math.sqrt(head_dim) if scale is None else scale)


def _find_product(node: Node) -> tuple[int, Factor] | None:
    """Return (index of the multiplied operand, factor) if `node` multiplies by a constant or parameter, else None.
    The factor is a float, or a recipe of a vector as wide as the result."""
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
                return 1 - i, repeat_scalar(v.recipe, y.width)
    return None


def _list_expert_edits(route: Node, factor: Factor) -> list[Edit] | str:
    """Return edits that multiply down projections of the experts of `route`; a reason (str) if it has other readers."""
    edits, values = list[Edit](), [route.output]
    while values:
        value = values.pop()
        if value.is_output:
            return f"%{value.name} is an output of the graph"
        for node, i in value.uses:
            if node.op is ops.moe and i == 1:
                down_edits = list_writer_edits(node, factor)
                if isinstance(down_edits, str):
                    return down_edits
                edits += down_edits
            elif node.op is ops.limit_capacity:
                values.append(node.output)
            elif node.op is not ops.load_balance_loss:  # which only compares with 0
                return f"%{value.name} is read by {node.op.name} (%{node.output.name})"
    return edits


def _merge_plans(plans: Iterator[_Plan]) -> list[_Plan]:
    """Merge plans that scale the same embedding table by the same factor; return these and all other plans."""
    by_table: dict[object, _Plan] = {}
    for plan in plans:
        table = next((e for e in plan.edits if e.node.op is ops.embedding), None)
        key = id(plan) if table is None else (table.param, table.change)
        if key in by_table:
            by_table[key].sites += plan.sites
            by_table[key].edits += plan.edits
        else:
            by_table[key] = plan
    return list(by_table.values())


def _compensate_tied_head(plan: _Plan, order: Mapping[Node, int]) -> None:
    """Extend `plan`, if it scales an embedding table by a number s, to the heads (linears) that share the table.
    Weights before a head then absorb 1/s; if none can, the head is left out."""
    for table in {e.param: e for e in plan.edits if e.node.op is ops.embedding}.values():
        for node, i in table.param.uses:
            if node.op is ops.linear and i == 1 and isinstance(table.factor, float):
                inverse_edits = absorb_factor([(node, 0)], 1 / table.factor, order)
                if not isinstance(inverse_edits, str):
                    plan.edits += [*inverse_edits, replace(table, node=node, index=i)]


def _remove_factor(site: Node) -> None:
    """Remove the factor of `site`: replace a product by its operand, or set the scale of an attention or route to 1."""
    product = _find_product(site)
    if product is None:
        rebuild_node(site, scale=1.0)
        return
    x, params = site.inputs[product[0]], site.inputs
    assert x is not None
    site.output.replace_uses(x)
    site.graph.erase(site)
    erase_unused_params(x.graph, params)
