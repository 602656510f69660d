"""The pass that lets caches grow: each call returns the past with its new keys and values appended."""

from __future__ import annotations

from weft.ir import Graph, Value, WeftError, ops
from weft.ir.op import Growth
from weft.ir.types import sizes

from ... import Pass, Trace
from ...analysis.states import find_caches, find_state_inputs, has_cache, has_state
from ...analysis.tokens.tokenwise import find_token_axes
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import backward_slice, erase_unused, rebuild_node, replace_uses, substitute_size
from .kv_cache import cap_positions, run_in_chunks
from .last_token_logits import SCOPE
from .rolling_buffer import FullCaches

PAST = "past"  # the size of caches before a call, in tokens


class ConcatCaches(Pass):
    """Replace caches that a call writes into by caches to which it appends: the form that most runtimes support.

    past_key_values.i.key and .value become [batch, kv_heads, past, d], present.i.key and .value [batch, kv_heads,
    past + seq, d], and attention_mask [batch, past + seq]. The first call gets caches of 0 tokens. A 0 in the mask
    hides a slot, wherever it is, so prompts may be padded on either side; position_ids count the valid tokens of a
    batch row, as in transformers. Rolling caches become full ones.

    Condition: each call is passed the caches that the previous call on the same sequences returned. Run kv-cache
    before, and last-token-logits, if at all.

    Source: the models that optimum exports, and DynamicCache of transformers.

    Example concat-caches, on the graph of rolling-buffer.
    """

    name = "concat-caches"
    effect = "conditional"
    purpose = "Decode"
    on_fused = True
    see = ("kv-cache", "rolling-buffer")
    tradeoff = "each call copies the caches"

    def run(self, graph: Graph, trace: Trace) -> None:
        tokens, mask = find_token_axes(graph), graph.inputs.get("attention_mask")
        if not has_cache(graph):
            raise WeftError(f"{self.name}: graph {graph.name} has no cache; run kv-cache before it")
        if not can_append(graph):
            raise WeftError(f"{self.name}: relative_attention in {graph.name} needs caches with slots by position")
        caches = [spec for node in graph.nodes if has_state(node) for spec in find_caches(node)]
        if all(spec.growth is Growth.APPEND for spec in caches) or tokens is None or mask is None:
            trace.note(f"{self.name}: no cache has a fixed capacity")
            return
        FullCaches().run(graph, Trace())
        substitute_size(graph, "capacity", sizes.sym(PAST))
        substitute_size(graph, "total", sizes.sym(PAST) + tokens[1])
        for node in [n for n in graph.nodes if find_caches(n) and has_state(n)]:
            positions = find_caches(node)[0].positions
            trace.record_rewrite(self.name, rebuild_node(node, {positions: None}).output.name)
        if rest := _count_valid_keys(graph, mask):
            trace.note(f"{self.name}: %{rest.name} counts slots, so padding must not be between tokens")
        _find_last_tokens(graph, mask)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that calls of several sizes give the outputs of caches with slots by position."""
        total = cap_positions(before, 6)
        inputs = equivalence.make_inputs(before, seq=total)
        presents = {present for _, _, present in find_state_inputs(after)}
        for cuts in [(total,), *([(total - 3, 2, 1)] if total > 3 else [])]:
            expected, actual = (run_in_chunks(equivalence, graph, inputs, cuts) for graph in (before, after))
            equivalence.check_close({k: v for k, v in expected.items() if k not in presents}, actual, EXACT)


def can_append(graph: Graph) -> bool:
    """Return whether all attentions of `graph` can append to their caches."""
    return all(node.op in (ops.attention, ops.lightning_index) for node in graph.nodes if find_caches(node))


def _count_valid_keys(graph: Graph, mask: Value) -> Value | None:
    """Let biases by position count the valid keys of each batch row, as position_ids do for queries, not slots.
    Return a value that still counts slots, if one does."""
    for node in [n for n in graph.nodes if n.op is ops.unsqueeze]:
        counter = node.inputs[0].producer if node.inputs[0] is not None else None
        if counter is None or counter.op is not ops.iota or counter.inputs[0] is not mask:
            continue
        with graph.inserting(before=node):
            counts = ops.cumsum(mask, axis=1)
            replace_uses(node.output, ops.affine(counts, by=1, plus=-1))
        erase_unused(graph, [node, counter])
    return next((n.output for n in mask.users if n.op is ops.iota), None)


def _find_last_tokens(graph: Graph, mask: Value) -> None:
    """Let last-token-logits find the last token by the mask: valid tokens need not be the first ones of a call."""
    for node in [n for n in graph.nodes if n.scope == SCOPE and n.op is ops.maximum]:
        with graph.inserting(before=node):
            slots, tokens = (
                ops.unsqueeze(ops.iota(x, axis=1), axes=(0,)) for x in (mask, graph.inputs["position_ids"])
            )
            last, last_slot, last_token = (ops.max(x, axes=(1,), keepdims=True) for x in (slots * mask, slots, tokens))
            # A call without valid tokens in a row would get an index below 0.
            index = ops.maximum(last - (last_slot - last_token), ops.affine(last, by=0))
        replace_uses(node.output, index)
        erase_unused(graph, backward_slice([node.output], graph.inputs.values()))
