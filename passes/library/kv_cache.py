"""The key-value cache: a full pass becomes a step that continues from cached keys and values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, dtypes, ops, sizes
from weft.ir.archive import Array

from ..base import Pass
from ..edit import hand_over
from ..key_axis import KeyAxis, bias_makers
from ..tokens import Tokens, carries, token_axes, tokenwise
from ..trace import Trace
from ..trial import EXACT, SIZES, Trial

ROUTERS = {"limit_capacity", "expert_choice"}  # they compare the tokens of a call


@dataclass(frozen=True)
class KvCache(Pass):
    """Give every causal self-attention a cache, so that a call takes up where the last one ended.

    Adds the inputs attention_mask i64[batch, total] (1 for the valid tokens of past and call), position_ids
    i64[batch, seq] if missing, and per attention i past_key_values.i.key and .value [batch, kv_heads, capacity, d]
    (a latent attention has no .value); adds the outputs present.i.key and .value. Condition: prefill and steps, however
    a text is cut into calls, equal one full pass over it.
    """

    name = "kv-cache"
    effect = "conditional"

    def run(self, graph: Graph, trace: Trace) -> None:
        tokens = token_axes(graph)
        attentions = [n for n in graph.nodes if n.op.name == "attention" and n.attrs["causal"]]
        if tokens is None or not attentions:
            raise WeftError(f"kv-cache: graph {graph.name} has no causal self-attention to give a cache to")
        makers = bias_makers(graph, [b for n in attentions if (b := n.operand("bias")) is not None])
        _check_cacheable(graph, tokens, attentions, makers)
        for node in graph.nodes:
            if node.op.name in ROUTERS:
                trace.note(f"kv-cache: {node.op.name} (%{node.output.name}) compares the tokens of a call only")
        mask = _mask(graph, tokens, attentions)
        at = graph.inputs.get("position_ids") or graph.add_input("position_ids", TensorType(dtypes.i64, tokens))
        if at.shape != tokens:
            raise WeftError(f"kv-cache: input {at!r} should be a position per token, {list(tokens)}")
        keys = KeyAxis(graph, mask, at, makers)
        for i, node in enumerate(attentions):
            q, k, v, bias, _, sinks = [*node.inputs, *[None] * 6][:6]
            assert k is not None
            heads = node.attrs["kv_heads"]
            past: list[Value | None] = []
            for part, fresh in (("key", k), ("value", v)):
                if fresh is None:  # a latent cache: values are part of the keys
                    past.append(None)
                    continue
                shape = (tokens[0], heads, sizes.sym("capacity"), fresh.width // heads)
                past.append(graph.add_input(f"past_key_values.{i}.{part}", TensorType(fresh.type.dtype, shape)))
            with graph.inserting(before=node):
                outs = ops.attention.emit(q, k, v, keys.extend(bias), mask, sinks, *past, at, **node.attrs)
            trace.fired(self.name, node.output.name)
            hand_over(node.output, outs[0])
            graph.erase(node)
            for part, present in zip(("key", "value"), outs[1:], strict=False):
                graph.add_output(f"present.{i}.{part}", present)
        keys.drop_unused()

    def check(self, before: Graph, after: Graph, trial: Trial) -> None:
        """Every way to cut a text into calls gives the full pass (two ways for models above a million parameters)."""
        inputs = trial.inputs(before, seq=6)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = np.ones_like(inputs["attention_mask"])
        whole = trial.run(before, inputs)
        for cuts in _cuts(before):
            stepped = run_in_chunks(trial, after, inputs, cuts)
            try:
                trial.same(whole, {name: stepped[name] for name in whole}, EXACT)
            except WeftError as e:
                raise WeftError(f"in calls of {', '.join(map(str, cuts))} tokens: {e}") from None


def run_in_chunks(trial: Trial, graph: Graph, inputs: dict[str, Array], cuts: tuple[int, ...]) -> dict[str, Array]:
    """Outputs of a cached `graph` over calls of `cuts` tokens each, concatenated along axis 1.

    The caches start as noise: what is not yet valid must not matter.
    """
    total = sum(cuts)
    batch = SIZES["batch"]
    fed = trial.inputs(graph, batch=batch, seq=total, capacity=total + 3, total=total)
    caches = {k: v for k, v in fed.items() if k.startswith("past_key_values.")}
    found: dict[str, list[Array]] = {}
    start = 0
    for n in cuts:
        positions = np.broadcast_to(np.arange(start, start + n), (batch, n))
        call = {"position_ids": positions, "attention_mask": np.ones((batch, start + n), np.int64)}
        others = {k: v for k, v in inputs.items() if k not in call}
        rows = {k: v[:, start : start + n] for k, v in others.items() if v.shape[:2] == (batch, total)}
        outs = trial.run(graph, {**others, **rows, **call, **caches})
        for name, array in outs.items():
            if name.startswith("present."):
                caches["past_key_values." + name.removeprefix("present.")] = array
            else:
                found.setdefault(name, []).append(array)
        start += n
    return {name: np.concatenate(parts, 1) for name, parts in found.items()}


def _cuts(graph: Graph) -> Iterable[tuple[int, ...]]:
    """The calls of six tokens in all that the check of `graph` makes."""
    if any(node.op.name in ROUTERS for node in graph.nodes):
        return [(6,)]
    small = sum(math.prod(p.type.concrete({})) for p in graph.params.values()) < 1_000_000
    return _compositions(6) if small else [(6,), (2, 3, 1)]


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


def _check_cacheable(graph: Graph, tokens: Tokens, attentions: list[Node], makers: list[Node]) -> None:
    """Nothing but `attentions` and the `makers` of their biases may let a token see another."""
    for node in graph.nodes:
        if node in attentions:
            if node.operand("past_k") is not None:
                raise WeftError(f"kv-cache: {node!r} (%{node.output.name}) has a cache already")
            if node.inputs[1] is not None and node.inputs[1].shape[1] != tokens[1]:
                raise WeftError(
                    f"kv-cache: {node!r} (%{node.output.name}) is causal over keys that are not its own tokens"
                )
            continue
        reads = any(carries(v, tokens) for v in node.inputs)
        if reads and tokenwise(node, tokens) is None and node not in makers and node.op.name not in ROUTERS:
            raise WeftError(
                f"kv-cache: {node.op.name} (%{node.output.name}) mixes tokens or counts them, and has no cache; "
                "positions should come from the input position_ids"
            )


def _mask(graph: Graph, tokens: Tokens, attentions: list[Node]) -> Value:
    """The input attention_mask over past and call."""
    wanted = TensorType(dtypes.i64, (tokens[0], sizes.sym("total")))
    mask = graph.inputs.get("attention_mask")
    for node in attentions:
        given = node.operand("key_mask")
        if given is not None and given is not mask:
            raise WeftError(f"kv-cache: the key mask %{given.name} of {node!r} is not the input attention_mask")
    if mask is None:
        return graph.add_input("attention_mask", wanted)
    if any(n not in attentions for n in mask.users):
        raise WeftError("kv-cache: the input attention_mask has readers besides causal self-attention")
    mask.type = wanted
    return mask
