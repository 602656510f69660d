"""insert-rope: a formula, its refusals, and errors that its check notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from weft import (
    MLA,
    Attention,
    Block,
    Decoder,
    LearnedPositions,
    LinearAttention,
    RelativeAttention,
)
from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.types import dtypes
from weft.passes import Trace, parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

from ...models import BATCH, SEQ, Tiny, applied, count, weight
from ...positioned import FEED, ROPE, decoder, encoder, rotary
from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.halved
@pytest.mark.parametrize(
    "text",
    [
        "insert-rope",
        "insert-rope{theta=500, rotary_dim=2}",
        "insert-rope{layout=interleaved, layers=odd}",
        "insert-rope{scaling=linear, factor=4}",
        "insert-rope{scaling=ntk, factor=4}",
        "insert-rope{scaling=yarn, factor=4, original=12, beta_fast=3}",
        "insert-rope{scaling=llama3, factor=8, original=40, high_freq=8}",
        "pack-qkv, insert-rope",
        "fuse-residual-norm, insert-rope",
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        Tiny(rope=False).graph,
        Tiny(rope=False, qk_norm=True, tied=True, norm="layer").graph,
        Tiny(rope=False, alibi=True, kv_heads=6).graph,
        lambda: decoder(positions=LearnedPositions(9)),
        encoder,
    ],
)
def test_queries_and_keys_are_rotated(text: str, make: Callable[[], Graph]) -> None:
    before = make()
    after = run_passes(before, text, verify=True)
    turned = [n for n in after.nodes if n.op is ops.rope]
    assert len(turned) == (2 if "odd" in text else 4)
    assert len({n.inputs[2] for n in turned}) == 1
    if text == "insert-rope" and before.name != "encoder":
        run_passes(after, "kv-cache", verify=True)


def test_rotated_attention_equals_complex_arithmetic() -> None:
    """On tokens and learned positions: the rotated attention as sums over complex numbers."""
    g, heads, d = Graph("one"), 2, 6
    ids, at = (g.add_input(n, TensorType(dtypes.i64, (BATCH, SEQ))) for n in ("input_ids", "position_ids"))
    names = ("embed", "table", "q", "k", "v")
    embed, table, *qkv = (weight(g, n, 9 if n in names[:2] else 12, 12) for n in names)
    x = ops.add(ops.embedding(ids, embed), ops.embedding(at, table))
    g.add_output("y", ops.attention(*(ops.linear(x, w) for w in qkv), heads=heads, kv_heads=heads, causal=True))
    after = run_passes(g, "insert-rope{theta=50, rotary_dim=4, layout=interleaved}")
    tokens, places = np.array([[3, 1, 4, 1]]), np.array([[0, 1, 2, 3]])
    found = interpret(after, {"input_ids": tokens, "position_ids": places})["y"][0]

    numbers = {n: p.recipe.evaluate(g.reader).astype(np.float64) for n, p in zip(names, g.params.values(), strict=True)}
    text = numbers["embed"][tokens[0]] + numbers["table"][places[0]]
    rate = [1.0, float(np.float32(50**-0.5))]
    for h in range(heads):
        q, k, v = (text @ numbers[n][6 * h : 6 * h + 6].T for n in "qkv")
        for i in range(4):
            power = []
            for j in range(i + 1):
                score = q[i, 4:] @ k[j, 4:]
                for pair, f in enumerate(rate):
                    a, b = (complex(z[2 * pair], z[2 * pair + 1]) for z in (q[i], k[j]))
                    score += (a * b.conjugate() * np.exp(1j * (i - j) * f)).real
                power.append(np.exp(score / np.sqrt(d)))
            want = sum(p * v[j] for j, p in enumerate(power)) / sum(power)
            np.testing.assert_allclose(found[i, 6 * h : 6 * h + 6], want, rtol=1e-12)


def test_only_distances_matter() -> None:
    after, equivalence = run_passes(Tiny(rope=False).graph(), "insert-rope{theta=30}"), EquivalenceCheck()
    inputs = equivalence.make_inputs(after)
    first = equivalence.run(after, inputs)["logits"]
    late = {**inputs, "position_ids": inputs["position_ids"] + 77}
    far = {**inputs, "position_ids": inputs["position_ids"] * 2}
    assert measure_difference(first, equivalence.run(after, late)["logits"]) < 1e-12
    assert measure_difference(first, equivalence.run(after, far)["logits"]) > 1e-3


def test_positions_are_counted_where_none_are_given() -> None:
    assert list(run_passes(decoder(), "insert-rope").inputs) == ["input_ids", "position_ids"]
    after = run_passes(encoder(), "insert-rope")
    assert list(after.inputs) == ["input_ids", "attention_mask"] and count(after, "iota") == 1
    other = Tiny(rope=False).graph()
    other.add_input("position_ids", TensorType(dtypes.i64, (SEQ,)))
    with pytest.raises(WeftError, match=r"insert-rope: input %position_ids.* must have shape .* a position per token"):
        applied("insert-rope", other)


def test_rotated_layers_are_unchanged() -> None:
    trace = Trace()
    mixed = Decoder(19, 16, [Block(Attention(2, rope=r), FEED) for r in (None, ROPE, None)]).graph()
    after = applied("insert-rope{theta=77}", mixed, trace)
    assert [r.at for r in trace.refusals] == ["layers.1.attn.attention"]
    assert "it already has rotary positions" in trace.refusals[0].reason
    assert [n.inputs[2].recipe.theta for n in after.nodes if n.op is ops.rope] == [77, 77, 1e4, 1e4, 77, 77]


@pytest.mark.parametrize(
    ("graph", "text", "message"),
    [
        (rotary(), "insert-rope", "nothing to rotate; %layers.0.attn.attention: it already has rotary positions"),
        (decoder(), "insert-rope, insert-rope", "there is nothing to rotate; .*extend-context changes them"),
        (decoder(RelativeAttention(2, 3)), "insert-rope", "relative_attention already has positions"),
        (decoder(MLA(2, 8, 6, 4, 6, ROPE)), "strip-positions, insert-rope", "its values are part of its keys"),
        (decoder(LinearAttention(2)), "insert-rope", "has no softmax self-attention"),
        (decoder(), "kv-cache, insert-rope", "graph decoder has caches already; run insert-rope before kv-cache"),
        (decoder(), "insert-rope{layers=2}", "insert-rope: there is no layer 2; the graph has layers 0 to 1"),
        (decoder(), "insert-rope{rotary_dim=10}", "rotary_dim=10 exceeds the 8 features of a head"),
        (decoder(), "insert-rope{rotary_dim=3}", "3 features of a head do not form pairs; choose an even rotary_dim"),
        (decoder(), "insert-rope{rotary_dim=0}", "0 features of a head do not form pairs"),
        (decoder(), "insert-rope{theta=1}", "theta=1.0 must be above 1"),
        (decoder(), "insert-rope{theta=1e40}", "theta=1e\\+40 must be above 1, and at most 1e\\+30"),
        (decoder(), "insert-rope{factor=2}", "factor=2.0 has no effect without scaling="),
        (decoder(), "insert-rope{scaling=linear, factor=0.5}", "factor=0.5 must be from 1 to 1e\\+06"),
        (decoder(), "insert-rope{scaling=yarn, factor=2}", "yarn needs original=, the context length before scaling"),
        (decoder(), "insert-rope{scaling=ntk, factor=2, rotary_dim=2}", "ntk needs at least two pairs"),
        (decoder(), "insert-rope{scaling=llama3, factor=2, original=9, low_freq=4}", "low_freq=4.0 must be below"),
        (decoder(), "insert-rope{scaling=yarn, factor=2, original=9, beta_slow=0}", "beta_slow=0.0 must be positive"),
    ],
)  # fmt: skip
def test_insert_refuses(graph: Graph, text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        run_passes(graph, text)


def test_a_wrong_rotation_is_caught() -> None:
    before = decoder()
    (one,) = parse_pipeline("insert-rope{scaling=yarn, factor=4, original=12}").passes
    for wrong in ("interleaved", "amplitude", "theta", "one side"):
        after = applied(str(one), before)
        rope = next(n for n in after.nodes if n.op is ops.rope)
        if wrong == "theta":
            rope.inputs[2].recipe = replace(rope.inputs[2].recipe, theta=9_000.0)
        elif wrong == "one side":
            rope.output.replace_uses(rope.inputs[0])
        else:
            rope.attrs[wrong] = {"interleaved": True, "amplitude": 1.0}[wrong]
        with pytest.raises(WeftError, match="differ"):
            one.check(before, after, EquivalenceCheck())
