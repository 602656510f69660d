"""KV caches and recurrent states: a forward pass continues the sequence where the previous pass ended."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.op import Growth, StateSpec, Trait
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes

from ... import Pass, Trace
from ...analysis.states import (
    SOURCE,
    add_state_io,
    find_cache_owner,
    find_caches,
    find_state_inputs,
    find_states,
    has_state,
)
from ...analysis.tokens.scores import find_bias_nodes
from ...analysis.tokens.tokenwise import Tokens, find_token_axes, find_token_operands, has_token_axes
from ...core.equivalence import EXACT, SIZES, EquivalenceCheck
from ...edits.edit import backward_slice, rebuild_node


class BiasExtension:
    """A rewrite of attention biases over the new keys [.., seq] into biases over past and new keys [.., total].
    `positions` [batch, seq] are those of the new tokens; `bias_nodes` compute the biases. An iota over tokens, and
    `positions` as the operand `keys` of a bias op, are replaced by an iota along axis 1 of `mask` [batch, total]."""

    def __init__(self, graph: Graph, mask: Value, positions: Value, bias_nodes: list[Node]) -> None:
        self.graph = graph
        self.mask = mask
        self.positions = positions
        self.bias_nodes = bias_nodes
        self.extended: dict[Value, Value] = {}

    def extend(self, bias: Value | None) -> Value | None:
        """Return `bias` [batch, heads, queries, keys] extended to [batch, heads, queries, total].

        None, and the output of an op that has its own cache, are returned unchanged.

        Raises:
            WeftError: if the keys are not counted by an iota over the tokens, or the queries not by position_ids.
        """
        if bias is None or (bias.producer is not None and find_caches(bias.producer)):
            return bias
        counts = [n.output for n in self.bias_nodes if n.op is ops.iota]
        dependencies = {*backward_slice([bias], counts), *(v.producer for v in counts)}
        for node in self.bias_nodes:
            if node in dependencies and node.output not in self.extended:
                try:
                    self._reemit_node(node)
                except WeftError as e:
                    raise WeftError(f"kv-cache: bias %{bias.name} does not extend to cached keys: {e}") from None
        new = self.extended.get(bias, bias)
        queries, keys = new.shape[2:]
        if (keys != sizes.sym("total") and keys != 1) or "total" in sizes.list_names(queries):
            raise WeftError(
                f"kv-cache: bias %{new.name} does not extend to cached keys: compute it from an iota over tokens for "
                "keys, and from the input position_ids for queries"
            )
        return new

    def _reemit_node(self, node: Node) -> None:
        """Emit `node` again over all keys and store the outputs in `extended`; do nothing if no operand changes."""
        operands = [None if v is None else self.extended.get(v, v) for v in node.inputs]
        with self.graph.inserting(before=node):
            if node.op is ops.iota and sizes.list_names(node.output.shape[0]):
                # The mask covers past and new tokens, the input of tokens only the new ones.
                outputs = ops.iota.emit(self.mask, axis=1)
            else:
                for i, (operand, v) in enumerate(zip(node.op.operands, operands, strict=False)):
                    if operand.name == "keys" and v is self.positions:
                        operands[i] = ops.unsqueeze(ops.iota(self.mask, axis=1), axes=(0,), name="key_positions")
                if operands == list(node.inputs):
                    return
                outputs = node.op.emit(*operands, **node.attrs)
        for old, new in zip(node.outputs, outputs, strict=True):
            self.extended[old] = new
            old.name, new.name = new.name, old.name

    def drop_unused(self) -> None:
        """Erase the nodes in `bias_nodes` that have no readers left because extended copies replaced them."""
        # Readers first: a node can be erased only after all of its readers.
        for node in reversed(self.bias_nodes):
            if not any(v.uses or v.is_output for v in node.outputs):
                self.graph.erase(node)


COUNTING_REMEDY = "take positions from the input position_ids"
NO_CACHE_REMEDY = "leave the cache out (--passes default,-kv-cache,-last-token-logits)"
_MASKED_OPS = (ops.attention, ops.lightning_index)  # ops that read both a key mask and a cache
MIXING_REMEDY = f"mix tokens by causal attention, recurrences and convolutions only, or {NO_CACHE_REMEDY}"


class KvCache(Pass):
    """Give every causal self-attention a cache and every recurrence its states.

    A forward pass then continues where the last one ended: it reads keys and values of earlier tokens from the cache.
    New inputs, and the outputs that return their new contents:

    - attention_mask i64[batch, total]: 1 for valid tokens, past and new; position_ids i64[batch, seq] if missing.
    - past_key_values.i.key and .value [batch, kv_heads, capacity, d] → present.i.key and .value per attention i (only
      .key if values are part of the keys); past_index.j.key → present_index.j.key per lightning index j.
    - past_states.j.part → present_states.j.part per recurrence j, of constant size, initially zero (part is conv, ssm,
      state or norm; a scan names its states and may have other initial constants).

    Attentions without a window that read the same keys and values share one cache. States cannot skip padding: all
    batch rows need equally many new tokens. Ops that compare tokens, such as some routers, compare new tokens only.

    Condition: only causal attention and recurrences mix tokens, and each call is passed the caches and states that the
    previous call on the same sequence returned. Prefill and decode steps of any lengths then equal one full pass.

    Source: Shazeer 2019, arXiv:1911.02150; Pope 2022, arXiv:2211.05102.

    Example kv-cache::

        graph example {
          input %input_ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %wk: f32[2, 4] = normal([2, 4], std=0.5, stream="k")
          param %wv: f32[2, 4] = normal([2, 4], std=0.5, stream="v")
          %x: f32[batch, seq, 4] = embedding(%input_ids, %embed)
          %k: f32[batch, seq, 2] = linear(%x, %wk)
          %v: f32[batch, seq, 2] = linear(%x, %wv)
          %y: f32[batch, seq, 4] = attention(%x, %k, %v, heads=2, kv_heads=1, causal=true)
          %logits: f32[batch, seq, 11] = linear(%y, %embed)
          output logits = %logits
        }
    """

    name = "kv-cache"
    effect = "conditional"
    purpose = "Decode"
    on_fused = True
    see = ("rolling-buffer", "last-token-logits")
    tradeoff = "each call also moves keys, values and states in and out; in return later calls compute less"

    def run(self, graph: Graph, trace: Trace) -> None:
        tokens = find_token_axes(graph)
        if tokens is not None:
            _check_causal(graph, tokens)
        attentions = [n for n in graph.nodes if find_caches(n)]
        recurrences = [n for n in graph.nodes if find_states(n)]
        if tokens is None or not attentions + recurrences:
            raise WeftError(f"kv-cache: graph {graph.name} has no causal self-attention to give a cache to")
        bias_nodes, comparing = _list_bias_nodes(graph), _list_comparing_nodes(graph, tokens)
        _check_cacheable(graph, tokens, attentions, {*bias_nodes, *recurrences, *comparing})
        for node in comparing:
            trace.note(f"kv-cache: {node.op.name} (%{node.output.name}) compares new tokens only, not cached ones")
        mask = _add_total_mask(graph, tokens, attentions)
        positions = graph.inputs.get("position_ids")
        if positions is None:
            positions = graph.add_input("position_ids", TensorType(dtypes.i64, tokens))
        if positions.shape != tokens:
            raise WeftError(f"kv-cache: input {positions!r} must have shape {list(tokens)}, a position per token")
        keys = BiasExtension(graph, mask, positions, bias_nodes)
        pasts, counters = dict[Node, dict[str, Value]](), Counter[str]()
        for node, first in [(node, find_cache_owner(node)) for node in attentions]:
            trace.record_rewrite(self.name, node.output.name)
            operands: dict[str, Value | None] = {find_caches(node)[0].positions: positions}
            if node.op is ops.attention:
                operands["bias"] = keys.extend(node.operand("bias"))
            if node.op in _MASKED_OPS:
                operands["key_mask"] = mask
            if first in pasts:
                rebuild_node(node, {**operands, **pasts[first]})
            else:
                pasts[first] = add_state_io(graph, node, counters, operands)
        # Only now: several biases may be computed from the same counts.
        keys.drop_unused()
        for node in recurrences:
            trace.record_rewrite(self.name, node.output.name)
            add_state_io(graph, node, counters, {})

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that every way to cut a sequence into calls (two, if the model is large) equals the full pass."""
        tokens = cap_positions(before, 6)
        inputs = equivalence.make_inputs(before, seq=tokens)
        if "attention_mask" in inputs:
            # No padding: states of constant size cannot ignore tokens.
            inputs["attention_mask"] = np.ones_like(inputs["attention_mask"])
        full_pass, calls = equivalence.run(before, inputs), dict[tuple[int, ...], _Progress]()
        for cuts in _list_cuts(before, tokens):
            chunked = run_in_chunks(equivalence, after, inputs, cuts, calls)
            try:
                equivalence.check_close(full_pass, {name: chunked[name] for name in full_pass}, EXACT)
            except WeftError as e:
                raise WeftError(f"in calls of {', '.join(map(str, cuts))} tokens: {e}") from None


