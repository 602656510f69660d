"""kv-cache: keys and values of earlier tokens are read from a cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft import Attention, Block, Decoder, LearnedPositions, MoE, Router
from weft.ir import Graph, TensorType, Value, WeftError, interpret, ops, parse
from weft.ir.recipes.frequencies import AlibiSlopes
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.analysis.tokens.scores import find_bias_nodes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.library.cache.kv_cache import BiasExtension, KvCache, run_in_chunks

from ...models import BATCH, SEQ, Tiny, applied, count, weight
from ...rewrites import Rewrite, rewrites
from .cached import DECODERS, chosen, position_biased


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.halved
@pytest.mark.parametrize("tiny", DECODERS, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_every_chunking_equals_the_full_pass(tiny: Tiny, fused: bool) -> None:
    before = tiny.graph()
    if fused:
        before = applied("pack-qkv, pack-gate-up, fuse-residual-norm", before)
    after = applied("kv-cache", before)
    KvCache().check(before, after, EquivalenceCheck())
    KvCache().check(before, after, EquivalenceCheck(seed=1))


def test_cache_inputs_and_outputs() -> None:
    after = applied("kv-cache", Tiny(rope=False).graph())
    assert {name: str(v.type) for name, v in after.inputs.items()} == {
        "input_ids": "i64[batch, seq]",
        "attention_mask": "i64[batch, total]",
        "position_ids": "i64[batch, seq]",
        **{f"past_key_values.{i}.{p}": "f32[batch, 2, capacity, 4]" for i in (0, 1) for p in ("key", "value")},
    }
    assert list(after.outputs) == ["logits", *(f"present.{i}.{p}" for i in (0, 1) for p in ("key", "value"))]
    for node in (n for n in after.nodes if n.op is ops.attention):
        assert node.operand("key_mask") is after.inputs["attention_mask"]
        assert node.operand("positions") is after.inputs["position_ids"]
        assert node.output.name == f"{node.scope}.attention"


def test_right_padded_rows_of_different_lengths_continue_alone() -> None:
    """A batch of unequal prompts, prefilled together and decoded for two steps, equals every row alone."""
    before = Tiny(window=4).graph()
    after = applied("kv-cache", before)
    equivalence, lengths, steps, batch = EquivalenceCheck(), np.array([5, 2, 4]), 2, 3
    ids = np.random.default_rng(0).integers(0, 37, (batch, 5 + steps))
    full = equivalence.run(before, {"input_ids": ids, "position_ids": np.tile(np.arange(7), (batch, 1))})["logits"]
    caches = {n: v for n, v in equivalence.make_inputs(after, batch=batch, capacity=9).items() if n.startswith("past")}
    start, rows, width = np.zeros(batch, int), np.arange(batch), 5
    for step in range(1 + steps):
        at = start[:, None] + np.arange(width)
        valid = lengths if step == 0 else start + 1
        mask = (np.arange(max(valid.max(), at.max() + 1)) < valid[:, None]).astype(int)
        call = {"input_ids": ids[rows[:, None], at], "position_ids": at, "attention_mask": mask}
        outs = equivalence.run(after, {**call, **caches})
        for b in range(batch):
            n = lengths[b] if step == 0 else 1
            assert measure_difference(full[b, start[b] : start[b] + n], outs["logits"][b, :n]) <= EXACT
        caches = {name.replace("present.", "past_key_values."): v for name, v in outs.items() if name != "logits"}
        start, width = valid, 1


def test_a_wrong_cache_is_caught() -> None:
    before = Tiny(window=3).graph()
    after = applied("kv-cache", before)
    node = next(n for n in after.nodes if n.op is ops.attention)
    node.attrs["window"] = 4
    with pytest.raises(WeftError, match=r"in calls of .* tokens: output logits differs by"):
        KvCache().check(before, after, EquivalenceCheck())
    node.attrs["window"] = 3
    rope = next(n for n in after.nodes if n.op is ops.rope)
    with after.inserting(before=rope):
        places = ops.cumsum(ops.sub(after.inputs["position_ids"], after.inputs["position_ids"]), axis=1)
    rope.set_input(1, places)
    with pytest.raises(WeftError, match="differs"):
        KvCache().check(before, after, EquivalenceCheck())


def alibi(g: Graph, ids: Value, at: Value) -> Value:
    return ops.alibi(weight(g, "slopes", 3, recipe=AlibiSlopes(3)), at, at)


def alibi_counted(g: Graph, ids: Value, at: Value) -> Value:
    keys = ops.unsqueeze(ops.iota(ids, axis=1), axes=(0,))
    return ops.alibi(weight(g, "slopes", 3, recipe=AlibiSlopes(3)), at, keys)


def buckets(g: Graph, ids: Value, at: Value) -> Value:
    return ops.relative_position_bias(weight(g, "table", 8, 3), at, at, bidirectional=False, max_distance=12)


@pytest.mark.parametrize("build", [alibi, alibi_counted, buckets])
def test_position_biases_extend_to_cached_keys(build: Callable[[Graph, Value, Value], Value]) -> None:
    before = position_biased(build)
    after = applied("kv-cache", before)
    assert count(after, "alibi") + count(after, "relative_position_bias") == 1
    KvCache().check(before, after, EquivalenceCheck())
    run_passes(before, verify=True)


def test_sparse_key_index_has_its_own_cache() -> None:
    before = position_biased(chosen)
    after = applied("kv-cache", before)
    KvCache().check(before, after, EquivalenceCheck())
    caches = {name: str(v.type) for name, v in after.inputs.items() if name.startswith("past")}
    assert caches == {
        "past_index.0.key": "f32[batch, 1, capacity, 4]",
        **{f"past_key_values.{i}.{part}": "f32[batch, 3, capacity, 4]" for i in (0, 1) for part in ("key", "value")},
    }
    (index,) = (n for n in after.nodes if n.op is ops.lightning_index)
    assert index.operand("key_mask") is after.inputs["attention_mask"]
    assert all(n.operand("bias") is index.output for n in after.nodes if n.op is ops.attention)
    rolled = run_passes(before, "sliding-window{size=2}, kv-cache, rolling-buffer", verify=True)
    assert {n.attrs["rolling"] for n in rolled.nodes if n.op is ops.attention} == {True}


def test_sum_of_key_index_and_bias_is_refused() -> None:
    def build(g: Graph, ids: Value, at: Value) -> Value:
        return ops.add(chosen(g, ids, at), alibi(g, ids, at))

    with pytest.raises(WeftError, match=r"bias %.* does not extend to cached keys"):
        applied("kv-cache", position_biased(build))


def test_cross_attention_gets_no_cache() -> None:
    g = Tiny(layers=1).graph()
    memory = g.add_input("memory", TensorType(dtypes.f32, (BATCH, 7, 18)))
    norm = next(n for n in g.nodes if n.output.name == "final_norm")
    x = norm.inputs[0]
    with g.inserting(before=norm):
        crossed = ops.attention(x, memory, memory, heads=3, kv_heads=3, name="cross")
        norm.set_input(0, ops.add(x, crossed))
    after = applied("kv-cache", g)
    assert "present.1.key" not in after.outputs
    KvCache().check(g, after, EquivalenceCheck())
    run_passes(g, verify=True)


def mixing(build: Callable[[Value], Value]) -> Graph:
    g = Tiny(layers=1).graph()
    norm = next(n for n in g.nodes if n.output.name == "final_norm")
    x = norm.inputs[0]
    assert x is not None
    with g.inserting(before=norm):
        norm.set_input(0, build(x))
    return g


def routed(x: Value, scores: Value) -> Value:
    """Mixture of depths (Raposo 2024): only the two tokens of a row with the largest `scores` pass a layer."""
    _, chosen = ops.top_k.emit(scores, k=2)
    return ops.scatter_rows(x, ops.tanh(ops.gather_rows(x, chosen)), chosen)


@pytest.mark.parametrize(
    ("build", "op"),
    [
        (lambda x: ops.cumsum(x, axis=1), "cumsum"),
        (lambda x: ops.sub(x, ops.mean(x, axes=(1,), keepdims=True)), "mean"),
        (lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x, axes=(0, 2, 1)))), x), "transpose"),
        (lambda x: routed(x, ops.squeeze(ops.slice(x, axis=2, start=0, stop=1), axes=(2,))), "top_k"),
        (lambda x: routed(x, ops.reshape(ops.mean(x, axes=(2,), keepdims=True), shape=x.shape[:2])), "top_k"),
    ],
)
def test_ops_that_mix_tokens_are_refused(build: Callable[[Value], Value], op: str) -> None:
    with pytest.raises(WeftError, match=rf"kv-cache: {op} \(%\w+\) mixes or counts tokens but"):
        applied("kv-cache", mixing(build))


def test_graphs_that_cannot_have_a_cache_are_refused() -> None:
    encoder = mixing(lambda x: x)
    for node in encoder.nodes:
        if node.op is ops.attention:
            node.attrs["causal"] = False
    with pytest.raises(
        WeftError, match=r"attention \(%\S+\) cannot have a cache, as it is not causal: .*--passes default,-kv-cache"
    ):
        applied("kv-cache", encoder)
    with pytest.raises(WeftError, match="has a cache already"):
        applied("kv-cache, kv-cache", Tiny().graph())

    def fixed(g: Graph, ids: Value, at: Value) -> Value:
        rows = ops.unsqueeze(ops.cast(ops.iota(ids, axis=1), to=dtypes.f32), axes=(1,))
        return ops.reshape(ops.sub(rows, ops.squeeze(rows, axes=(1,))), shape=(1, 1, SEQ, SEQ))

    with pytest.raises(WeftError, match=r"bias %\w+ does not extend to cached keys"):
        applied("kv-cache", position_biased(fixed))


def test_trace_counts_cached_layers() -> None:
    trace = Trace()
    applied("kv-cache", Tiny(layers=3).graph(), trace)
    assert trace.rewrites == {"kv-cache": 3}


def test_checks_stay_within_the_positions_and_take_losses() -> None:
    block = Block(Attention(2, window=10), MoE(2, 8, 1, router=Router(aux_loss=0.1)))
    run_passes(Decoder(11, 8, 1, block, positions=LearnedPositions(12)).graph(), verify=True)


def test_chunks_are_calls_of_the_given_lengths() -> None:
    before = Tiny().graph()
    after = applied("kv-cache", before)
    equivalence = EquivalenceCheck()
    inputs = equivalence.make_inputs(before, seq=6)
    assert run_in_chunks(equivalence, after, inputs, (4, 2))["logits"].shape == (3, 6, 37)


HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %position_ids: i64[batch, seq]
  input %attention_mask: i64[batch, total]
  param %slopes: f32[2] = alibi_slopes(2)
"""
ALIBI = """  %bias: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %position_ids)
  output bias = %bias
}"""
COUNTED = """  %count: i64[seq] = iota(%input_ids, axis=1)
  %keys: i64[1, seq] = unsqueeze(%count, axes=[0])
  %bias: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %keys)
  output bias = %bias
}"""
SQUARE = """  %count: i64[seq] = iota(%input_ids, axis=1)
  %keys: i64[1, seq] = unsqueeze(%count, axes=[0])
  %bias: f32[1, 2, seq, seq] = alibi(%slopes, %keys, %keys)
  output bias = %bias
}"""


