"""rope-layout: halves and neighbours, through norms, packed linears and latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, WeftError, ops, parse
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import rebuild_node

from ...models import BATCH, SEQ, Tiny, applied, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

HALF, NEIGHBOURS = "rope-layout{layout=half}", "rope-layout{layout=interleaved}"


def layouts(graph: Graph) -> set[bool]:
    return {n.attrs["interleaved"] for n in graph.nodes if n.op is ops.rope}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    ("name", "interleaved"),
    [
        *((f"family/{name}", False) for name in ("llama-mha-biases", "qwen3-gqa", "olmo2-gqa", "gpt-oss", "stablelm")),
        *((f"family/{name}", True) for name in ("gptj", "cohere-norms", "deepseek-v2-groups", "deepseek-v3")),
        ("family/gpt_neox", False),
        ("variant/norms of q and k, each", False),
        ("variant/clipped", False),
        ("variant/latent", True),
        ("variant/latent queries", False),
        ("variant/rope, partial and interleaved", True),
        ("variant/repeated", False),
        ("packed/family phi3", False),
        ("packed/variant latent queries", False),
        ("packed/variant repeated", False),
        ("packed/quantized gguf", False),
    ],
)
def test_layouts_convert_back(name: str, interleaved: bool) -> None:
    before = ZOO[name]()
    there, back = (HALF, NEIGHBOURS) if interleaved else (NEIGHBOURS, HALF)
    assert layouts(before) == {interleaved} and str(applied(back, before)) == str(before)
    after = applied(there, before)
    assert layouts(after) == {not interleaved} and worst(before, after) <= EXACT
    assert len(after.params) == len(before.params)
    assert str(applied(there, after)) == str(after)
    again = applied(back, after)
    assert layouts(again) == {interleaved} and worst(before, again) <= EXACT


def test_rows_are_those_that_gguf_stores() -> None:
    """llama.cpp keeps a Llama's queries and keys as neighbours: its converter's permutation."""
    before = ZOO["family/llama-gqa-tied"]()
    after = applied(NEIGHBOURS, before)
    for part, heads in (("q", "heads"), ("k", "kv_heads")):
        name = f"layers.1.attn.{part}.weight"
        count = next(n.attrs[heads] for n in before.nodes if n.op is ops.attention)
        w = before.params[name].recipe.evaluate(before.reader)
        wanted = w.reshape(count, 2, len(w) // count // 2, -1).swapaxes(1, 2).reshape(w.shape)
        np.testing.assert_array_equal(after.params[name].recipe.evaluate(after.reader), wanted)


def test_rope_layout_combines_with_other_passes() -> None:
    before = Tiny(layers=1, qk_norm=True).graph()
    for pipeline in (
        f"pack-qkv, {NEIGHBOURS}, kv-cache",
        f"{NEIGHBOURS}, permute-heads{{order=[2, 1, 0, 5, 4, 3]}}, gqa-to-mha, {HALF}",
        f"permute-heads{{order=[2, 1, 0, 5, 4, 3]}}, pack-qkv, {NEIGHBOURS}",
        f"{NEIGHBOURS}, pad-head-dim, {HALF}, default",
        f"pack-qkv, fold-norm-scale, fuse-norm-linear, {NEIGHBOURS}, kv-cache",
    ):
        run_passes(before, pipeline, verify=True)
    plain = run_passes(ZOO["variant/norms of q and k, no weights"](), f"norm-across-rope, {NEIGHBOURS}", verify=True)
    assert layouts(plain) == {True}


def turned(kind: str = "", interleaved: bool = False) -> Graph:
    """An attention of 2 heads of 6 numbers, 4 of them turned; `kind` spoils one thing."""
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 7)))
    at = ops.expand(ops.unsqueeze(ops.iota(x, axis=1), axes=(0,)), shape=(BATCH, SEQ))
    table = weight(g, "frequencies", 2, recipe=RopeFrequencies(4))
    q, k, v = (ops.linear(x, weight(g, f"{n}.weight", 12, 7), weight(g, f"{n}.bias", 12), name=n) for n in "qkv")
    attrs: dict[str, Any] = {"heads": 2, "kv_heads": 2, "causal": True}

    def normed(y: Value, width: int) -> Value:
        parts = ops.reshape(y, shape=(BATCH, SEQ, 12 // width, width))
        return ops.reshape(ops.rms_norm(parts, weight(g, "gain", width), eps=0.1, name="norm"), shape=y.shape)

    if kind in ("halves", "thirds"):
        k = normed(k, 3 if kind == "halves" else 2)
    if kind == "computed":
        k = ops.mul(k, ops.sigmoid(v), name="gated")
    if kind == "input":
        k = g.add_input("k", TensorType(dtypes.f32, (BATCH, SEQ, 12)))
    q = ops.rope(q, at, table, heads=2, interleaved=interleaved, name="q_rope")
    if kind != "one side":
        other = not interleaved if kind == "layouts" else interleaved
        k = ops.rope(k, at, table, heads=2, interleaved=other, name="k_rope")
    if kind == "behind":
        k = normed(k, 6)
    if kind == "shifted":  # what was turned faces what was not
        k = ops.reshape(ops.reshape(k, shape=(BATCH, SEQ, 2, 6)), shape=(BATCH, SEQ, 12))
        parts = ops.split.emit(ops.reshape(k, shape=(BATCH, SEQ, 2, 6)), sizes=(1, 5))
        k = ops.reshape(ops.concat(parts[1], parts[0], axis=3), shape=(BATCH, SEQ, 12))
    if kind == "read":
        g.add_output("keys", k)
    latent = kind == "values"
    y = ops.attention(q, k, None if latent else v, **attrs, **({"value_dim": 2} if latent else {}))
    g.add_output("y", y)
    return g


REASONS = {
    "one side": "it does not have exactly one rotation of queries and one of keys",
    "layouts": "its queries and keys are rotated in different layouts",
    "values": "its rotated keys are also its values",
    "halves": "rms_norm (%norm) applies one vector to heads with different orders of features",
    "thirds": "rms_norm (%norm) applies to parts of a head separately",
    "computed": "mul (%gated) has an operand that is not a vector over the features",
    "input": "no linear computes %k",
    "behind": "%reshape is read by rms_norm, not by an attention",
    "read": "%k_rope is not read by one attention alone",
    "shifted": "is read by split, not by an attention",
}


@pytest.mark.parametrize("kind", REASONS)
def test_refusals(kind: str) -> None:
    graph, trace = turned(kind), Trace()
    assert str(applied(NEIGHBOURS, graph, trace)) == str(graph) and not trace.rewrites
    assert any(REASONS[kind] in refused.reason for refused in trace.refusals), trace.refusals


def forced(kind: str, names: str = "qk") -> Graph:
    """The graph with its layout changed by hand, whether that is right or not: rows of `names` and rotations."""
    graph = turned(kind)
    order = tuple(h * 6 + i for h in range(2) for i in (0, 2, 1, 3, 4, 5))
    for name in names:
        for part in ("weight", "bias"):
            if kind == "input" and name == "k":
                continue
            param = graph.params[f"{name}.{part}"]
            param.recipe = type(applied(NEIGHBOURS, turned()).params["q.weight"].recipe)(param.recipe, order)
    for node in list(graph.nodes):
        if node.op is ops.rope:
            rebuild_node(node, interleaved=True)
    return graph


def test_rewrite_by_hand_is_exact_where_the_pass_fires() -> None:
    assert worst(turned(), forced("")) <= EXACT
    assert worst(turned(), forced("", "q")) > 0.01  # both sides
    assert worst(turned(), forced("", "")) > 0.01  # and not the rotations alone


@pytest.mark.parametrize("kind", sorted(set(REASONS) - {"read"}))
def test_each_refusal_is_needed(kind: str) -> None:
    assert worst(turned(kind), forced(kind, "q" if kind == "one side" else "qk")) > 1e-3


def test_norms_between_need_their_weights_in_order() -> None:
    before = ZOO["variant/norms of q and k"]()
    after = applied(NEIGHBOURS, before)
    for name in ("q_norm", "k_norm"):
        after.params[f"layers.0.attn.{name}.weight"].recipe = before.params[f"layers.0.attn.{name}.weight"].recipe
    assert worst(before, after) > 1e-4


def test_fixed_sizes_are_supported() -> None:
    graph = parse(str(turned()).replace("batch", "2").replace("seq", "5"))
    after = applied(NEIGHBOURS, graph)
    assert layouts(after) == {True} and worst(graph, after) <= EXACT


def test_unknown_layouts() -> None:
    with pytest.raises(WeftError, match="must be one of half, interleaved"):
        applied("rope-layout{layout=quarters}", turned())


def test_graphs_with_caches_are_unchanged() -> None:
    trace, graph = Trace(), ZOO["cached/family mistral-gqa"]()
    assert str(applied(NEIGHBOURS, graph, trace)) == str(graph)
    assert {r.reason for r in trace.refusals} == {"its cache holds rotated keys; run rope-layout before kv-cache"}