_Progress = tuple[dict[str, Array], dict[str, tuple[Array, ...]]]  # past and states for the next call; outputs by call


def run_in_chunks(
    equivalence: EquivalenceCheck,
    graph: Graph,
    inputs: dict[str, Array],
    cuts: tuple[int, ...],
    calls: dict[tuple[int, ...], _Progress] | None = None,
) -> dict[str, Array]:
    """Run `graph`, which has caches, in consecutive calls of `cuts` tokens; return the outputs concatenated on axis 1.
    Scalar outputs of several calls are stacked to [calls]. Caches start as noise, since slots without a token must not
    matter, and states at their initial values. `calls` stores results, keyed by the prefix of `cuts`, for later runs
    on the same tokens."""
    calls = {} if calls is None else calls
    total = sum(cuts)
    if () not in calls:
        # Capacity for three more tokens: slots without a token must not matter.
        samples = equivalence.make_inputs(graph, batch=SIZES["batch"], seq=total, capacity=total + 3, total=total)
        calls[()] = {name: _clear_state(spec, samples[name]) for spec, name, _ in find_state_inputs(graph)}, {}
    for i in range(len(cuts)):
        if cuts[: i + 1] not in calls:
            start, stop = sum(cuts[:i]), sum(cuts[: i + 1])
            calls[cuts[: i + 1]] = _run_call(equivalence, graph, inputs, (start, stop, total), calls[cuts[:i]])
    return {name: _join_calls(parts) for name, parts in calls[cuts][1].items()}


