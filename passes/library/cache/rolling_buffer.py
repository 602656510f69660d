"""The pass that limits caches to the keys in the window of their attention (rolling buffers), and its inverse."""

from __future__ import annotations

from collections.abc import Iterable

from weft.ir import Graph, Node, Value, WeftError, ops
from weft.ir.op import Growth
from weft.ir.types import sizes

from ... import Pass, Trace
from ...analysis.states import find_caches, find_state_inputs, has_state
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import rebuild_node
from .kv_cache import cap_positions, run_in_chunks

_LONGEST_TRIAL = 40  # tokens; for wider windows only sequences within the window are tried


class RollingBuffer(Pass):
    """Limit the caches of attentions with a window to the keys in the window.

    The capacity axis of past_key_values.i.key and .value becomes F + window + `slack`, F the keep_first of
    sliding-window. The key of position p ≥ F is stored in slot F + (p − F) mod (window + slack) and replaces one that
    has left the window. A cache stays unchanged if several attentions read it, or if its new capacity is at least
    `length`, the longest sequence (None: the model's context). With more `slack`, ONNX Runtime moves keys less often.

    Condition: each batch row continues where its last call ended. Run kv-cache before.

    Source: Jiang 2023 (Mistral 7B), arXiv:2310.06825; Xiao 2023 (StreamingLLM), arXiv:2309.17453.

    Example rolling-buffer::

        graph example {
          input %q: f32[batch, seq, 8]
          input %k: f32[batch, seq, 4]
          input %position_ids: i64[batch, seq]
          input %attention_mask: i64[batch, total]
          input %past_k: f32[batch, 1, capacity, 4] as past_key_values.0.key
          input %past_v: f32[batch, 1, capacity, 4] as past_key_values.0.value
          %y: f32[batch, seq, 8], %k_now: f32[batch, 1, capacity, 4], %v_now: f32[batch, 1, capacity, 4] = attention(
            %q, %k, %k, _, %attention_mask, _, %past_k, %past_v, %position_ids,
            heads=2, kv_heads=1, causal=true, window=3)
          output y = %y
          output present.0.key = %k_now
          output present.0.value = %v_now
        }
    """

    name = "rolling-buffer"
    effect = "conditional"
    purpose = "Decode"
    on_fused = True
    see = ("kv-cache", "sliding-window", "full-caches")
    length: int | None = None
    slack: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.slack < 0:
            raise WeftError(f"rolling-buffer: slack={self.slack} must not be negative")
        attentions = [n for n in graph.nodes if n.op is ops.attention and has_state(n)]
        if not attentions:
            raise WeftError(f"rolling-buffer: graph {graph.name} has no cache; run kv-cache before it")
        limit = self.length or graph.meta.get("context")
        for node in attentions:
            size = _compute_capacity(node, self.slack)
            if size is None or (limit is not None and size >= limit):
                continue
            for past in _list_pasts(node):
                past.type = past.type.with_axis(2, size)
            trace.record_rewrite(self.name, rebuild_node(node, rolling=True).output.name)
        if not trace.rewrites[self.name]:
            trace.note(f"rolling-buffer: no cache has a window below {limit} tokens")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that calls of several sizes, some beyond the capacity, give the outputs of full caches."""
        _check_same_outputs(before, after, after, equivalence)


class FullCaches(Pass):
    """Extend rolling caches to the keys of the full sequence: the inverse of rolling-buffer.

    The capacity axis of past_key_values.i.key and .value becomes the symbol capacity again. onnxruntime-genai supports
    rolling caches only for prompts of equal length that have at least as many tokens as the cache.

    Condition: each batch row continues where its last call ended.

    Source: onnxruntime-genai, docs of the sliding_window section of genai_config.json.

    Example full-caches::

        graph example {
          input %q: f32[batch, seq, 8]
          input %k: f32[batch, seq, 4]
          input %position_ids: i64[batch, seq]
          input %attention_mask: i64[batch, total]
          input %past_k: f32[batch, 1, 3, 4] as past_key_values.0.key
          input %past_v: f32[batch, 1, 3, 4] as past_key_values.0.value
          %y: f32[batch, seq, 8], %k_now: f32[batch, 1, 3, 4], %v_now: f32[batch, 1, 3, 4] = attention(
            %q, %k, %k, _, %attention_mask, _, %past_k, %past_v, %position_ids,
            heads=2, kv_heads=1, causal=true, window=3, rolling=true)
          output y = %y
          output present.0.key = %k_now
          output present.0.value = %v_now
        }
    """

    name = "full-caches"
    effect = "conditional"
    purpose = "Decode"
    on_fused = True
    see = ("rolling-buffer",)
    tradeoff = "caches take memory for the longest sequence"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in filter(is_rolling, graph.nodes):
            for past in _list_pasts(node):
                past.type = past.type.with_axis(2, sizes.sym("capacity"))
            trace.record_rewrite(self.name, rebuild_node(node, rolling=False).output.name)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no cache rolls")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that calls of several sizes, some beyond the rolling capacity, give the outputs of rolling caches."""
        _check_same_outputs(before, after, before, equivalence)


def is_rolling(node: Node) -> bool:
    """Return whether `node` is an attention with a rolling cache."""
    return bool(node.attrs.get("rolling"))


def _check_same_outputs(before: Graph, after: Graph, rolling: Graph, equivalence: EquivalenceCheck) -> None:
    capacities = (spec.type.shape[2] for spec, _, _ in find_state_inputs(rolling) if spec.growth is Growth.WINDOW)
    total = max((size for size in capacities if isinstance(size, int)), default=0) + 4
    total = cap_positions(before, total if total <= _LONGEST_TRIAL else 6)
    inputs = equivalence.make_inputs(before, seq=total)
    for cuts in _list_cuts(total):
        expected, actual = (run_in_chunks(equivalence, graph, inputs, cuts) for graph in (before, after))
        equivalence.check_close(expected, actual, EXACT)


def _compute_capacity(node: Node, slack: int) -> int | None:
    """Return keep_first + window + `slack`, the capacity of a rolling cache of the attention `node`.
    Return None if it has no window, rolls already, or shares its cache."""
    window, first = node.attrs["window"], node.attrs["keep_first"]
    # A cache that another node also reads must keep all its keys.
    unshared = all(len(past.uses) == 1 for past in _list_pasts(node))
    return int(window) + first + slack if window is not None and unshared and not node.attrs["rolling"] else None


def _list_pasts(node: Node) -> list[Value]:
    return [past for spec in find_caches(node) if (past := node.operand(spec.past_operand)) is not None]


def _list_cuts(total: int) -> Iterable[tuple[int, ...]]:
    half = total // 2
    cuts = (total,), (1,) * total, (half, total - half), (total - 2, 1, 1), (2, 1, total - 3)
    return (c for c in cuts if min(c) > 0)
