"""Token embeddings as an input, instead of token ids."""

from __future__ import annotations

from weft.ir import Graph, Node, Value, ops

from ... import Pass, Trace
from ...analysis.states import EMBEDDED
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import erase_unused, replace_uses

IDS = "input_ids"


class TakeEmbeddings(Pass):
    """Read token embeddings from the input inputs_embeds [batch, seq, dim] instead of looking up input_ids.

    The caller then computes the embeddings: images, sounds, soft prompts or retrieved vectors can replace tokens.
    inputs_embeds are rows of the table, before positions are added. The model multiplies them by its embedding factor,
    if any (Granite); with `scaled` the caller does (Gemma and BART in transformers). A table that the head reads stays.
    Caches and states work as before.

    Condition: the caller passes the rows of the table for the ids. If other ops read the ids, as embeddings per layer
    do, or if the ids index several tables, the pass changes nothing.

    Source: inputs_embeds of transformers; Liu 2023 (LLaVA), arXiv:2304.08485.

    Example take-embeddings::

        graph example {
          input %input_ids: i64[batch, seq]
          param %embed: f32[20, 8] = normal([20, 8], std=0.4, stream="e")
          %token: f32[batch, seq, 8] = embedding(%input_ids, %embed)
          %y: f32[batch, seq, 8] = attention(%token, %token, %token, heads=2, kv_heads=2, causal=true)
          %logits: f32[batch, seq, 20] = linear(%y, %embed)
          output logits = %logits
        }
    """

    name = "take-embeddings"
    effect = "conditional"
    purpose = "Decode"
    scaled: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        ids = graph.inputs.get(IDS)
        if ids is None:
            return
        tables = _find_lookups(ids)
        users = [reader for reader, _ in ids.uses if reader not in tables and not _reads_shape(reader)]
        if users or len({node.inputs[1] for node in tables}) != 1:
            reason = f"{users[0].op.name} also reads the ids" if users else f"they index {len(tables)} tables, not one"
            trace.refuse(self.name, IDS, reason)
            return
        lookups = self._find_replaced_nodes(tables)
        rows = graph.add_input(EMBEDDED, lookups[0].output.type)
        for reader, i in list(ids.uses):
            if reader not in tables:
                reader.set_input(i, rows)
        for node in lookups:
            replace_uses(node.output, rows)
            trace.record_rewrite(self.name, node.output.name)
        erase_unused(graph, [*tables, *lookups])
        del graph.inputs[IDS]
        graph.inputs = {EMBEDDED: rows} | graph.inputs  # first, where the ids were

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the rows of the table at the ids give the same outputs as the ids."""
        inputs = equivalence.make_inputs(before)
        if EMBEDDED not in after.inputs:  # the pass left the graph alone
            equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)
            return
        traced = before.clone()
        traced.add_output(EMBEDDED, self._find_replaced_nodes(_find_lookups(traced.inputs[IDS]))[0].output)
        outputs = equivalence.run(traced, inputs)
        other_inputs = {name: array for name, array in inputs.items() if name != IDS}
        equivalence.check_close(
            {name: array for name, array in outputs.items() if name != EMBEDDED},
            equivalence.run(after, {**other_inputs, EMBEDDED: outputs[EMBEDDED]}),
            EXACT,
        )

    def _find_replaced_nodes(self, tables: list[Node]) -> list[Node]:
        """Return the nodes whose outputs the input replaces: the lookups `tables`. With `scaled`, return their readers
        instead, if all of these multiply by one factor."""
        readers = list(dict.fromkeys(reader for node in tables for reader in node.output.users))
        scales = [node for node in readers if node.op is ops.affine and node.attrs["plus"] == 0]
        have_one_factor = len({node.attrs["by"] for node in scales}) == 1
        return scales if self.scaled and have_one_factor and scales == readers else tables


def _find_lookups(ids: Value) -> list[Node]:
    return list(dict.fromkeys(node for node, i in ids.uses if node.op is ops.embedding and i == 0))


def _reads_shape(reader: Node) -> bool:
    return reader.op is ops.iota and reader.attrs["axis"] in (0, 1)
