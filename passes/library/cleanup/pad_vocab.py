"""Padding of the vocabulary to a round size."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.recipes import Concat, Full

from ... import Pass, Trace
from ...edits.edit import are_params, derive_param, replace_param, replace_uses

MOST = 65_536  # the largest `multiple`


class PadVocab(Pass):
    """Append zero rows to the head and its tied table until the vocabulary size is a multiple of `multiple`.

    [W; 0] x = [W x; 0]: the logits are its first `vocab` elements, and a slice removes the others before they are read.
    Kernels and shards want round sizes (64, 128, or the number of devices); 50257 is a prime number. A token embedding
    with as many rows as the head, tied or not, also gets the new rows; no token id selects them.

    Condition: the weight of the head is a parameter that only the head and embeddings read.

    Source: Megatron-LM (Shoeybi 2019, 1909.08053), section 3, make-vocab-size-divisible-by.

    Example pad-vocab{multiple=8}::

        graph example {
          input %input_ids: i64[batch, seq]
          param %embed.weight: f32[11, 4] = normal([11, 4], std=0.5, stream="embed")
          %embed: f32[batch, seq, 4] = embedding(%input_ids, %embed.weight)
          %lm_head: f32[batch, seq, 11] = linear(%embed, %embed.weight)
          output logits = %lm_head
        }
    """

    name = "pad-vocab"
    effect = "exact"
    purpose = "Same function, other weights"
    tradeoff = "the logits of up to multiple - 1 more tokens are computed and discarded"
    multiple: int = 64

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.multiple <= MOST:
            raise WeftError(f"{self.name}: multiple={self.multiple} must be from 1 to {MOST}")
        head = _find_head(graph)
        if head is None:
            raise WeftError(f"{self.name}: graph {graph.name} has no output logits computed by a linear")
        weight, at = head.inputs[1], head.output.name
        if not isinstance(weight, Param) or not are_params(head.inputs[1:]):
            trace.refuse(self.name, at, "its weight is computed")
            return
        vocab = head.output.width
        extra = -vocab % self.multiple
        other_readers = [n for n in weight.users if n is not head and n.op is not ops.embedding]
        if other_readers:
            reader = f"{other_readers[0].op.name} (%{other_readers[0].output.name})"
            trace.refuse(self.name, at, f"%{weight.name} is also read by {reader}")
        elif extra:
            trace.record_rewrite(self.name, at)
            _pad_rows(head, weight, extra)


def _find_head(graph: Graph) -> Node | None:
    """Return the linear that computes the logits, directly or before elementwise ops and slices; None without it."""
    logits = graph.outputs.get("logits")
    node = None if logits is None else logits.producer
    while node is not None and node.op is not ops.linear:
        keeps_logits = Trait.ELEMENTWISE in node.op.traits or node.op is ops.slice_
        x = node.inputs[0] if keeps_logits else None
        node = None if x is None else x.producer
    return node


def _pad_rows(head: Node, weight: Param, extra: int) -> None:
    """Replace `head` by a linear with `extra` more zero rows, and a slice of its logits to the old vocabulary.
    Token embeddings with the same number of rows also get zero rows."""
    graph, vocab = head.graph, head.output.width
    ids = {v for name, v in graph.inputs.items() if name.endswith("input_ids")}
    tables = [n.inputs[1] for n in graph.nodes if n.op is ops.embedding and n.inputs[0] in ids]
    padded: dict[Value | None, Param] = {}
    for old in dict.fromkeys((weight, *head.inputs[2:], *tables)):
        if isinstance(old, Param) and old.shape[0] == vocab:
            trailing = old.type.concrete({})[1:]
            recipe = Concat((old.recipe, Full(0.0, (extra, *trailing))))
            padded[old] = derive_param(old, recipe, (vocab + extra, *trailing))
    with graph.inserting(before=head):
        logits = ops.linear(head.inputs[0], *(padded.get(p) for p in head.inputs[1:]), name="padded")
        sliced = ops.slice(logits, axis=len(logits.shape) - 1, start=0, stop=vocab)
    replace_uses(head.output, sliced)
    graph.erase(head)
    for table, longer in padded.items():
        for node, i in () if table is None else table.uses:
            node.set_input(i, longer)
        replace_param(table, longer)
