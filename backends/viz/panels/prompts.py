"""A run of a model on a prompt: attention weights of every head, predicted next tokens, and expert choices.

The interpreter runs the references of the ops in float64; attention weights are stored as multiples of 1/255.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.ir import Graph, Node, ops
from weft.ir.errors import WeftError
from weft.ir.interpreter import interpret
from weft.ir.op import Trait
from weft.ir.recipes.readers import Array
from weft.passes.analysis.observed import name_values
from weft.passes.edits.legalization import is_fused
from weft.passes.library.fuse.unfuse import Unfuse
from weft.passes.library.observe.expose import Expose

from .kinds import abbreviate_layers

MOST = 1_500_000  # attention weights in a page, a byte each
LIKELY = 5  # number of likeliest next tokens in the data
TEXT_INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids")
Step = Callable[[int, int], None]  # progress: operations done and total


def _is_full_attention(node: Node) -> bool:
    """Return whether `node` is a softmax attention over full sequences: its batch size is that of an input."""
    if Trait.ATTENTION not in node.op.traits:
        return False
    return node.required_operand("q").shape[0] in {value.shape[0] for value in node.graph.inputs.values()}


def run_prompt(graph: Graph, ids: Sequence[int], text: Callable[[Sequence[int]], str], step: Step) -> dict[str, Any]:
    """Run `graph` on the tokens `ids`; return "tokens", "layers" (attention weights), "next" and "experts" for a page.

    "next" is [] unless `graph` is a decoder. `text` decodes ids; `step` gets the numbers of nodes done and in total.

    Raises:
        WeftError: if `check_prompt` refuses the prompt.
    """
    check_prompt(graph, len(ids))
    row = np.array([ids])
    feeds = dict(zip(TEXT_INPUTS, (row, np.arange(len(ids))[None], np.ones_like(row), np.zeros_like(row)), strict=True))
    watched, places = expose_choices(graph)
    count = iter(range(1, len(watched) + 1))
    inputs = {name: feeds[name] for name in graph.inputs}
    outputs = interpret(watched, inputs, watch=lambda node, results: step(next(count), len(watched)))
    logits = outputs.get("logits")
    return {
        "tokens": [_decode_added(text, ids, i) for i in range(len(ids))],
        "layers": [_pack_weights(n, outputs[name][0]) for name, n in places.items() if n.op is not ops.moe],
        "next": [] if logits is None or not _is_decoder(graph) else _predict_tokens(logits[0], ids, text),
        "experts": [
            {
                "where": abbreviate_layers([n.scope]),
                "at": n.output.name,
                "counts": (outputs[name].reshape(-1, outputs[name].shape[-1]) != 0).sum(0).tolist(),
            }
            for name, n in places.items()
            if n.op is ops.moe
        ],
    }


def expose_choices(graph: Graph) -> tuple[Graph, dict[str, Node]]:
    """Return `graph` with the attention weights and routes of its layers as outputs, and the node of each by name."""
    plain = Unfuse().apply_to(graph) if any(map(is_fused, graph.nodes)) else graph
    nodes = {"attention": list(filter(_is_full_attention, plain.nodes))}
    nodes["routes"] = [node for node in plain.nodes if node.op is ops.moe]
    named = {kind: name_values(kind, {node: node.output for node in members}) for kind, members in nodes.items()}
    watched = (
        Expose(", ".join(kind for kind, members in nodes.items() if members)).apply_to(plain)
        if any(nodes.values())
        else plain
    )
    places = {name: v.producer for values in named.values() for name, v in values.items() if name in watched.outputs}
    return watched, {name: node for name, node in places.items() if node is not None}


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
