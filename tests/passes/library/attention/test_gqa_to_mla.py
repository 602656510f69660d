"""gqa-to-mla: grouped attention with its keys and values made from one latent."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, TensorType, ops
from weft.ir.recipes import Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT

from ...models import BATCH, SEQ, Tiny, applied, count, worst
from ...rewrites import Rewrite, rewrites

GROUPED = {
    "groups": Tiny(rope=False),
    "biases": Tiny(rope=False, bias="q k v", norm="layer"),
    "one KV head": Tiny(rope=False, kv_heads=1, bias="v"),
    "window, ALiBi": Tiny(rope=False, alibi=True, window=3),
}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("packing", ["dce", "pack-qkv, fuse-residual-norm"])
@pytest.mark.parametrize("model", GROUPED.values(), ids=GROUPED)
def test_the_same_function_from_a_latent_of_all_keys_and_values(model: Tiny, packing: str) -> None:
    graph = applied(packing, model.graph())
    latent = run_passes(graph, "gqa-to-mla", verify=True)
    assert worst(graph, latent) <= EXACT
    rank = 2 * model.kv_heads * model.head_dim
    assert latent.params["layers.1.attn.latent.weight"].shape == (rank, model.dim)
    assert latent.params["layers.1.attn.k_up.weight"].shape == (model.heads * model.head_dim, rank)
    assert [n.attrs["kv_heads"] for n in latent.nodes if n.op is ops.attention] == [model.heads] * 2
    assert applied("gqa-to-mla", latent) == latent
    assert count(latent, "split") == 0


@pytest.mark.parametrize("model", [GROUPED["groups"], GROUPED["biases"]], ids=["plain", "biases"])
def test_merged_heads_are_absorbed_into_a_latent_cache(model: Tiny) -> None:
    graph = applied("mha-to-gqa{kv_heads=1}", model.graph())
    absorbed = run_passes(graph, "gqa-to-mla, mla-absorb", verify=True)
    assert worst(graph, absorbed) <= EXACT
    (one, _) = (n for n in absorbed.nodes if n.op is ops.attention)
    assert (one.attrs["kv_heads"], one.operand("v"), one.operand("k").width) == (1, None, 2 * model.head_dim)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rotary_part_of_one_key_head_is_cached_next_to_the_latent(biased: bool, interleaved: bool) -> None:
    rng, width, heads, d = np.random.default_rng(0), 7, 3, 10
    rows = {"q": heads * d, "k": d, "v": 6, "o": width}
    weights = {r: rng.standard_normal((n, heads * 6 if r == "o" else width)) for r, n in rows.items()}
    weights |= {f"{r}_bias": rng.standard_normal(rows[r]) for r in "qk" if biased}
    graph = Graph("partial", MemoryReader(weights))
    x = graph.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, width)))
    at = graph.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    made = {n: graph.add_param(n, TensorType(dtypes.f32, w.shape), Source(n)) for n, w in weights.items()}
    frequencies = graph.add_param("f", TensorType(dtypes.f32, (2,)), RopeFrequencies(4, theta=30.0))
    q, k, v = (ops.linear(x, made[r], made.get(f"{r}_bias")) for r in "qkv")
    q, k = (
        ops.rope(t, at, frequencies, heads=n, interleaved=interleaved, amplitude=1.2) for t, n in ((q, heads), (k, 1))
    )
    y = ops.attention(q, k, v, heads=heads, kv_heads=1, causal=True, softcap=3.0)
    graph.add_output("o", ops.linear(y, made["o"]))
    latent = run_passes(graph, "gqa-to-mla", verify=True)
    assert worst(graph, latent) <= EXACT
    assert latent.params["latent.weight"].shape == (6 + 6, width)
    assert worst(graph, run_passes(latent, "mla-absorb" if not biased else "dce", verify=True)) <= EXACT


def test_rotations_of_several_key_heads_are_refused() -> None:
    """Rotated groups are refused because copies of the latent share one rotation, as in MLA."""
    trace = Trace()
    graph = Tiny().graph()
    assert applied("gqa-to-mla", graph, trace) == graph
    assert {r.reason for r in trace.refusals} == {
        "its 2 KV heads are rotated separately; mha-to-gqa{kv_heads=1} merges them into one"
    }
    shared = graph.clone()
    for node in [n for n in shared.nodes if n.op is ops.attention]:
        k = node.operand("k")
        with shared.inserting(before=node):
            first = ops.slice_(k, axis=2, start=0, stop=4)
            node.set_input(1, ops.concat(first, first, axis=2))
    assert worst(graph, shared) > 0.01


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Tiny(kv_heads=1), "its keys are rotated entirely, which leaves no features for a latent"),
        (Tiny(kv_heads=6, rope=False), "every query head has its own KV head"),
        (
            Tiny(rope=False, qk_norm=True),
            "q is normalized, scaled or rotated on its way from the linear to the attention",
        ),
    ],
)
@pytest.mark.parametrize("packing", ["dce", "pack-qkv"])
def test_refusals(model: Tiny, reason: str, packing: str) -> None:
    trace, graph = Trace(), applied(packing, model.graph())
    assert applied("gqa-to-mla", graph, trace) == graph
    assert {r.reason for r in trace.refusals} == {reason}


def test_graphs_with_caches_are_unchanged() -> None:
    trace, graph = Trace(), applied("kv-cache", Tiny(rope=False).graph())
    assert applied("gqa-to-mla", graph, trace) == graph
    assert {r.reason for r in trace.refusals} == {"it has a cache of its KV heads; run gqa-to-mla before kv-cache"}
