"""Logits of the last token only."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.recipes import Literal
from weft.ir.types import dtypes

from ... import Pass, Trace
from ...analysis.tokens.tokenwise import Tokens, find_token_axes, find_token_operands, has_token_axes
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import backward_slice, erase_unused, replace_uses

SCOPE, FROM_END = "last_token", "logits_from_end"


class LastTokenLogits(Pass):
    """Compute logits [batch, 1, vocab] of the last valid token of each batch row instead of all tokens.

    Decoding uses only these logits of a prompt. The nodes after the last op that mixes tokens (the rest of the last
    layer, the final norm, the head) then compute one token per batch row. The last valid token of batch row b is
    sum(attention_mask[b]) − 1 − position_ids[b, 0], at least 0. Run kv-cache before. The constant
    logits_from_end [[1]] has the distances of these tokens from the end of a row; weft's runtime declares it as an
    optional input [1, n] of models of the target ort-cpu.

    Condition: the logits of other tokens are not needed; those of the last valid token are unchanged.

    Source: logits_to_keep of transformers, and llama_batch of llama.cpp.

    Example last-token-logits::

        graph example {
          input %input_ids: i64[batch, seq]
          input %attention_mask: i64[batch, past + seq]
          input %position_ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %w: f32[4, 4] = normal([4, 4], std=0.5, stream="w")
          %x: f32[batch, seq, 4] = embedding(%input_ids, %embed)
          %mixed: f32[batch, seq, 4] = cumsum(%x, axis=1)
          %y: f32[batch, seq, 4] = linear(%mixed, %w)
          %logits: f32[batch, seq, 11] = linear(%y, %embed)
          output logits = %logits
        }
    """

    name = "last-token-logits"
    effect = "conditional"
    purpose = "Decode"
    on_fused = True

    def run(self, graph: Graph, trace: Trace) -> None:
        tokens = find_token_axes(graph)
        missing = [n for n in ("attention_mask", "position_ids") if n not in graph.inputs]
        if missing:
            raise WeftError(f"last-token-logits: graph {graph.name} has no input {missing[0]}; run kv-cache before it")
        if tokens is None or not has_token_axes(graph.outputs.get("logits"), tokens):
            raise WeftError(f"last-token-logits: graph {graph.name} has no output logits [batch, seq, vocab]")
        narrowed = _list_narrowable_nodes(graph, tokens)
        rows = _LastTokens(graph, tokens, next(iter(graph.nodes)))
        logits = graph.outputs["logits"]
        for node in narrowed:
            row_operands = find_token_operands(node, tokens) or ()
            operands = list(node.inputs)
            for i in row_operands:
                operands[i] = rows.gather_before(node, operands[i])
            with graph.inserting(before=node):
                attrs = {k: _shorten_shape(v, tokens) for k, v in node.attrs.items()}
                new_outputs = node.op.emit(*operands, **attrs)
            for old, new in zip(node.outputs, new_outputs, strict=True):
                rows.gathered[old] = new
            trace.record_rewrite(self.name, node.output.name)
        if not narrowed:
            with graph.inserting(after=logits.producer) if logits.producer else graph.scope(""):
                rows.gather(logits)
        final = rows.gathered[logits]
        # Only now: while the nodes are emitted again, the old nodes still read the full values.
        for node in narrowed:
            for v in node.outputs:
                replace_uses(v, rows.gathered[v])
        graph.outputs["logits"] = final
        erase_unused(graph, narrowed)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that logits are the last valid rows of the full logits, for right-padded rows of several lengths."""
        inputs = equivalence.make_inputs(before)
        full, last = equivalence.run(before, inputs), equivalence.run(after, inputs)
        index = inputs["attention_mask"].sum(1) - 1 - inputs["position_ids"][:, 0]
        batch = np.arange(len(index))
        full["logits"] = full["logits"][batch, index.clip(min=0)][:, None]
        equivalence.check_close(full, last, EXACT)


def _list_narrowable_nodes(graph: Graph, tokens: Tokens) -> list[Node]:
    """Return the nodes from which all paths to outputs lead to logits, by nodes that treat tokens independently."""
    logits = graph.outputs["logits"]
    narrowable: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        outputs = [name for v in node.outputs for name in graph.outputs.names_of(v)]
        users = [n for v in node.outputs for n in v.users]
        only_logits = all(n in narrowable for n in users) and all(name == "logits" for name in outputs)
        if only_logits and (users or logits in node.outputs) and find_token_operands(node, tokens) is not None:
            narrowable[node] = None
    return list(reversed(narrowable))


def _shorten_shape(attr: Any, tokens: Tokens) -> Any:
    """Return the attribute value `attr` as (batch, 1, ...) if it is a shape (batch, seq, ...), else unchanged."""
    return (attr[0], 1, *attr[2:]) if isinstance(attr, tuple) and attr[:2] == tokens else attr


class _LastTokens:
    """Gathers of the last valid token: `gathered` maps a value [batch, seq, ...] to its row [batch, 1, ...]."""

    def __init__(self, graph: Graph, tokens: Tokens, first: Node) -> None:
        self.graph = graph
        self.gathered: dict[Value, Value] = {}
        mask, positions = graph.inputs["attention_mask"], graph.inputs["position_ids"]
        column = TensorType(dtypes.i64, (1, 1))
        unit = graph.add_param(FROM_END, column, Literal((1,), (1, 1), replaceable=True))
        zero = graph.add_param(f"{SCOPE}.zero", column, Literal((0,), (1, 1)))
        with graph.inserting(before=first):
            end = ops.sum(mask, axes=(1,), keepdims=True, name="valid")
            start = ops.slice_(positions, axis=1, start=0, stop=1, name="start")
            last = ops.sub(ops.sub(end, start, name="count"), unit, name="last")
            # A row without valid tokens would get index −1.
            self.index = ops.maximum(last, zero, name="index")
        self._move_to_scope(self.index)

    def gather_before(self, reader: Node, value: Value | None) -> Value:
        assert value is not None
        if value not in self.gathered:
            with self.graph.inserting(before=reader):
                self.gather(value)
        return self.gathered[value]

    def gather(self, value: Value) -> None:
        self.gathered[value] = ops.gather_rows(value, self.index, name="rows")
        self._move_to_scope(self.gathered[value], value, self.index)

    def _move_to_scope(self, value: Value, *sources: Value) -> None:
        """Move the nodes that compute `value` from `sources` to the scope ``last_token``, and rename their outputs."""
        for node in backward_slice([value], sources):
            for v in node.outputs:
                v.name = self.graph.reserve_name(f"{SCOPE}.{v.name.removeprefix(node.scope + '.')}")
            node.scope = SCOPE