def _clear_state(spec: StateSpec, sample: Array) -> Array:
    """Return the state of `spec` before the first call: noise in the slots of a cache, `sample`, unless it grows."""
    if spec.growth is Growth.CONSTANT:
        return np.full_like(sample, spec.initial)
    return sample[:, :, :0] if spec.growth is Growth.APPEND else sample


def _run_call(
    equivalence: EquivalenceCheck, graph: Graph, inputs: dict[str, Array], span: tuple[int, int, int], before: _Progress
) -> _Progress:
    """Continue from `before` with a call on the tokens start:stop of `total`; return the new states and all outputs.
    `span` is (start, stop, total)."""
    (start, stop, total), (past, outputs), batch = span, before, SIZES["batch"]
    positions = np.broadcast_to(np.arange(start, stop), (batch, stop - start))
    call = {"position_ids": positions, "attention_mask": np.ones((batch, stop), np.int64)}
    shared = {k: v for k, v in inputs.items() if k not in call}
    rows = {k: v[:, start:stop] for k, v in shared.items() if k not in SOURCE and v.shape[:2] == (batch, total)}
    results = equivalence.run(graph, {**shared, **rows, **call, **past})
    presents = {present: name for _, name, present in find_state_inputs(graph)}
    # New dicts: `calls` keeps the progress of every shorter run of calls.
    past = past | {presents[name]: array for name, array in results.items() if name in presents}
    outputs = outputs | {
        name: (*outputs.get(name, ()), array) for name, array in results.items() if name not in presents
    }
    return past, outputs


