"""Second moments of the inputs of attentions, against loops over heads, queries and keys."""

from __future__ import annotations

import numpy as np

from weft.ir import interpret
from weft.passes.core.equivalence import measure_difference
from weft.passes.fitting.calibration import Activations, read_tokens
from weft.passes.fitting.head_moments import compute_moments

from .head_graphs import HEADS, D, attention_graph, attentions, drawn


def test_moments_equal_loops_over_heads_queries_and_keys(text: str) -> None:
    """Moments against loops over heads, queries and keys."""
    weights = drawn(3, "qkv")
    graph = attention_graph(weights, 3, 4)
    (node,) = attentions(graph)
    texts = read_tokens(graph, text, 100)
    watched = attention_graph(weights, 3, 4)
    watched.outputs.clear()
    for name, value in zip("qkx", (*attentions(watched)[0].inputs[:2], next(iter(watched.nodes)).output), strict=True):
        watched.add_output(name, value)
    found = compute_moments(node, 1, Activations(graph, texts))
    tokens, differing, averaged = (np.zeros((12, 12)) for _ in range(3))
    spread = np.zeros(HEADS)
    for ids in texts:
        at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        rows = interpret(watched, {"input_ids": ids, "position_ids": at}).values()
        for text_q, text_k, embedded in zip(*rows, strict=True):
            x = np.concatenate([embedded, np.ones((len(embedded), 1))], 1)
            q, k = (a.reshape(len(x), -1, D) for a in (text_q, text_k))
            tokens += x.T @ x
            for h in range(HEADS):
                for i in range(len(x)):
                    score = np.exp([q[i, h] @ k[j, h // 2] / np.sqrt(D) for j in range(i + 1)])
                    p = score / score.sum()
                    mean = p @ x[: i + 1]
                    spread[h] += (p * (1 - p)).sum()
                    averaged += np.outer(mean, mean)
                    differing += sum(p[j] * np.outer(x[j] - mean, x[j] - mean) for j in range(i + 1))
    scaled = [m * 12 / np.trace(m) for m in (tokens, differing, averaged)]
    assert measure_difference(scaled[0], found.q) < 1e-9
    assert measure_difference((scaled[0] + scaled[1]) / 2, found.k[0]) < 1e-9
    assert measure_difference((scaled[0] + scaled[2]) / 2, found.v[0]) < 1e-9
    assert measure_difference(spread / spread.mean() + 1e-3, found.spread) < 1e-9
