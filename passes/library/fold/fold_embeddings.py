"""Fold the norm after an embedding, or the token types of an encoder, into a table."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, Node, Param, WeftError, ops
from weft.ir.recipes import Add, Full, Slice
from weft.ir.recipes.matrices import MatMul, RowNorm

from ... import Pass, Trace
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.absorb import is_layer_norm
from ...edits.edit import (
    are_params,
    erase_unused,
    erase_unused_params,
    find_summands,
    find_sums,
    has_add_norm_reader,
    remove_summand,
    replace_uses,
    require_param,
    set_recipe,
)


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
    set_recipe(lookup, 1, RowNorm(table.recipe, kind, norm.attrs["eps"], weight, bias))
    replace_uses(norm.output, lookup.output, rename=False)
    erase_unused(norm.graph, [norm])


INPUT = "token_type_ids"


class FoldTokenTypes(Pass):
    """Remove the input token_type_ids of an encoder whose tokens all have type 0 (inputs of one segment).

    Every token then gets the same row T₀ of the table of types. It is added to each row of another table in the same
    sum: P'_i = P_i + T₀, where P is the position table, or the token table of a model that adds no positions.

    Condition: all token types are 0. Only a sum reads the type rows, and one of its other terms has an unshared table.

    Source: Devlin 2018 (1810.04805), figure 2: the sum of token, segment and position embeddings.

    Example fold-token-types::

        graph example {
          input %input_ids: i64[batch, seq]
          input %token_type_ids: i64[batch, seq]
          param %embed.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="embed")
          param %types.weight: f32[2, 4] = normal([2, 4], std=0.5, stream="types")
          %embed: f32[batch, seq, 4] = embedding(%input_ids, %embed.weight)
          %types: f32[batch, seq, 4] = embedding(%token_type_ids, %types.weight)
          %sum: f32[batch, seq, 4] = add(%embed, %types)
          output y = %sum
        }
    """

    name = "fold-token-types"
    effect = "conditional"
    purpose = "Fold into weights"

    def run(self, graph: Graph, trace: Trace) -> None:
        ids = graph.inputs.get(INPUT)
        if ids is None:
            raise WeftError(f"{self.name}: graph {graph.name} has no input {INPUT}")
        targets: dict[Node, Node] = {}  # lookups of types, and the lookups whose tables absorb their row
        for total in find_sums(graph):
            terms = [n for v in find_summands(total) if (n := v.producer) is not None and n.op is ops.embedding]
            for types in terms:
                if types.inputs[0] is not ids or len(types.output.uses) != 1 or has_add_norm_reader(types.output):
                    continue
                other_lookups = [n for n in terms if n is not types]
                candidates = [n for n in other_lookups if isinstance(t := n.inputs[1], Param) and len(t.uses) == 1]
                if candidates and isinstance(types.inputs[1], Param):
                    # Token ids are an input, positions of an encoder are computed: this prefers the table of positions.
                    targets[types] = max(candidates, key=lambda n: n.inputs[0] not in graph.inputs.values())
        other_readers = [n for n in ids.users if n not in targets]
        if other_readers or ids.is_output:
            who = f"{other_readers[0].op.name} (%{other_readers[0].output.name})" if other_readers else "an output"
            needed = "but only an embedding that is added to another one may"
            raise WeftError(f"{self.name}: {INPUT} is read by {who}, {needed}")
        for types, target in targets.items():
            trace.record_rewrite(self.name, types.output.name)
            _fold_type_row(types, target)
        del graph.inputs[INPUT]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the outputs are equal if all token types are 0."""
        inputs = equivalence.make_inputs(before)
        inputs[INPUT] = np.zeros_like(inputs[INPUT])
        remaining = {name: x for name, x in inputs.items() if name != INPUT}
        equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, remaining), EXACT)


def _fold_type_row(types: Node, target: Node) -> None:
    """Add row 0 of the table of `types` to all rows of the table of `target`, and remove `types` from the sum."""
    row, table = require_param(types, "table"), require_param(target, "table")
    everywhere = MatMul(Full(1.0, (int(table.shape[0]), 1)), Slice(row.recipe, 0, 0, 1))
    set_recipe(target, 1, Add((table.recipe, everywhere)))
    remove_summand(types.output)
    types.graph.erase(types)
    erase_unused_params(types.graph, [row])
