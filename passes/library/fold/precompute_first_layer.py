"""Projections of the first layer, looked up in a table by token id instead of computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, TensorType, Value, ops
from weft.ir.recipes import Add, Concat, Full, Permute, Reshape, Scale, Slice
from weft.ir.recipes.matrices import MatMul, RowNorm

from ... import Pass, Trace
from ...edits.edit import erase_unused, replace_uses, require_param


@dataclass(frozen=True)
class TableLookup:
    """A value equal to the rows `ids` of the table `recipe` [vocab, width]; `costly`: a linear helps to compute it."""

    ids: Value
    recipe: Recipe
    vocab: int
    costly: bool = False


class PrecomputeFirstLayer(Pass):
    """Look up queries, keys and values of the first layer by token id, in a table computed when the model is written.

    The first layer normalizes and projects rows E[i] of the embedding, and W N(E[i]) = (N(E) Wᵀ)[i]: values that depend
    on the token alone can have a table of their own. So can the gate and up projections of a parallel block. One lookup
    returns all of them; rotations after it stay.

    Condition: these values are computed by norms, linears, sums and factors from a token's own embedding. Positions or
    types that are added to it (GPT-2, BERT) prevent the pass.

    Source: Graef 2024 (2402.13388), precomputing the first layer.

    Example precompute-first-layer::

        graph example {
          input %ids: i64[batch, seq]
          param %embed.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="embed")
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %q.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="q")
          param %v.weight: f32[2, 4] = normal([2, 4], std=0.5, stream="v")
          %embed: f32[batch, seq, 4] = embedding(%ids, %embed.weight)
          %norm: f32[batch, seq, 4] = rms_norm(%embed, %norm.weight)
          %q: f32[batch, seq, 6] = linear(%norm, %q.weight)
          %v: f32[batch, seq, 2] = linear(%norm, %v.weight)
          output x = %embed
          output q = %q
          output v = %v
        }
    """

    name = "precompute-first-layer"
    effect = "exact"
    purpose = "Fold into weights"
    tradeoff = "a table of vocab rows, as wide as all projections of the first layer, replaces their weights"

    def run(self, graph: Graph, trace: Trace) -> None:
        tables: dict[Value, TableLookup] = {}
        for node in graph.nodes:
            # strict=False: a node that cannot be tabulated gives no rows.
            tables.update(zip(node.outputs, _tabulate_node(node, tables), strict=False))
        table_values: dict[tuple[Value, int], list[Value]] = {}
        for value, rows in tables.items():
            # Only values after a linear get a table: it replaces the linear's work and weights.
            if rows.costly and (value.is_output or any(n.output not in tables for n in value.users)):
                table_values.setdefault((rows.ids, rows.vocab), []).append(value)
        for (ids, vocab), values in table_values.items():
            trace.record_rewrite(self.name, values[0].name)
            _look_up(ids, values, tables, vocab)
        for node in list(graph.nodes) if not table_values else ():
            reader = next((n for v in node.outputs for n in v.users if n.output not in tables), None)
            if node.op is ops.embedding and node.output in tables and reader is not None:
                reason = f"{reader.op.name} (%{reader.output.name}) combines it with more than the token"
                trace.refuse(self.name, node.output.name, reason)


def _tabulate_node(node: Node, tables: Mapping[Value, TableLookup]) -> list[TableLookup]:
    """Return the outputs of `node` as lookups, given those in `tables`; [] if they also depend on other values."""
    op, a = node.op, node.attrs
    x, *operands = (*node.inputs, None, None, None)[:4]
    params = [v.recipe if isinstance(v, Param) else None for v in operands]
    if op is ops.embedding and isinstance(table := node.inputs[1], Param):
        return [TableLookup(x, table.recipe, int(table.shape[0]))] if x is not None and not isinstance(x, Param) else []
    rows = tables.get(x) if x is not None else None
    if rows is None:
        return []

    def derive(recipe: Recipe, costly: bool = False) -> TableLookup:
        return TableLookup(rows.ids, recipe, rows.vocab, rows.costly or costly)

    if op in (ops.add, ops.add_norm):
        addend = tables.get(operands[0]) if operands[0] is not None else None
        if addend is None or (addend.ids, addend.vocab) != (rows.ids, rows.vocab):
            return []
        total = derive(Add((rows.recipe, addend.recipe)), addend.costly)
        if op is ops.add:
            return [total]
        return [derive(RowNorm(total.recipe, a["kind"], a["eps"], *params[1:]), total.costly), total]
    if any(v is not None and not isinstance(v, Param) for v in operands):
        return []
    match op:
        case ops.rms_norm | ops.layer_norm:
            kind = "rms" if op is ops.rms_norm else "layer"
            return [derive(RowNorm(rows.recipe, kind, a["eps"], params[0], params[1]))]
        case ops.linear:
            return [derive(_project_table(rows.recipe, rows.vocab, node), True)]
        case ops.norm_linear:
            return [derive(_project_table(RowNorm(rows.recipe, a["kind"], a["eps"]), rows.vocab, node), True)]
        case ops.affine:
            return [derive(Add((Scale(rows.recipe, a["by"]),), a["plus"]))]
        case ops.split if x is not None and a["axis"] % len(x.shape) == len(x.shape) - 1:
            ends = [sum(a["sizes"][: i + 1]) for i in range(len(a["sizes"]))]
            return [derive(Slice(rows.recipe, 1, end - size, end)) for end, size in zip(ends, a["sizes"], strict=True)]
    return []


def _project_table(table: Recipe, vocab: int, linear: Node) -> Recipe:
    """Return the recipe of `linear` applied to all rows E of `table` [vocab, in]: [E 1] [Wᵀ; bᵀ]."""
    transposed, bias = Permute(require_param(linear, "weight").recipe, (1, 0)), linear.operand("bias")
    if not isinstance(bias, Param):
        return MatMul(table, transposed)
    row = Reshape(bias.recipe, (1, linear.output.width))
    return MatMul(Concat((table, Full(1.0, (vocab, 1))), 1), Concat((transposed, row)))


def _look_up(ids: Value, values: list[Value], tables: Mapping[Value, TableLookup], vocab: int) -> None:
    """Replace the nodes that compute `values` by one embedding of `ids` in a new table, and a split of its rows."""
    first, graph = values[0].producer, ids.graph
    assert first is not None
    widths = tuple(v.width for v in values)
    recipes = tuple(tables[v].recipe for v in values)
    name = f"{first.scope}.by_token.weight" if first.scope else "by_token.weight"
    type = TensorType(values[0].type.dtype, (vocab, sum(widths)))
    table = graph.add_param(name, type, recipes[0] if len(recipes) == 1 else Concat(recipes, 1))
    with graph.inserting(before=first):
        looked_up = ops.embedding(ids, table, name="by_token")
        pieces = ops.split.emit(looked_up, sizes=widths) if len(widths) > 1 else (looked_up,)
    tabulated = [node for node in graph.nodes if node.output in tables]
    for old, new in zip(values, pieces, strict=True):
        replace_uses(old, new)
    erase_unused(graph, reversed(tabulated))
