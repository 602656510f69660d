"""Caches and states: a full pass becomes a step that continues where the last call ended."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.op import Growth, Trait
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes

from ...analysis.states import SOURCE, caches, give_states, has_state, keeper, states, taken_states
from ...analysis.tokens.scores import bias_makers
from ...analysis.tokens.tokenwise import Tokens, carries, token_axes, tokenwise
from ...core.base import Pass
from ...core.equivalence import EXACT, SIZES, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import changed
from .key_axis import KeyAxis

COUNTING = "positions should come from the input position_ids"
WITHOUT = "leave the cache out (--passes default,-kv-cache,-last-token-logits)"
_MASKED = (ops.attention, ops.lightning_index)  # which take a key mask beside a cache
MIXING = f"a token may see others by causal attention, recurrences and convolutions only, or {WITHOUT}"


@dataclass(frozen=True)
class KvCache(Pass):
    """Give every causal self-attention a cache and every recurrence its states.

    A call then takes up where the last one ended: keys and values of earlier tokens are read, not computed again.

    Adds the inputs attention_mask i64[batch, total] (1 for the valid tokens of past and call), position_ids i64[batch,
    seq] if missing, per attention i past_key_values.i.key and .value [batch, kv_heads, capacity, d] (only .key where
    values are part of the keys), per index j by which queries choose keys past_index.j.key, per recurrence j
    past_states.j.part of constant size, zero at first (part is conv, ssm, state or norm; a scan names its states, and
    may begin them with another number); adds the outputs present.i.key and .value, present_index.j.key,
    present_states.j.part. Attentions without a window to the same keys and values share one cache. States know no
    padding: the rows of a call must be equally long. What compares tokens, as some routers do, compares those of a
    call.

    Condition: a call is given what the last one of the same text returned; then prefill and steps, however the text is
    cut into calls, equal one full pass over it. Nothing but causal attention and recurrences may mix tokens.

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
    tradeoff = "a call also moves keys, values and states in and out; the calls after it compute less for that"

    def run(self, graph: Graph, trace: Trace) -> None:
        tokens = token_axes(graph)
        if tokens is not None:
            _check_causal(graph, tokens)
        attentions = [n for n in graph.nodes if caches(n)]
        recurrences = [n for n in graph.nodes if states(n)]
        if tokens is None or not attentions + recurrences:
            raise WeftError(f"kv-cache: graph {graph.name} has no causal self-attention to give a cache to")
        makers, comparing = _bias_makers(graph), _comparing(graph, tokens)
        _check_cacheable(graph, tokens, attentions, {*makers, *recurrences, *comparing})
        for node in comparing:
            trace.note(f"kv-cache: {node.op.name} (%{node.output.name}) compares the tokens of a call only")
        mask = _mask(graph, tokens, attentions)
        at = graph.inputs.get("position_ids")
        if at is None:
            at = graph.add_input("position_ids", TensorType(dtypes.i64, tokens))
        if at.shape != tokens:
            raise WeftError(f"kv-cache: input {at!r} should be a position per token, {list(tokens)}")
        keys = KeyAxis(graph, mask, at, makers)
        pasts, numbers = dict[Node, dict[str, Value]](), Counter[str]()
        for node, first in [(node, keeper(node)) for node in attentions]:
            trace.fired(self.name, node.output.name)
            given: dict[str, Value | None] = {caches(node)[0].positions: at}
            if node.op is ops.attention:
                given["bias"] = keys.extend(node.operand("bias"))
            if node.op in _MASKED:
                given["key_mask"] = mask
            if first in pasts:
                changed(node, {**given, **pasts[first]})
            else:
                pasts[first] = give_states(graph, node, numbers, given)
        # Only now: several biases may be made from the same counts.
        keys.drop_unused()
        for node in recurrences:
            trace.fired(self.name, node.output.name)
            give_states(graph, node, numbers, {})

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Every way to cut a text into calls gives the full pass (two ways for models above a million parameters)."""
        tokens = within_positions(before, 6)
        inputs = equivalence.inputs(before, seq=tokens)
        if "attention_mask" in inputs:
            # No padding: states of constant size cannot leave tokens out.
            inputs["attention_mask"] = np.ones_like(inputs["attention_mask"])
        whole, calls = equivalence.run(before, inputs), dict[tuple[int, ...], _Called]()
        for cuts in _cuts(before, tokens):
            stepped = run_in_chunks(equivalence, after, inputs, cuts, calls)
            try:
                equivalence.same(whole, {name: stepped[name] for name in whole}, EXACT)
            except WeftError as e:
                raise WeftError(f"in calls of {', '.join(map(str, cuts))} tokens: {e}") from None


_Called = tuple[dict[str, Array], dict[str, tuple[Array, ...]]]  # past and states for the next call; outputs by call


def run_in_chunks(
    equivalence: EquivalenceCheck,
    graph: Graph,
    inputs: dict[str, Array],
    cuts: tuple[int, ...],
    calls: dict[tuple[int, ...], _Called] | None = None,
) -> dict[str, Array]:
    """Outputs of a cached `graph` over calls of `cuts` tokens each, concatenated along axis 1 (scalars: in a row).

    The caches start as noise: what is not yet valid must not matter. The states start as they say. `calls` keeps what
    is made, for other cuts of the same tokens that begin with the same calls.
    """
    calls = {} if calls is None else calls
    total = sum(cuts)
    if () not in calls:
        # Capacity for three tokens too many: slots without a token must not matter.
        fed = equivalence.inputs(graph, batch=SIZES["batch"], seq=total, capacity=total + 3, total=total)
        calls[()] = (
            {
                name: np.full_like(fed[name], spec.initial) if spec.growth is Growth.CONSTANT else fed[name]
                for spec, name, _ in taken_states(graph)
            },
            {},
        )
    for i in range(len(cuts)):
        if cuts[: i + 1] not in calls:
            start, stop = sum(cuts[:i]), sum(cuts[: i + 1])
            calls[cuts[: i + 1]] = _called(equivalence, graph, inputs, (start, stop, total), calls[cuts[:i]])
    return {name: _joined(parts) for name, parts in calls[cuts][1].items()}


def _called(
    equivalence: EquivalenceCheck, graph: Graph, inputs: dict[str, Array], span: tuple[int, int, int], before: _Called
) -> _Called:
    """A call with the tokens `span` = from, to, of how many, after those of `before`."""
    (start, stop, total), (past, found), batch = span, before, SIZES["batch"]
    positions = np.broadcast_to(np.arange(start, stop), (batch, stop - start))
    call = {"position_ids": positions, "attention_mask": np.ones((batch, stop), np.int64)}
    others = {k: v for k, v in inputs.items() if k not in call}
    rows = {k: v[:, start:stop] for k, v in others.items() if k not in SOURCE and v.shape[:2] == (batch, total)}
    made = equivalence.run(graph, {**others, **rows, **call, **past})
    presents = {present: name for _, name, present in taken_states(graph)}
    # New dicts: `calls` keeps what every shorter run of calls left.
    past = past | {presents[name]: array for name, array in made.items() if name in presents}
    found = found | {name: (*found.get(name, ()), array) for name, array in made.items() if name not in presents}
    return past, found


def _joined(parts: tuple[Array, ...]) -> Array:
    """Concatenate the results of calls; scalars, such as losses, give one entry per call."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, 1) if parts[0].ndim else np.stack(parts)


