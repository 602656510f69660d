"""Embeddings of tokens as an input, in the place of their ids."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Node, Value, ops

from ...analysis.states import EMBEDDED
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import drop, replace_uses

IDS = "input_ids"


@dataclass(frozen=True)
class TakeEmbeddings(Pass):
    """Read rows of the embedding table from the input inputs_embeds [batch, seq, dim] instead of input_ids.

    What makes the rows then stands outside of the model: images, sounds, soft prompts or retrieved vectors take the
    places of tokens. The rows are those of the table, before positions are added. A scale that the model multiplies
    them by follows (Granite), or with `scaled` has been applied to them already (Gemma and BART in transformers). A
    table that the head reads stays. Caches and states work as before.

    Condition: the rows of the table are given for the ids. Where other ops read the ids, as embeddings for every layer
    do, the model stays as it is.

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
        tables = _tables(ids)
        others = [reader for reader, _ in ids.uses if reader not in tables and not _counts(reader)]
        if others or len({node.inputs[1] for node in tables}) != 1:
            why = f"{others[0].op.name} reads the ids, too" if others else f"they read {len(tables)} tables, not one"
            trace.refuse(self.name, IDS, why)
            return
        made = self._rows(tables)
        rows = graph.add_input(EMBEDDED, made[0].output.type)
        for reader, place in list(ids.uses):
            if reader not in tables:
                reader.set_input(place, rows)
        for node in made:
            replace_uses(node.output, rows)
            trace.fired(self.name, node.output.name)
        drop(graph, [*tables, *made])
        del graph.inputs[IDS]
        rest = {name: value for name, value in graph.inputs.items() if name != EMBEDDED}
        graph.inputs.clear()
        graph.inputs.update({EMBEDDED: rows, **rest})

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """The rows of the table that the ids name give what the ids give."""
        inputs = equivalence.inputs(before)
        shown = before.clone()
        shown.add_output(EMBEDDED, self._rows(_tables(shown.inputs[IDS]))[0].output)
        want = equivalence.run(shown, inputs)
        given = {name: array for name, array in inputs.items() if name != IDS}
        equivalence.same(
            {name: array for name, array in want.items() if name != EMBEDDED},
            equivalence.run(after, {**given, EMBEDDED: want[EMBEDDED]}),
            EXACT,
        )

    def _rows(self, tables: list[Node]) -> list[Node]:
        """The nodes that make the rows: `tables`, or where `scaled` the multiplications of all that they give."""
        readers = list(dict.fromkeys(reader for node in tables for reader in node.output.users))
        scales = [node for node in readers if node.op is ops.affine and node.attrs["plus"] == 0]
        alike = len({node.attrs["by"] for node in scales}) == 1
        return scales if self.scaled and alike and scales == readers else tables


def _tables(ids: Value) -> list[Node]:
    """The nodes that read rows of a table by `ids`, each once."""
    return list(dict.fromkeys(node for node, place in ids.uses if node.op is ops.embedding and place == 0))


def _counts(reader: Node) -> bool:
    """Return whether `reader` asks only how many tokens or texts there are."""
    return reader.op is ops.iota and reader.attrs["axis"] in (0, 1)
