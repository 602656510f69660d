"""A model run on a text: attention weights of every head, predicted next tokens, and expert choices.

All is computed by the meaning of the ops, in float64; attention weights are stored as steps of 1/255.
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

from .kinds import layers

MOST = 1_500_000  # attention weights in a page, a byte each
LIKELY = 5  # tokens that are told of those expected next
TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids")
Step = Callable[[int, int], None]  # operations done, in all


@dataclass
class Seen:
    """Observations of a run by node: attention weights [heads, queries, keys] and expert choices [tokens, experts];
    `kept` are the values that these are computed from."""

    graph: Graph
    step: Step
    weights: dict[Node, Array] = field(default_factory=dict)
    choices: dict[Node, Array] = field(default_factory=dict)
    kept: dict[Value, Array] = field(default_factory=dict)
    done: int = 0

    def watch(self, node: Node, outputs: tuple[Array, ...]) -> None:
        """Called for every node with what it makes."""
        for value, array in zip(node.outputs, outputs, strict=True):
            if any(_looked_at(user) for user in value.users):
                self.kept[value] = array
        if _attends(node):
            self.weights[node] = attention_weights(node, self._operands(node))
        elif node.op is ops.moe:
            combine = self._value(node.operand("combine"))
            assert combine is not None
            self.choices[node] = combine.reshape(-1, combine.shape[-1])
        self.done += 1
        self.step(self.done, len(self.graph))

    def _operands(self, node: Node) -> dict[str, Array | None]:
        """The operands of a node by name."""
        names = [o.name for o in node.op.operands]
        return {name: self._value(v) for name, v in zip(names, node.inputs, strict=False)}

    def _value(self, value: Value | None) -> Array | None:
        if isinstance(value, Param):
            return widen(np.asarray(value.recipe.evaluate(self.graph.reader)))
        return None if value is None else self.kept[value]


def _looked_at(node: Node) -> bool:
    return node.op is ops.moe or _attends(node)


def _attends(node: Node) -> bool:
    """Return whether the node is a softmax attention of texts: that of parts of them has no weights of all pairs."""
    if Trait.ATTENTION not in node.op.traits:
        return False
    return node.required("q").shape[0] in {value.shape[0] for value in node.graph.inputs.values()}


def attention_weights(node: Node, operands: Mapping[str, Array | None]) -> Array:
    """Return attention weights [heads, queries, keys]: the attention's result on values that are unit vectors. Sinks
    take the remainder to 1."""
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


def data(graph: Graph, ids: Sequence[int], text: Callable[[Sequence[int]], str], step: Step) -> dict[str, Any]:
    """Everything about the tokens `ids`; `text` is what tokens are as text.

    Raises:
        WeftError: if the graph reads more than one text, or the tokens are more than a page or the model takes.
    """
    check(graph, len(ids))
    row = np.array([ids])
    feeds = {"input_ids": row, "position_ids": np.arange(len(ids))[None], "attention_mask": np.ones_like(row)}
    feeds["token_type_ids"] = np.zeros_like(row)
    inputs = {name: feeds[name] for name in graph.inputs}
    seen = Seen(graph, step)
    seen.kept = {value: inputs[name] for name, value in graph.inputs.items()}
    outputs = interpret(graph, inputs, watch=seen.watch)
    logits = outputs.get("logits")
    return {
        "tokens": [_added(text, ids, i) for i in range(len(ids))],
        "layers": [_packed(node, weights) for node, weights in seen.weights.items()],
        "next": [] if logits is None or not _predicts(graph) else _expected(logits[0], ids, text),
        "experts": [_load(node, chosen) for node, chosen in seen.choices.items()],
    }


def check(graph: Graph, count: int) -> None:
    """Raise WeftError if a text of so many tokens cannot be shown."""
    if strange := [name for name in graph.inputs if name not in TEXT_INPUTS]:
        raise WeftError(f"a prompt is for models of one text; {graph.name} reads {strange[0]} too")
    if count == 0:
        raise WeftError("the prompt is empty: it has no tokens")
    context = graph.meta.get("context")
    if context and count > context:
        raise WeftError(f"the prompt has {count} tokens; {graph.name} is made for {context}")
    heads = sum(node.attrs["heads"] for node in graph.nodes if _attends(node))
    each = MOST / max(1, heads)
    # n(n + 1) / 2 weights a head where tokens see earlier ones only, else n²: solved for n.
    most = int(((8 * each + 1) ** 0.5 - 1) / 2) if _predicts(graph) else int(each**0.5)
    if count > most:
        raise WeftError(f"the prompt has {count} tokens; a page shows the {heads} heads of at most {most}: shorten it")


def _predicts(graph: Graph) -> bool:
    return bool(graph.meta.get("kind") == "decoder")


def _packed(node: Node, weights: Array) -> dict[str, Any]:
    """Weights as bytes, head by head and row by row; of a causal attention row i is i + 1 long."""
    steps = np.round(weights * 255).astype(np.uint8)
    rows = [row[: i + 1] if node.attrs.get("causal", False) else row for head in steps for i, row in enumerate(head)]
    return {
        "where": layers([node.scope or node.output.name]) or node.output.name,
        "at": node.output.name,
        "heads": len(weights),
        "causal": node.attrs.get("causal", False),
        "weights": base64.b64encode(np.concatenate(rows).tobytes()).decode(),
    }


def _expected(logits: Array, ids: Sequence[int], text: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """For every position the likeliest next tokens with their probabilities, and how likely the one that came was."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    chances = shifted / shifted.sum(-1, keepdims=True)
    predictions = []
    for i, row in enumerate(chances):
        best = np.argsort(-row, kind="stable")[:LIKELY]
        likely = [[_added(text, [*ids[: i + 1], int(t)], i + 1), float(f"{row[t]:.4g}")] for t in best]
        came = ids[i + 1] if i + 1 < len(ids) else None
        known = {} if came is None else {"came": float(f"{row[came]:.4g}"), "rank": int((row > row[came]).sum()) + 1}
        predictions.append({"likely": likely, **known})
    return predictions


def _load(node: Node, chosen: Array) -> dict[str, Any]:
    """Count the tokens routed to each expert of a layer."""
    return {"where": layers([node.scope]), "at": node.output.name, "counts": (chosen != 0).sum(0).tolist()}


def _added(text: Callable[[Sequence[int]], str], ids: Sequence[int], at: int) -> str:
    """Return the text that a token adds, or its id if it adds none, as a beginning-of-text token does."""
    before, after = text(ids[:at]), text(ids[: at + 1])
    return after[len(before) :] if after.startswith(before) and after != before else f"[{ids[at]}]"
