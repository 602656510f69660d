"""gqa-to-mha, permute-heads and pad-head-dim: heads repeated, in another order, longer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

from weft import Attention, Block, Decoder, GatedMLP, LayerNorm, RMSNorm, RoPE
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Concat, Full, Reshape, Take
from weft.ir.types import dtypes
from weft.passes import Trace, legalize, lookup, run_passes
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import rebuild_node

from ...models import BATCH, SEQ, Tiny, applied, weight, worst
from ...zoo import ZOO

GRAPHS = (
    *("family/olmo2-gqa", "family/qwen3-gqa", "family/gemma3", "family/gpt-oss", "family/starcoder2"),
    *("family/albert", "family/bart", "family/olmo-clipped", "family/mpt", "variant/norms of q and k, each"),
    *("variant/norms of q and k, no weights", "variant/rope, partial and interleaved", "variant/ALiBi, biases"),
    *("variant/T5 bias, shared", "variant/repeated", "variant/encoder-decoder", "packed/family phi3"),
    *("packed/variant repeated", "packed/quantized gguf"),
)
REVERSED = "permute-heads{{order={}}}"


def attentions(graph: Graph) -> list[dict[str, object]]:
    return [n.attrs for n in graph.nodes if n.op is ops.attention]


def backwards(graph: Graph) -> str:
    """The pipeline that turns the order of heads around."""
    heads = {int(str(a["heads"])) for a in attentions(graph)}
    return ", ".join(REVERSED.format(list(range(n))[::-1]) for n in sorted(heads))


PIPELINES: dict[str, Callable[[Graph], str]] = {
    "gqa-to-mha": lambda graph: "gqa-to-mha",
    "permute-heads": backwards,
    "pad-head-dim": lambda graph: "pad-head-dim{multiple=16}",
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", PIPELINES)
def test_the_same_numbers(kind: str, name: str) -> None:
    before = ZOO[name]()
    pipeline = PIPELINES[kind](before)
    after = applied(pipeline, before)
    assert worst(before, after) <= EXACT
    assert str(applied(pipeline, after)) == str(after)
    given = attentions(after)
    if kind == "gqa-to-mha":
        assert all(a["heads"] == a["kv_heads"] for a in given)
    if kind == "permute-heads":
        assert len(after.params) == len(before.params) and str(after) != str(before)
    if kind == "pad-head-dim" and "norms of q and k, each" not in name:
        widths = {n.operand("q").width // n.attrs["heads"] for n in after.nodes if n.op is ops.attention}
        assert {w % 16 for w in widths} == {0}


def test_in_any_order_and_compiled() -> None:
    """All three, then the usual pipeline: ONNX Runtime computes what the model did."""
    mixer = Attention(4, 2, 12, RoPE(), qk_norm=RMSNorm(), qkv_bias=True)
    before = Decoder(29, 24, 2, Block(mixer, GatedMLP(20)), context=32).graph()
    changes = ["permute-heads{order=[2, 3, 1, 0]}", "gqa-to-mha", "pad-head-dim{multiple=16}"]
    for pipeline in (changes, changes[::-1], ["pack-qkv", *changes], [changes[0], "pack-qkv", *changes[1:]]):
        after = run_passes(before, ", ".join(pipeline), verify=True)
        assert worst(before, after) <= EXACT
    after = run_passes(after, "default, -last-token-logits", verify=True)
    place = TARGETS["ort-cpu"]
    legalize(after, lambda node: list_refusals(node, place))
    built = build_model(after, place, max_length=32)
    assert [n.attributes["do_rotary"].value for n in built.model.graph if n.op_type == "GroupQueryAttention"] == [0, 0]
    session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 29, (2, 6))
    at, mask = np.tile(np.arange(6), (2, 1)), np.ones((2, 6), np.int64)
    past = {i.name: np.zeros((2, 4, 9, 16), np.float32) for i in session.get_inputs() if "past" in i.name}
    feeds = {"input_ids": ids, "position_ids": at, "attention_mask": mask, **past}
    wanted = interpret(before, {"input_ids": ids, "position_ids": at})["logits"]
    np.testing.assert_allclose(session.run(["logits"], feeds)[0], wanted, rtol=0, atol=3e-6)


def test_one_key_head_becomes_some_then_all() -> None:
    graph = Tiny(kv_heads=1).graph()
    two = applied("gqa-to-mha{kv_heads=2}", graph)
    assert [a["kv_heads"] for a in attentions(two)] == [2, 2]
    assert two.params["layers.0.attn.k.weight"].shape == (8, 18)
    six = applied("gqa-to-mha", two)
    assert worst(graph, two) == 0 and worst(graph, six) == 0
    assert str(applied("gqa-to-mha", graph)) != str(six) and worst(applied("gqa-to-mha", graph), six) == 0


@pytest.mark.parametrize(
    ("pipeline", "name", "reason"),
    [
        ("gqa-to-mha{kv_heads=3}", "variant/grouped", "3 is not a multiple of its 2 KV heads"),
        ("gqa-to-mha{kv_heads=4}", "variant/grouped", "4 KV heads do not divide its 6 query heads"),
        ("gqa-to-mha", "variant/latent", "its keys are its values too"),
        ("gqa-to-mha", "cached/family mistral-gqa", "run gqa-to-mha before kv-cache"),
        ("permute-heads{order=[1, 0]}", "variant/grouped", "it has 6 heads, the order 2"),
        ("permute-heads{order=[3, 1, 2, 0, 4, 5]}", "variant/grouped", "heads of its groups of 3 would be separated"),
        ("permute-heads{order=[2, 1, 0]}", "variant/latent", "its keys are its values too"),
        ("permute-heads{order=[0, 1, 2, 5, 4, 3]}", "variant/gate", "the result is read by mul, not by one linear"),
        ("pad-head-dim", "variant/gate", "the result is read by mul, not by one linear"),
        ("pad-head-dim", "variant/norms of q and k, each", "takes a mean that zeros would change"),
        ("pad-head-dim{multiple=7}", "cached/family mistral-gqa", "run pad-head-dim before kv-cache"),
    ],
)
def test_refusals(pipeline: str, name: str, reason: str) -> None:
    graph, trace = ZOO[name](), Trace()
    assert str(applied(pipeline, graph, trace)) == str(graph)
    assert trace.refusals and all(reason in refused.reason for refused in trace.refusals)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("gqa-to-mha{kv_heads=0}", "kv_heads=0 must be positive"),
        ("permute-heads{order=[0, 0]}", r"order=\[0, 0\] does not name every head from 0 once"),
        ("pad-head-dim{multiple=0}", "multiple=0 must be from 1 to 1024"),
        ("pad-head-dim{multiple=1000000000}", "multiple=1000000000 must be from 1 to 1024"),
    ],
)
def test_impossible_arguments(pipeline: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(pipeline, Tiny().graph())


# Each refusal, and each part of the rewrites, is needed: without it the numbers are others.


def rows_taken(graph: Graph, name: str, heads: tuple[int, ...], axis: int = 0, width: int = 4) -> None:
    """Put the heads of the parameter `name` in another order, by hand."""
    param = graph.params[name]
    index = tuple(h * width + i for h in heads for i in range(width))
    shape = list(param.shape)
    shape[axis] = len(index)
    param.recipe, param.type = Take(param.recipe, index, axis), param.type.with_shape(*shape)


def test_heads_are_repeated_in_place_not_in_turns() -> None:
    graph = Tiny(layers=1, rope=False).graph()
    for repeated, error in (((0, 0, 0, 1, 1, 1), 0.0), ((0, 1, 0, 1, 0, 1), 0.05)):
        by_hand = graph.clone()
        for part in "kv":
            (linear,) = (n for n in by_hand.nodes if n.output.name == f"layers.0.attn.{part}")
            rows_taken(by_hand, f"layers.0.attn.{part}.weight", repeated)
            rebuild_node(linear)
        (node,) = (n for n in by_hand.nodes if n.op is ops.attention)
        rebuild_node(node, kv_heads=6)
        found = worst(graph, by_hand)
        assert found > error if error else found == 0


@pytest.mark.parametrize(("order", "parts"), [((5, 4, 3, 2, 1, 0), False), ((3, 1, 2, 0, 4, 5), True)])
def test_groups_stay_together(order: tuple[int, ...], parts: bool) -> None:
    graph = Tiny(layers=1).graph()
    by_hand = graph.clone()
    rows_taken(by_hand, "layers.0.attn.q.weight", order)
    rows_taken(by_hand, "layers.0.attn.o.weight", order, axis=1)
    for part in "kv":
        rows_taken(by_hand, f"layers.0.attn.{part}.weight", (order[0] // 3, order[3] // 3))
    assert worst(graph, by_hand) > 0.01 if parts else worst(graph, by_hand) <= EXACT


@pytest.mark.parametrize("forgotten", ["slopes", "sinks", "bias"])
def test_what_belongs_to_a_head_goes_with_it(forgotten: str) -> None:
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 7)))
    at = ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))
    bias = ops.alibi(weight(g, "slopes", 4), at, at) if forgotten == "slopes" else None
    if forgotten == "bias":
        bias = weight(g, "bias", 1, 4, 1, 1)
        bias = ops.mul(bias, ops.cast(ops.iota(x, axis=1), to=dtypes.f32))
    sinks = weight(g, "sinks", 4) if forgotten == "sinks" else None
    q, k, v = (ops.linear(x, weight(g, f"{n}.weight", 8, 7), name=n) for n in "qkv")
    y = ops.attention(q, k, v, bias, None, sinks, heads=4, kv_heads=4, causal=True)
    g.add_output("y", ops.linear(y, weight(g, "o.weight", 3, 8)))
    by_hand, trace = g.clone(), Trace()
    for name in "qkv":
        rows_taken(by_hand, f"{name}.weight", (3, 1, 2, 0), width=2)
    rows_taken(by_hand, "o.weight", (3, 1, 2, 0), axis=1, width=2)
    assert worst(g, by_hand) > 1e-4
    after = applied("permute-heads{order=[3, 1, 2, 0]}", g, trace)
    if forgotten == "bias":
        assert "its bias %mul is computed, head by head" in trace.refusals[0].reason
    else:
        assert trace.rewrites and worst(g, after) <= EXACT


def padded(graph: Graph, *, scale: bool = True, norm: bool = True) -> Graph:
    """The one attention of `graph`, heads of 4, with 3 zeros behind each head of q, k and v; by hand."""
    by_hand = graph.clone()

    def longer(name: str, axis: int) -> None:
        param = by_hand.params[name]
        heads = param.shape[axis] // 4
        lead, rest = (*param.shape[:axis], heads), param.shape[axis + 1 :]
        parts = (Reshape(param.recipe, (*lead, 4, *rest)), Full(0.0, (*lead, 3, *rest)))
        shape = (*param.shape[:axis], heads * 7, *rest)
        param.recipe, param.type = Reshape(Concat(parts, axis + 1), shape), param.type.with_shape(*shape)

    prefix = "layers.0.attn"
    for name in "qkv":
        longer(f"{prefix}.{name}.weight", 0)
    longer(f"{prefix}.o.weight", 1)
    for name in ("q_norm", "k_norm"):
        for kind in ("weight", "bias"):
            if f"{prefix}.{name}.{kind}" in by_hand.params:
                longer(f"{prefix}.{name}.{kind}", 0)
    for node in list(by_hand.nodes):
        if node.op is ops.attention:
            rebuild_node(node, scale=0.5 if scale else None)
        elif node.op is ops.reshape and node.scope == prefix:
            *lead, last = node.attrs["shape"]
            rebuild_node(node, shape=(*lead, 7 if len(lead) == 3 else last // 4 * 7))
        elif node.scope == prefix and node.op is ops.rms_norm and norm:
            new = rebuild_node(node, eps=node.attrs["eps"] * 4 / 7)
            with by_hand.inserting(after=new):
                scaled = ops.affine(new.output, by=math.sqrt(4 / 7))
            new.output.replace_uses(scaled, keep=[scaled.producer])
        elif node.scope == prefix and node.op in (ops.linear, ops.rope, ops.rms_norm, ops.layer_norm):
            rebuild_node(node)
    return by_hand


def test_padding_needs_the_old_scale_and_norms_of_the_old_width() -> None:
    def model(norm: object) -> Graph:
        return Decoder(29, 20, 1, Block(Attention(4, 2, 4, RoPE(), qk_norm=norm), GatedMLP(9))).graph()

    plain, rms, layer = model(None), model(RMSNorm(0.3)), model(LayerNorm())
    assert worst(plain, padded(plain)) <= EXACT and worst(rms, padded(rms)) <= EXACT
    assert worst(plain, padded(plain, scale=False)) > 1e-3
    assert worst(rms, padded(rms, norm=False)) > 1e-3
    assert worst(layer, padded(layer)) > 1e-3


def test_documented_trades() -> None:
    assert lookup("gqa-to-mha").tradeoff and lookup("pad-head-dim").tradeoff and not lookup("permute-heads").tradeoff


def test_a_clip_that_leaves_zero_out() -> None:
    graph = Tiny(layers=1).graph()
    (node,) = (n for n in graph.nodes if n.output.name == "layers.0.attn.v")
    with graph.inserting(after=node):
        clipped = ops.clip(node.output, low=0.1, high=3.0, name="clipped")
    node.output.replace_uses(clipped, keep=[clipped.producer])
    trace = Trace()
    assert str(applied("pad-head-dim", graph, trace)) == str(graph)
    assert "maps zeros to other values" in trace.refusals[0].reason
    assert worst(graph, applied("gqa-to-mha", graph)) <= EXACT  # where there are no zeros it does not matter


@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize("name", ["variant/grouped", "variant/norms of q and k", "packed/family phi3"])
def test_repeated_heads_merge_without_loss(name: str, method: str) -> None:
    """GQA to MHA, whose heads are then identical in each group; back to GQA; and to MHA once more: one function."""
    graphs = [ZOO[name]()]
    (kv_heads,) = {a["kv_heads"] for a in attentions(graphs[0])}
    for pipeline in ("gqa-to-mha", f"mha-to-gqa{{kv_heads={kv_heads}, method={method}}}", "gqa-to-mha"):
        graphs.append(applied(pipeline, graphs[-1]))
        assert worst(graphs[0], graphs[-1]) <= EXACT
    assert attentions(graphs[2])[0]["kv_heads"] == kv_heads
    assert attentions(graphs[3])[0]["kv_heads"] == attentions(graphs[3])[0]["heads"]