def extend(body: str) -> tuple[Graph, Value | None]:
    g = parse(HEAD + body)
    bias = g.outputs["bias"]
    extension = BiasExtension(g, g.inputs["attention_mask"], g.inputs["position_ids"], find_bias_nodes(g, [bias]))
    new = extension.extend(bias)
    assert new is not None
    g.outputs["bias"] = new
    extension.drop_unused()
    return g, new


@pytest.mark.parametrize("body", [ALIBI, COUNTED], ids=["positions", "counted"])
def test_extended_bias_has_a_column_for_each_slot(body: str) -> None:
    g, new = extend(body)
    assert new is not None and str(new.type) == "f32[batch, 2, seq, total]" and new.name == "bias"
    feeds = {"position_ids": np.array([[3, 4]]), "attention_mask": np.ones((1, 6), np.int64)}
    found = interpret(g, {"input_ids": np.zeros((1, 2), np.int64), **feeds})["bias"]
    assert found.shape == (1, 2, 2, 6)
    np.testing.assert_allclose(np.diff(found[0], axis=2), [[[1 / 16] * 5] * 2, [[1 / 256] * 5] * 2])
    assert not any(n.op.name == "iota" and n.inputs[0] is g.inputs["input_ids"] for n in g.nodes)


def test_bias_that_counts_its_queries_is_refused() -> None:
    with pytest.raises(WeftError, match="kv-cache: bias %bias does not extend to cached keys: compute it from an iota"):
        extend(SQUARE)
    extension = BiasExtension(g := parse(HEAD + ALIBI), g.inputs["attention_mask"], g.inputs["position_ids"], [])
    assert extension.extend(None) is None
