"""Fold the norm after an embedding into its table."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, ops
from weft.ir.recipes.matrices import RowNorm

from ... import Pass, Trace
from ...edits.absorb import is_layer_norm
from ...edits.edit import are_params, derive_param, erase_unused, replace_param, replace_uses, require_param


class FoldEmbeddingNorm(Pass):
    """Normalize the rows of an embedding table once, by recipe, instead of every looked-up row.

    norm(E[i]) = norm(E)[i]: a norm that reads the embedding (Bloom) is applied to the table, with its weight and bias.
    With `untie` a table that has other readers, such as the head, is copied.

    Condition: only the norm reads the looked-up rows, and no positions or types are added before it, as in BERT.

    Source: norms work row by row; the embedding norm is that of Bloom (Le Scao 2022, 2211.05100).

    Example fold-embedding-norm::

        graph example {
          input %ids: i64[batch, seq]
          param %embed.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="embed")
          param %norm.weight: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          %embed: f32[batch, seq, 4] = embedding(%ids, %embed.weight)
          %norm: f32[batch, seq, 4] = layer_norm(%embed, %norm.weight)
          output y = %norm
        }
    """

    name = "fold-embedding-norm"
    effect = "exact"
    purpose = "Fold into weights"
    tradeoff = "with untie a tied table is stored twice"
    untie: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        for norm in graph.nodes:
            x = norm.inputs[0] if norm.op in (ops.rms_norm, ops.layer_norm) else None
            if x is None or x.producer is None:
                continue
            lookup, reason = x.producer, None
            if lookup.op is not ops.embedding:
                producers = [v.producer.op for v in lookup.inputs if v is not None and v.producer is not None]
                if lookup.op not in (ops.add, ops.affine) or x.users != (norm,) or ops.embedding not in producers:
                    continue
                reason = f"%{x.name} is not a looked-up row: {lookup.op.name} is between"
            if reason := reason or self._find_obstacle(norm, lookup):
                trace.refuse(self.name, norm.output.name, reason)
            else:
                trace.record_rewrite(self.name, norm.output.name)
                _fold_norm(norm, lookup)

    def _find_obstacle(self, norm: Node, lookup: Node) -> str | None:
        table, rows = lookup.inputs[1], lookup.output
        if not isinstance(table, Param) or not are_params(norm.inputs[1:]):
            return "its weight, or the table, is computed"
        other_readers = [n for n in rows.users if n is not norm]
        if other_readers:
            return f"%{rows.name} is also read by {other_readers[0].op.name} (%{other_readers[0].output.name})"
        if rows.is_output:
            return f"%{rows.name} is also an output of the graph"
        tied = [n for n in table.users if n is not lookup]
        if tied and not self.untie:
            return f"%{table.name} is shared with {tied[0].op.name} (%{tied[0].output.name}); untie=true copies it"
        return None


def _fold_norm(norm: Node, lookup: Node) -> None:
    table = require_param(lookup, "table")
    weight, bias = (v.recipe if isinstance(v, Param) else None for v in (*norm.inputs[1:], None, None)[:2])
    kind = "layer" if is_layer_norm(norm) else "rms"
    normed = derive_param(table, RowNorm(table.recipe, kind, norm.attrs["eps"], weight, bias))
    lookup.set_input(1, normed)
    replace_param(table, normed)
    replace_uses(norm.output, lookup.output, rename=False)
    erase_unused(norm.graph, [norm])
