"""kv-cache on recurrences, relative attention and what compares the tokens of a call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, WeftError, ops
from weft.ir.op import OPS, Array, OpCall, StateKind, StateSpec, build_fixed_size_spec, case, normal, op
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes
from weft.passes import Trace, default_pipeline, run_passes
from weft.passes.analysis.costs import count_state_bytes, find_cache_sizes
from weft.passes.analysis.states import find_state_inputs, make_manifest_records
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.library.cache.kv_cache import KvCache
from weft.passes.library.cache.last_token_logits import LastTokenLogits

from ..models import BATCH, SEQ, applied, weight

WIDTH = 12


Mixer = Callable[[Graph, Value, Value], Value]


def model(*mixers: Mixer) -> Graph:
    """A decoder whose layers are `mixers`, functions of the graph, x and the positions, each followed by a gate."""
    g = Graph("recurrent")
    g.meta["kind"] = "decoder"
    ids, at = (g.add_input(n, TensorType(dtypes.i64, (BATCH, SEQ))) for n in ("input_ids", "position_ids"))
    x = ops.embedding(ids, weight(g, "embed", 31, WIDTH))
    for i, mixer in enumerate(mixers):
        with g.scope(f"layers.{i}"):
            y = mixer(g, ops.rms_norm(x, weight(g, "norm", WIDTH)), at)
            x = ops.add(x, ops.mul(y, ops.swish(ops.linear(x, weight(g, "gate", WIDTH, WIDTH)))), name="sum")
    g.add_output("logits", ops.linear(x, weight(g, "head", 31, WIDTH)))
    return g


def conv(g: Graph, x: Value, at: Value) -> Value:
    return ops.causal_conv(x, weight(g, "taps", WIDTH, 4), activation="silu")


def steps(g: Graph, x: Value, width: int) -> Value:
    return ops.softplus(ops.linear(x, weight(g, "step", width, WIDTH)))


def mamba(g: Graph, x: Value, at: Value) -> Value:
    a = ops.neg(ops.exp(weight(g, "a_log", WIDTH, 3)))
    b, c = (ops.linear(x, weight(g, name, 3, WIDTH)) for name in "bc")
    return ops.selective_scan(conv(g, x, at), steps(g, x, WIDTH), a, b, c, weight(g, "d", WIDTH))


def mamba2(g: Graph, x: Value, at: Value) -> Value:
    a = ops.neg(ops.exp(weight(g, "a_log", 4)))
    b, c = (ops.linear(x, weight(g, name, 10, WIDTH)) for name in "bc")
    return ops.ssd(x, steps(g, x, 4), a, b, c, weight(g, "d", 4), heads=4, groups=2)


def linear(g: Graph, x: Value, at: Value) -> Value:
    return ops.linear_attention(x, ops.affine(x, by=0.7), x, heads=3, causal=True)


def turned(g: Graph, x: Value, at: Value) -> Value:
    frequencies = weight(g, "frequencies", 2, recipe=RopeFrequencies(4))
    return ops.linear_attention(x, ops.affine(x, by=0.7), x, None, at, frequencies, heads=3, causal=True)


def gated(g: Graph, x: Value, at: Value) -> Value:
    return ops.gated_linear_attention(x, x, x, ops.neg(steps(g, x, WIDTH)), heads=3, groups=3)


def local(g: Graph, x: Value, at: Value) -> Value:
    return ops.attention(x, x, x, heads=3, kv_heads=3, causal=True, window=3)


def shaw(g: Graph, x: Value, at: Value) -> Value:
    tables = weight(g, "keys", 5, 4), weight(g, "values", 5, 4)
    return ops.relative_attention(x, ops.affine(x, by=0.7), x, *tables, heads=3, causal=True)


def experts(router: Callable[[Value], Value]) -> Mixer:
    def mixer(g: Graph, x: Value, at: Value) -> Value:
        combine = router(ops.linear(x, weight(g, "router", WIDTH, WIDTH)))
        return ops.mul(x, combine)

    return mixer


STACKS: list[tuple[Mixer, ...]] = [
    (conv,),
    (mamba, mamba),
    (mamba2,),
    (linear, turned),
    (gated,),
    (shaw, local),
    (mamba, local, linear, mamba2),
]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: "-".join(m.__name__ for m in stack))
def test_every_chunking_equals_the_full_sequence(stack: tuple[Mixer, ...]) -> None:
    before = model(*stack)
    after = applied("kv-cache", before)
    KvCache().check(before, after, EquivalenceCheck(seed=1))
    pruned = applied("last-token-logits", after)
    LastTokenLogits().check(after, pruned, EquivalenceCheck())
    last = f"layers.{len(stack) - 1}.sum"
    assert next(n.output.shape[1] for n in pruned.nodes if n.output.name == last) == 1
    run_passes(before, verify=True)  # seed 0


def test_state_inputs_and_outputs() -> None:
    after = applied("kv-cache", model(mamba, local, linear, mamba2))
    assert {name: str(v.type) for name, v in after.inputs.items()} == {
        "input_ids": "i64[batch, seq]",
        "position_ids": "i64[batch, seq]",
        "attention_mask": "i64[batch, total]",
        "past_key_values.0.key": "f32[batch, 3, capacity, 4]",
        "past_key_values.0.value": "f32[batch, 3, capacity, 4]",
        "past_states.0.conv": "f32[batch, 3, 12]",
        "past_states.1.ssm": "f32[batch, 3, 12]",
        "past_states.2.state": "f32[batch, 3, 4, 4]",
        "past_states.2.norm": "f32[batch, 3, 4]",
        "past_states.3.ssm": "f32[batch, 4, 5, 3]",
    }
    presents = [
        name.replace("past_key_values", "present").replace("past_states", "present_states")
        for name in after.inputs
        if name.startswith("past_")
    ]
    assert list(after.outputs) == ["logits", *presents]


def test_custom_op_gets_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPS, "_items", {name: OPS[name] for name in OPS})  # it goes again with the test

    @op(outputs="leaky present", cases=[case(normal(2, 5, 3)), case(normal(2, 5, 3), normal(2, 3))])
    def leaky(x: Array, past: Array | None = None, *, leak: float = 0.9) -> Array | tuple[Array, Array]:
        """y_t = leak · y_{t−1} + x_t."""
        sums, y = np.zeros_like(x[:, 0]) if past is None else past, np.zeros_like(x)
        for t in range(x.shape[1]):
            y[:, t] = sums = leak * sums + x[:, t]
        return y if past is None else (y, sums)

    @leaky.infer
    def _(n: OpCall) -> tuple[TensorType, ...]:
        return (n.x,) if n.past is None else (n.x, n.past)

    @leaky.states
    def _(n: OpCall) -> tuple[StateSpec, ...]:
        return (build_fixed_size_spec(StateKind.SSM, n.x, n.x.shape[2]),)

    before = model(lambda g, x, at: leaky(x), local)
    after = applied("kv-cache", before)
    KvCache().check(before, after, EquivalenceCheck())
    assert str(after.inputs["past_states.0.ssm"].type) == "f32[batch, 12]"
    assert count_state_bytes(before.nodes, 2) == 4 * WIDTH
    assert find_cache_sizes(before.nodes) == [(2 * WIDTH, 3)]
    assert make_manifest_records(after, find_state_inputs(after))["carried"] == [
        {
            "input": "past_key_values.0.key",
            "output": "present.0.key",
            "kind": "kv",
            "growth": "text",
            "shape": [3, None, 4],
        },
        {
            "input": "past_key_values.0.value",
            "output": "present.0.value",
            "kind": "kv",
            "growth": "text",
            "shape": [3, None, 4],
        },
        {
            "input": "past_states.0.ssm",
            "output": "present_states.0.ssm",
            "kind": "ssm",
            "growth": "constant",
            "shape": [12],
        },
    ]


def test_mask_is_read_only_for_last_token_logits_without_attention() -> None:
    after = applied("kv-cache", model(mamba))
    assert not after.inputs["attention_mask"].uses
    assert applied("last-token-logits", after).inputs["attention_mask"].uses
    assert "kv-cache" not in str(default_pipeline(after))


@pytest.mark.parametrize("text", ["kv-cache, cast{dtype=bf16}", "cast{dtype=bf16}, kv-cache"])
def test_sums_over_all_tokens_stay_in_f32(text: str) -> None:
    after = applied(text, model(mamba, linear, mamba2))
    kinds = {name: str(v.type.dtype) for name, v in after.inputs.items() if name.startswith("past_")}
    assert {name.rsplit(".", 1)[-1]: kind for name, kind in kinds.items()} == {
        "conv": "bf16",
        "ssm": "f32",
        "state": "f32",
        "norm": "f32",
    }
    assert kinds == {n.replace("present", "past"): str(v.type.dtype) for n, v in after.outputs.items() if "." in n}
    run_passes(model(mamba, linear, mamba2), text, verify=True)


def test_a_wrong_state_is_caught() -> None:
    before = model(mamba)
    after = applied("kv-cache", before)
    after.outputs["present_states.1.ssm"] = after.inputs["past_states.1.ssm"]
    with pytest.raises(WeftError, match=r"in calls of .* tokens: output logits differs by"):
        KvCache().check(before, after, EquivalenceCheck())


@pytest.mark.parametrize("op", ["expert_choice", "limit_capacity"])
def test_routers_with_capacity_compare_the_tokens_of_a_call(op: str) -> None:
    routers: dict[str, Callable[[Value], Value]] = {
        "expert_choice": lambda logits: ops.expert_choice(logits, capacity=2),
        "limit_capacity": lambda logits: ops.limit_capacity(ops.route(logits, k=2), capacity=1),
    }
    before, trace = model(mamba, experts(routers[op])), Trace()
    after = applied("kv-cache", before, trace)
    assert any(f"{op} (%layers.1.{op}) compares new tokens only, not" in line for line in trace.lines)
    KvCache().check(before, after, EquivalenceCheck())


def test_a_loss_over_the_tokens_is_that_of_the_call() -> None:
    before = model(local)
    logits = before.outputs["logits"]
    before.add_output("loss", ops.load_balance_loss(logits, ops.route(logits, k=2)))
    KvCache().check(before, applied("kv-cache", before), EquivalenceCheck())


def test_frequencies_by_length_follow_the_positions_of_the_call() -> None:
    def rotated(g: Graph, x: Value, at: Value) -> Value:
        base = weight(g, "frequencies", 2, recipe=RopeFrequencies(4))
        length = ops.cast(ops.max(at, axes=(0, 1)), to=dtypes.f32)
        frequencies = ops.div(base, ops.affine(ops.reshape(length, shape=(1,)), by=0.5, plus=1.0))
        q = ops.rope(x, at, frequencies, heads=3)
        return ops.attention(q, q, x, heads=3, kv_heads=3, causal=True)

    before, trace = model(rotated), Trace()
    after = applied("kv-cache", before, trace)
    assert any("max (%layers.0.max) compares new tokens only, not" in line for line in trace.lines)
    KvCache().check(before, after, EquivalenceCheck())


def test_non_causal_and_masked_recurrences_are_refused() -> None:
    def both_ways(g: Graph, x: Value, at: Value) -> Value:
        return ops.linear_attention(x, x, x, heads=3)

    def masked(g: Graph, x: Value, at: Value) -> Value:
        mask = g.add_input("valid", TensorType(dtypes.i64, (BATCH, SEQ)))
        return ops.linear_attention(x, x, x, mask, heads=3, causal=True)

    with pytest.raises(
        WeftError, match=r"kv-cache: linear_attention \(%\S+\) cannot have a cache, as it is not causal"
    ):
        applied("kv-cache", model(mamba, both_ways))
    with pytest.raises(WeftError, match="has a key mask and a state of constant size"):
        applied("kv-cache", model(masked))
    with pytest.raises(WeftError, match="has a cache already"):
        applied("kv-cache, kv-cache", model(mamba))


def test_traces_count_caches_and_states() -> None:
    trace = Trace()
    applied("kv-cache", model(mamba, local, linear), trace)
    assert trace.rewrites == {"kv-cache": 4}
