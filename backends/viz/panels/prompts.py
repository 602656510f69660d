"""A run of a model on a prompt: attention weights of every head, predicted next tokens, and expert choices.

The interpreter runs the references of the ops in float64; attention weights are stored as multiples of 1/255.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.errors import WeftError
from weft.ir.interpreter import interpret, widen
from weft.ir.op import Trait
from weft.ir.recipes.readers import Array

from .kinds import abbreviate_layers

MOST = 1_500_000  # attention weights in a page, a byte each
LIKELY = 5  # number of likeliest next tokens in the data
TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids")
Step = Callable[[int, int], None]  # progress: operations done and total


@dataclass
class Observer:
    """Observations of a run of `graph`.

    `weights`: attention over full sequences → its weights [heads, queries, keys].
    `choices`: mixture → expert weights [tokens, experts], 0 for an expert that is not chosen.
    `arrays`: the inputs of attentions and mixtures, from which the observations are computed.
    `step`: called with the number of nodes done and in total.
    """

    graph: Graph
    step: Step
    weights: dict[Node, Array] = field(default_factory=dict)
    choices: dict[Node, Array] = field(default_factory=dict)
    arrays: dict[Value, Array] = field(default_factory=dict)
    done: int = 0

    def watch(self, node: Node, outputs: tuple[Array, ...]) -> None:
        """Record the observations of `node` and report progress; the interpreter calls this after every node."""
        for value, array in zip(node.outputs, outputs, strict=True):
            if any(user.op is ops.moe or _is_full_attention(user) for user in value.users):
                self.arrays[value] = array
        if _is_full_attention(node):
            self.weights[node] = compute_attention_weights(node, self._operands(node))
        elif node.op is ops.moe:
            combine = self._value(node.operand("combine"))
            assert combine is not None
            self.choices[node] = combine.reshape(-1, combine.shape[-1])
        self.done += 1
        self.step(self.done, len(self.graph))

    def _operands(self, node: Node) -> dict[str, Array | None]:
        return {o.name: self._value(v) for o, v in zip(node.op.operands, node.inputs, strict=False)}

    def _value(self, value: Value | None) -> Array | None:
        if isinstance(value, Param):
            return widen(np.asarray(value.recipe.evaluate(self.graph.reader)))
        return None if value is None else self.arrays[value]


def _is_full_attention(node: Node) -> bool:
    """Return whether `node` is a softmax attention over full sequences: its batch size is that of an input."""
    if Trait.ATTENTION not in node.op.traits:
        return False
    return node.required_operand("q").shape[0] in {value.shape[0] for value in node.graph.inputs.values()}


def compute_attention_weights(node: Node, operands: Mapping[str, Array | None]) -> Array:
    """Return the attention weights [heads, queries, keys] of the first batch row of an attention.

    They are computed as its output for values that are one-hot vectors. With sinks, weights of a query sum to below 1.
    """
    k = operands["k"]
    assert k is not None
    keys, attrs = k.shape[1], dict(node.attrs)
    values = np.tile(np.eye(keys), attrs.get("kv_heads", attrs["heads"]))[None]
    arguments: dict[str, Any] = {**operands, "v": np.broadcast_to(values, (len(k), *values.shape[1:]))}
    for table in ("value_table", "value_dim"):
        arguments |= {table: None} if table in arguments else {}
        attrs |= {table: None} if table in attrs else {}
    weights: Array = np.asarray(node.op.reference(**arguments, **attrs))[0]
    return weights.reshape(len(weights), -1, keys).swapaxes(0, 1)


def run_prompt(graph: Graph, ids: Sequence[int], text: Callable[[Sequence[int]], str], step: Step) -> dict[str, Any]:
    """Run `graph` on the tokens `ids`; return "tokens", "layers" (attention weights), "next" and "experts" for a page.

    "next" is [] unless `graph` is a decoder. `text` decodes ids; `step` gets the numbers of nodes done and in total.

    Raises:
        WeftError: if `check_prompt` refuses the prompt.
    """
    check_prompt(graph, len(ids))
    row = np.array([ids])
    feeds = dict(zip(TEXT_INPUTS, (row, np.arange(len(ids))[None], np.ones_like(row), np.zeros_like(row)), strict=True))
    inputs = {name: feeds[name] for name in graph.inputs}
    observer = Observer(graph, step)
    observer.arrays = {value: inputs[name] for name, value in graph.inputs.items()}
    logits = interpret(graph, inputs, watch=observer.watch).get("logits")
    return {
        "tokens": [_decode_added(text, ids, i) for i in range(len(ids))],
        "layers": [_pack_weights(node, weights) for node, weights in observer.weights.items()],
        "next": [] if logits is None or not _is_decoder(graph) else _predict_tokens(logits[0], ids, text),
        "experts": [
            {"where": abbreviate_layers([node.scope]), "at": node.output.name, "counts": (chosen != 0).sum(0).tolist()}
            for node, chosen in observer.choices.items()
        ],
    }


def check_prompt(graph: Graph, count: int) -> None:
    """Check that a page can show a prompt of `count` tokens.

    Raises:
        WeftError: if `graph` reads other inputs than one token sequence, or `count` is 0, above its context, or gives
            more than MOST attention weights.
    """
    if strange := [name for name in graph.inputs if name not in TEXT_INPUTS]:
        raise WeftError(f"a prompt needs a model whose only input is a text, but {graph.name} also reads {strange[0]}")
    if count == 0:
        raise WeftError("the prompt has no tokens: give a longer text")
    context = graph.meta.get("context")
    if context and count > context:
        raise WeftError(f"the prompt has {count} tokens, but {graph.name} supports at most {context}: shorten it")
    heads = sum(node.attrs["heads"] for node in graph.nodes if _is_full_attention(node))
    each = MOST / max(1, heads)
    # n(n + 1) / 2 weights per head if tokens see only earlier ones, else n²: solved for n.
    most = int(((8 * each + 1) ** 0.5 - 1) / 2) if _is_decoder(graph) else int(each**0.5)
    if count > most:
        raise WeftError(f"the prompt has {count} tokens, but with {heads} heads at most {most} fit a page: shorten it")


def _is_decoder(graph: Graph) -> bool:
    return bool(graph.meta.get("kind") == "decoder")


def _pack_weights(node: Node, weights: Array) -> dict[str, Any]:
    """Return the data of an attention, with its weights [heads, queries, keys] as base64 of one byte per weight. Only
    the first i + 1 keys of query i are stored if the attention is causal."""
    steps = np.round(weights * 255).astype(np.uint8)
    rows = [row[: i + 1] if node.attrs.get("causal", False) else row for head in steps for i, row in enumerate(head)]
    return {
        "where": abbreviate_layers([node.scope or node.output.name]) or node.output.name,
        "at": node.output.name,
        "heads": len(weights),
        "causal": node.attrs.get("causal", False),
        "weights": base64.b64encode(np.concatenate(rows).tobytes()).decode(),
    }


def _predict_tokens(logits: Array, ids: Sequence[int], text: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Return for each position of `logits` [seq, vocab] the "likely" next tokens with probabilities and, except for
    the last position, the probability ("came") and "rank" (from 1) of the actual next token."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    chances = shifted / shifted.sum(-1, keepdims=True)
    predictions = []
    for i, row in enumerate(chances):
        best = np.argsort(-row, kind="stable")[:LIKELY]
        likely = [[_decode_added(text, [*ids[: i + 1], int(t)], i + 1), float(f"{row[t]:.4g}")] for t in best]
        came = ids[i + 1] if i + 1 < len(ids) else None
        actual = {} if came is None else {"came": float(f"{row[came]:.4g}"), "rank": int((row > row[came]).sum()) + 1}
        predictions.append({"likely": likely, **actual})
    return predictions


def _decode_added(text: Callable[[Sequence[int]], str], ids: Sequence[int], at: int) -> str:
    """Return the characters that the token at index `at` adds to the decoded text, or "[id]" if it adds none (BOS)."""
    before, after = text(ids[:at]), text(ids[: at + 1])
    return after[len(before) :] if after.startswith(before) and after != before else f"[{ids[at]}]"
