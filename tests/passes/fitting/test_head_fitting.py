"""Heads fitted to a text, one attention after another."""

from __future__ import annotations

import json

import numpy as np

from weft.ir import Graph, Param, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes
from weft.passes import run_passes
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.fitting.calibration import read_tokens

from ..models import BATCH, SEQ, applied
from .head_graphs import HEADS, METHODS, MODELS, WIDTH, D, attention_graph, drawn


def test_calibration_text_and_sequential_fitting_change_the_weights(text: str) -> None:
    graph = EquivalenceCheck().randomize_weights(MODELS["rope"].graph())
    ways = [f", calibration={json.dumps(text)}{more}" for more in ("", ", sequential=false")]
    merged = [applied(f"mha-to-gqa{{kv_heads=2, method=svd{way}}}", graph) for way in ("", *ways)]
    alone, sequential, apart = ([g.params[f"layers.{i}.attn.v.weight"] for i in range(2)] for g in merged)

    def same(left: Param, right: Param) -> bool:
        return bool(np.array_equal(*(p.recipe.evaluate(p.graph.reader) for p in (left, right))))

    assert [same(a, b) for a, b in zip(sequential, apart, strict=True)] == [True, False]
    assert not same(alone[0], apart[0])


def test_repeated_layer_is_fitted_once(text: str) -> None:
    graph = Graph("twice", MemoryReader(drawn(6, "")))
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    shapes = {"table": (37, WIDTH), "o": (WIDTH, HEADS * D)} | dict.fromkeys("qkv", (HEADS * D, WIDTH))
    made = {
        n: graph.add_param(n, TensorType(dtypes.f32, s), Source(n if n == "table" else f"{n}.weight"))
        for n, s in shapes.items()
    }
    x = ops.embedding(ids, made["table"])
    for _ in range(2):
        q, k, v = (ops.linear(x, made[r]) for r in "qkv")
        x = ops.add(x, ops.linear(ops.attention(q, k, v, heads=HEADS, kv_heads=6), made["o"]))
    graph.add_output("x", x)
    for method in (*METHODS, f"svd, calibration={json.dumps(text)}"):
        merged = applied(f"mha-to-gqa{{kv_heads=2, method={method}}}", graph)
        assert sorted(merged.params) == ["k", "o", "q", "table", "v"]
        run_passes(graph, f"mha-to-gqa{{kv_heads=2, method={method}}}", verify=True)


def test_refitted_output_linears_reduce_the_error(text: str) -> None:
    graph = attention_graph(drawn(6, "qkv"), 6, 4)
    way = f"mha-to-gqa{{kv_heads=1, method=svd, calibration={json.dumps(text)}"
    alone, made_up = (applied(f"{way}{more}}}", graph) for more in (", sequential=false", ""))
    assert alone.params["v.weight"].recipe.evaluate(alone.reader).tolist() == (
        made_up.params["v.weight"].recipe.evaluate(made_up.reader).tolist()
    )
    errors = []
    for merged in (alone, made_up):
        total = 0.0
        for ids in read_tokens(graph, text, 100):
            at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            a, b = (interpret(g, {"input_ids": ids, "position_ids": at})["y"] for g in (graph, merged))
            total += float(((a - b) ** 2).sum())
        errors.append(total)
    assert errors[1] < 0.95 * errors[0]