def _join_calls(parts: tuple[Array, ...]) -> Array:
    """Concatenate the results of calls along axis 1; stack several scalars, such as losses, into an array [calls]."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, 1) if parts[0].ndim else np.stack(parts)


def cap_positions(graph: Graph, tokens: int) -> int:
    """Return min(tokens, max_positions), or `tokens` if the metadata of `graph` has no max_positions."""
    return min(tokens, graph.meta.get("max_positions") or tokens)


def _list_cuts(graph: Graph, total: int) -> Iterable[tuple[int, ...]]:
    """Return the cuts of `total` (at most 6) tokens that the check of `graph` runs, as tuples of lengths of calls."""
    tokens = find_token_axes(graph)
    if tokens is not None and _list_comparing_nodes(graph, tokens):
        return [(total,)]
    small = sum(math.prod(p.type.concrete({})) for p in graph.params.values()) < 1_000_000
    return _list_compositions(total) if small or total < 6 else [(6,), (2, 3, 1)]


def _list_compositions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `n` as an ordered sum of positive integers."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i for i, cut in enumerate(cuts, 1) if cut]
        yield tuple(stop - start for start, stop in itertools.pairwise([0, *ends, n]))


def _list_bias_nodes(graph: Graph) -> list[Node]:
    causal = (n for n in graph.nodes if n.op is ops.attention and n.attrs["causal"])
    return find_bias_nodes(graph, [b for n in causal if (b := n.operand("bias")) is not None])


def _list_comparing_nodes(graph: Graph, tokens: Tokens) -> list[Node]:
    """Return the ops that compare tokens (trait COMPARES), and nodes outside biases that mix nothing but positions."""
    bias_nodes, comparing = _list_bias_nodes(graph), []
    contents = {v for name, v in graph.inputs.items() if name != "position_ids"}
    for node in graph.nodes:
        if not contents.isdisjoint(node.inputs):
            contents.update(node.outputs)
        mixes = any(has_token_axes(v, tokens) for v in node.inputs) and find_token_operands(node, tokens) is None
        if Trait.COMPARES in node.op.traits or (mixes and node not in bias_nodes and node.output not in contents):
            comparing.append(node)
    return comparing


def _check_cacheable(graph: Graph, tokens: Tokens, attentions: list[Node], supported: set[Node]) -> None:
    """Raise a WeftError if a node outside `attentions` and `supported` mixes tokens, or a node cannot get a cache."""
    for node in graph.nodes:
        if has_state(node):
            raise WeftError(f"kv-cache: {node!r} (%{node.output.name}) has a cache already")
        if node in attentions:
            if node.inputs[1] is not None and node.inputs[1].shape[1] != tokens[1]:
                raise WeftError(
                    f"kv-cache: {node!r} (%{node.output.name}) has causal=true, but its keys are of other tokens"
                )
            continue
        reads_tokens = any(has_token_axes(v, tokens) for v in node.inputs)
        if reads_tokens and find_token_operands(node, tokens) is None and node not in supported:
            raise WeftError(
                f"kv-cache: {node.op.name} (%{node.output.name}) mixes or counts tokens but cannot have a cache: "
                f"{COUNTING_REMEDY if node.op in (ops.iota, ops.cumsum) else MIXING_REMEDY}"
            )


def _check_causal(graph: Graph, tokens: Tokens) -> None:
    """Raise a WeftError if a node with the attribute causal=false mixes the tokens of `graph`."""
    for node in graph.nodes:
        if node.attrs.get("causal") is False and len([v for v in node.inputs if has_token_axes(v, tokens)]) > 1:
            raise WeftError(
                f"kv-cache: {node.op.name} (%{node.output.name}) cannot have a cache, as it is not causal: make it "
                f"causal, or {NO_CACHE_REMEDY}"
            )


def _add_total_mask(graph: Graph, tokens: Tokens, attentions: list[Node]) -> Value:
    """Return the input attention_mask i64 [batch, total] over past and new tokens: added, or widened from [batch, seq].
    Raise a WeftError if one of `attentions` has another key mask, or a node not in `attentions` reads this input."""
    mask_type = TensorType(dtypes.i64, (tokens[0], sizes.sym("total")))
    mask = graph.inputs.get("attention_mask")
    for node in attentions:
        key_mask = node.operand("key_mask") if node.op in _MASKED_OPS else None
        if key_mask is not None and key_mask is not mask:
            raise WeftError(f"kv-cache: the key mask %{key_mask.name} of {node!r} must be the input attention_mask")
    if mask is None:
        return graph.add_input("attention_mask", mask_type)
    if any(n not in attentions for n in mask.users):
        raise WeftError("kv-cache: the input attention_mask must be read by causal self-attention only")
    mask.type = mask_type
    return mask