def within_positions(graph: Graph, tokens: int) -> int:
    """`tokens`, or as many as the graph has positions for."""
    return min(tokens, graph.meta.get("max_positions") or tokens)


def _cuts(graph: Graph, total: int) -> Iterable[tuple[int, ...]]:
    """The calls of `total` tokens in all, six at most, that the check of `graph` makes."""
    tokens = token_axes(graph)
    if tokens is not None and _comparing(graph, tokens):
        return [(total,)]
    small = sum(math.prod(p.type.concrete({})) for p in graph.params.values()) < 1_000_000
    return _compositions(total) if small or total < 6 else [(6,), (2, 3, 1)]


def _compositions(n: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `n` as an ordered sum."""
    for bits in itertools.product((False, True), repeat=n - 1):
        parts = [1]
        for cut in bits:
            if cut:
                parts.append(1)
            else:
                parts[-1] += 1
        yield tuple(parts)


def _bias_makers(graph: Graph) -> list[Node]:
    """The nodes that compute biases of causal attentions."""
    causal = (n for n in graph.nodes if n.op is ops.attention and n.attrs["causal"])
    return bias_makers(graph, [b for n in causal if (b := n.operand("bias")) is not None])


def _comparing(graph: Graph, tokens: Tokens) -> list[Node]:
    """The nodes that may compare the tokens of a call: routers, and what depends on nothing but their positions."""
    makers, found = _bias_makers(graph), []
    contents = {v for name, v in graph.inputs.items() if name != "position_ids"}
    for node in graph.nodes:
        if not contents.isdisjoint(node.inputs):
            contents.update(node.outputs)
        mixes = any(carries(v, tokens) for v in node.inputs) and tokenwise(node, tokens) is None
        if Trait.COMPARES in node.op.traits or (mixes and node not in makers and node.output not in contents):
            found.append(node)
    return found


def _check_cacheable(graph: Graph, tokens: Tokens, attentions: list[Node], known: set[Node]) -> None:
    """Nothing but `attentions` and what is `known` may let a token see another."""
    for node in graph.nodes:
        if has_state(node):
            raise WeftError(f"kv-cache: {node!r} (%{node.output.name}) has a cache already")
        if node in attentions:
            if node.inputs[1] is not None and node.inputs[1].shape[1] != tokens[1]:
                raise WeftError(
                    f"kv-cache: {node!r} (%{node.output.name}) is causal over keys that are not its own tokens"
                )
            continue
        reads = any(carries(v, tokens) for v in node.inputs)
        if reads and tokenwise(node, tokens) is None and node not in known:
            raise WeftError(
                f"kv-cache: {node.op.name} (%{node.output.name}) mixes tokens or counts them, and has no cache; "
                f"{COUNTING if node.op in (ops.iota, ops.cumsum) else MIXING}"
            )


def _check_causal(graph: Graph, tokens: Tokens) -> None:
    """No attention may let a token see later ones."""
    for node in graph.nodes:
        if node.attrs.get("causal") is False and len([v for v in node.inputs if carries(v, tokens)]) > 1:
            raise WeftError(
                f"kv-cache: {node.op.name} (%{node.output.name}) is not causal: later tokens "
                f"change what earlier ones see, so nothing can be cached; make it causal, or {WITHOUT}"
            )


def _mask(graph: Graph, tokens: Tokens, attentions: list[Node]) -> Value:
    """The input attention_mask over past and call."""
    wanted = TensorType(dtypes.i64, (tokens[0], sizes.sym("total")))
    mask = graph.inputs.get("attention_mask")
    for node in attentions:
        given = node.operand("key_mask") if node.op in _MASKED else None
        if given is not None and given is not mask:
            raise WeftError(f"kv-cache: the key mask %{given.name} of {node!r} is not the input attention_mask")
    if mask is None:
        return graph.add_input("attention_mask", wanted)
    if any(n not in attentions for n in mask.users):
        raise WeftError("kv-cache: the input attention_mask has readers besides causal self-attention")
    mask.type = wanted
    return mask
