"""mla-absorb, mla-expand and slim-attention: over all heads, over a latent, over the input itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from weft import MLA, Block, Decoder, GatedMLP, RoPE
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, TensorType, Value, interpret, ops, parse
from weft.ir.ops.latent import emit_expanded
from weft.ir.types import dtypes
from weft.passes import Trace, legalize, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference
from weft.passes.library.attention.latent_attention import _absorb_weights, _find_latent

from ...models import BATCH, SEQ, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

H, D, DV, R, RANK = 3, 5, 7, 4, 9  # heads; numbers of a head's keys, values and rotary part; of the latent


def kv_heads(graph: Graph) -> list[int]:
    return [n.attrs["kv_heads"] for n in graph.nodes if n.op is ops.attention]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("options", [{}, {"q_rank": 11}, {"scale": 0.4, "rope": RoPE(interleaved=True)}], ids=str)
def test_expanded_and_absorbed_models_of_the_dsl_agree(options: dict[str, Any]) -> None:
    def model(absorbed: bool) -> Graph:
        mla = MLA(
            **{"heads": H, "rank": RANK, "head_dim": D, "rope_dim": R, "v_head_dim": DV, "rope": RoPE()} | options
        )
        mla = MLA(**{f: getattr(mla, f) for f in mla.__dataclass_fields__} | {"absorbed": absorbed})
        return Decoder(29, 20, 2, Block(mla, GatedMLP(11)), context=16).graph()

    latent, heads = model(True), model(False)
    assert kv_heads(latent) == [1, 1] and kv_heads(heads) == [H, H]
    assert worst(latent, heads) <= EXACT
    for graph, name, other in ((heads, "mla-absorb", latent), (latent, "mla-expand", heads)):
        after = applied(name, graph)
        assert kv_heads(after) == kv_heads(other) and len(after) == len(other)
        assert worst(graph, after) <= EXACT and sorted(after.params) == sorted(other.params)
        assert str(applied(name, after)) == str(after)
        run_passes(after, "default", verify=True)


@pytest.mark.parametrize("name", ["family/deepseek-v2-lite", "family/deepseek-v3", "packed/variant latent queries"])
def test_absorb_and_expand_are_inverse(name: str) -> None:
    before = ZOO[name]()
    heads = applied("mla-expand", before)
    assert set(kv_heads(heads)) != {1} and worst(before, heads) <= EXACT
    again = applied("mla-absorb", heads)
    assert worst(heads, again) <= EXACT and len(again) == len(before) and sorted(again.params) == sorted(before.params)


def latent(kind: str = "", **attrs: Any) -> Graph:
    """Expanded latent attention over inputs q and c, its weights packed in the way `kind` says; or one thing spoilt."""
    g = Graph("one")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 8)))
    c = g.add_input("c", TensorType(dtypes.f32, (BATCH, SEQ, RANK)))
    q = ops.linear(x, weight(g, "q.weight", H * D, 8), name="q")
    parts: list[Value] = []
    if kind == "packed":
        both = ops.linear(c, weight(g, "kv.weight", H * (D + DV), RANK), name="kv")
        parts = list(ops.split.emit(both, sizes=(H * D, H * DV)))
    elif kind == "head by head":  # as DeepSeek's kv_b_proj stores them
        both = ops.linear(c, weight(g, "kv_b.weight", H * (D + DV), RANK), name="kv_b")
        by_head = ops.reshape(both, shape=(BATCH, SEQ, H, D + DV))
        pieces = ops.split.emit(by_head, sizes=(D, DV))
        parts = [ops.reshape(p, shape=(BATCH, SEQ, H * p.width)) for p in pieces]
    else:
        bias = weight(g, "k_up.bias", H * D) if kind == "bias" else None
        parts = [ops.linear(c, weight(g, "k_up.weight", H * D, RANK), bias, name="k")]
        of_v = x if kind == "other input" else c
        parts += [ops.linear(of_v, weight(g, "v_up.weight", H * DV, of_v.width), name="v")]
    if kind == "normed":
        parts[0] = ops.rms_norm(parts[0], eps=0.1, name="k_normed")
    if kind == "sum":
        parts[0] = ops.add(parts[0], ops.linear(x, weight(g, "more.weight", H * D, 8)), name="k_sum")
    masks: list[Value | None] = [None, None, None]
    if kind == "masked":
        masks = [weight(g, "bias", 1, H, 1, 1), g.add_input("key_mask", TensorType(dtypes.i64, (BATCH, SEQ)))]
        masks.append(weight(g, "sinks", H))
    shape = {"heads": H, "kv_heads": H, "causal": True, **attrs}
    y = ops.attention(q, *parts, *masks, **shape)
    g.add_output("y", y)
    if kind == "read":
        g.add_output("c2", ops.square(c))
    return g


@pytest.mark.parametrize("kind", ["", "packed", "head by head", "masked"])
def test_masks_and_packing_keep_outputs(kind: str) -> None:
    before = latent(kind, **({"window": 3, "softcap": 2.0} if kind == "masked" else {}))
    after = applied("mla-absorb", before)
    assert kv_heads(after) == [1] and worst(before, after) <= EXACT
    ups = {n.inputs[1].name: n.inputs[1].shape for n in after.nodes if n.op is ops.head_linear}
    assert ups == {"k_up.weight": (H * D, RANK), "v_up.weight": (H * DV, RANK)}
    assert set(after.params) >= set(ups) and len(after.params) == 3 + (2 if kind == "masked" else 0)
    assert worst(after, applied("mla-expand", after)) <= EXACT


def test_fixed_sizes_are_supported() -> None:
    graph = parse(str(latent("head by head")).replace("batch", "2").replace("seq", "5"))
    after = applied("mla-absorb", graph)
    assert kv_heads(after) == [1] and worst(graph, after) <= EXACT
    assert worst(graph, applied("mla-expand", after)) <= EXACT


def test_queries_concatenated_along_heads_are_absorbed() -> None:
    """Twice as many heads of half the size, side by side, are no two parts of every head."""
    g = Graph("turns")
    q, r = (g.add_input(n, TensorType(dtypes.f32, (BATCH, SEQ, 6))) for n in "qr")
    c, s = (g.add_input(n, TensorType(dtypes.f32, (BATCH, SEQ, w))) for n, w in (("c", 2), ("s", 3)))
    apart = [ops.reshape(x, shape=(BATCH, SEQ, 2, 3)) for x in (q, r)]
    q = ops.reshape(ops.concat(*apart, axis=2), shape=(BATCH, SEQ, 12))
    k = ops.linear(c, weight(g, "k.weight", 6, 2), name="k")
    v = ops.linear(c, weight(g, "v.weight", 6, 2), name="v")
    shared = ops.expand(ops.unsqueeze(s, axes=(2,)), shape=(BATCH, SEQ, 2, 3))
    k = ops.reshape(ops.concat(ops.reshape(k, shape=(BATCH, SEQ, 2, 3)), shared, axis=3), shape=(BATCH, SEQ, 12))
    g.add_output("y", ops.attention(q, k, v, heads=2, kv_heads=2))
    after = applied("mla-absorb", g)
    assert kv_heads(after) == [1] and worst(g, after) <= EXACT


def test_grouped_keys_of_a_latent() -> None:
    g = Graph("groups")
    q = g.add_input("q", TensorType(dtypes.f32, (BATCH, SEQ, 4 * 6)))
    c = g.add_input("c", TensorType(dtypes.f32, (BATCH, SEQ, 9)))
    k, v = (ops.linear(c, weight(g, f"{n}.weight", 2 * 6, 9), name=n) for n in "kv")
    g.add_output("y", ops.attention(q, k, v, heads=4, kv_heads=2))
    after = applied("mla-absorb", g)
    assert kv_heads(after) == [1] and worst(g, after) <= EXACT
    assert after.params["k_up.weight"].shape == (24, 9)


@pytest.mark.parametrize(
    ("kind", "rule", "reason"),
    [
        ("bias", "mla-absorb", "its keys or values have a bias"),
        ("bias", "slim-attention", "its keys or values have a bias"),
        ("cached", "mla-absorb", "it has a cache of its keys and values; run the pass before kv-cache"),
        ("wide", "mla-absorb", "its keys of 4 features are not wider than their source of 9"),
        ("wide", "slim-attention", "its keys and values of 8 features are not wider than their source of 9"),
    ],
)
def test_refusals(kind: str, rule: str, reason: str) -> None:
    if kind == "cached":
        graph = run_passes(Decoder(29, 20, 1, Block(MLA(3, 9, 5, 4, 7, RoPE(), absorbed=False))).graph(), "kv-cache")
    elif kind == "wide":
        graph = Graph("wide")
        c = graph.add_input("c", TensorType(dtypes.f32, (BATCH, SEQ, 9)))
        k, v = (ops.linear(c, weight(graph, f"{n}.weight", 4, 9), name=n) for n in "kv")
        q = graph.add_input("q", TensorType(dtypes.f32, (BATCH, SEQ, 4)))
        graph.add_output("y", ops.attention(q, k, v, heads=2, kv_heads=2))
    else:
        graph = latent(kind)
    trace = Trace()
    assert str(applied(rule, graph, trace)) == str(graph)
    assert [r.reason for r in trace.refusals] == [reason]


@pytest.mark.parametrize("kind", ["normed", "sum", "other input", "read"])
def test_norms_sums_and_other_inputs_are_not_absorbed(kind: str) -> None:
    """A norm or a sum between, values of another input, a latent that others read: ordinary attention."""
    graph = latent(kind)
    assert str(applied("mla-absorb", graph)) == str(graph)


def test_a_bias_of_keys_made_from_a_latent_would_be_lost() -> None:
    """The refusal is needed: under a soft cap, absorbing without the bias gives other numbers."""
    graph = latent("bias", softcap=1.0)
    by_hand = graph.clone()
    (node,) = (n for n in by_hand.nodes if n.op is ops.attention)
    found = _find_latent(node)
    assert found is not None
    _absorb_weights(node, found)
    assert worst(graph, by_hand) > 1e-3


def test_norm_between_latent_and_keys_is_refused() -> None:
    """The same for a norm of the keys: what is absorbed without it differs."""
    assert worst(latent("normed"), latent()) > 1e-3


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ("heads", "it has 3 KV heads, not one latent"),
        ("bare", "its result has other readers than one head_linear with W_UV"),
        ("q", "its queries do not come from a head_linear with W_UKᵀ"),
        ("cached", "it has a cache of the latent; run mla-expand before kv-cache"),
    ],
)
def test_latent_attention_of_another_form(edit: str, reason: str) -> None:
    g = Graph("other")
    q = g.add_input("q", TensorType(dtypes.f32, (BATCH, SEQ, H * RANK)))
    c = g.add_input("c", TensorType(dtypes.f32, (BATCH, SEQ, (H if edit == "heads" else 1) * RANK)))
    if edit == "cached":
        g = run_passes(ZOO["variant/latent"](), "kv-cache")
    else:
        y = ops.attention(q, c, heads=H, kv_heads=H if edit == "heads" else 1, value_dim=RANK)
        g.add_output("y", y if edit == "bare" else ops.head_linear(y, weight(g, "up", H * DV, RANK), heads=H))
    trace = Trace()
    assert str(applied("mla-expand", g, trace)) == str(g)
    assert {r.reason for r in trace.refusals} == {reason}


# -- slim attention


@pytest.mark.parametrize("name", ["family/gpt_neo", "family/mpt", "family/t5", "variant/encoder-decoder"])
def test_slim_attention_caches_the_input(name: str) -> None:
    before = ZOO[name]()
    after = applied("slim-attention", before)
    assert 1 in kv_heads(after) and worst(before, after) <= EXACT
    assert str(applied("slim-attention", after)) == str(after)


def test_biases_go_first_and_packed_linears_come_apart() -> None:
    before = ZOO["variant/gpt2"]()
    for pack in ("", "pack-qkv, "):
        after = run_passes(before, f"{pack}drop-k-bias, v-bias-to-o-bias, slim-attention, kv-cache", verify=True)
        caches = {name: v.shape[1:] for name, v in after.inputs.items() if name.startswith("past_key_values")}
        assert {n.rpartition(".")[2] for n in caches} == {"key"} and {s[0] for s in caches.values()} == {1}
        assert {s[2] for s in caches.values()} == {30}  # the width of the model; K and V together were 60
        assert not count(after, "split")


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_runtimes(target: str) -> None:
    """The three forms of one model, run by ONNX Runtime."""
    mla = MLA(2, 8, 6, 4, 5, RoPE())
    before = Decoder(29, 20, 2, Block(mla, GatedMLP(11)), context=16).graph()
    inputs = {"input_ids": np.arange(12).reshape(2, 6), "position_ids": np.tile(np.arange(6), (2, 1))}
    wanted, place = interpret(before, inputs)["logits"], TARGETS[target]
    for pipeline in ("mla-expand", "mla-expand, mla-absorb", "mla-expand, fold-constants, cse, mla-absorb"):
        graph = run_passes(before, pipeline, verify=True)
        legalize(graph, lambda node: list_refusals(node, place))
        model = serialize_model(build_model(graph, place, max_length=16))
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(["logits"], inputs)[0], wanted, rtol=0, atol=3e-6)


def test_the_composition_takes_masks() -> None:
    """`emit_expanded` and `absorbed` hand bias, mask and sinks on; without a rotary part too."""
    g = Graph("both")
    q, c = (g.add_input(n, TensorType(dtypes.f32, (BATCH, SEQ, w))) for n, w in (("q", 6), ("c", 4)))
    ups = [weight(g, n, 6, 4) for n in ("k_up", "v_up")]
    sinks = weight(g, "sinks", 2)
    g.add_output("y", emit_expanded(q, None, c, None, *ups, None, None, sinks, heads=2, window=2, softcap=3.0))
    staged, inputs = EquivalenceCheck().randomize_weights(g), EquivalenceCheck().make_inputs(g)
    k, v, s = (staged.params[n].recipe.evaluate(staged.reader) for n in ("k_up", "v_up", "sinks"))
    x = inputs["c"]
    attrs = {"heads": 2, "kv_heads": 2, "causal": True, "window": 2, "softcap": 3.0}
    y = ops.attention.reference(inputs["q"], x @ k.T, x @ v.T, None, None, s, **attrs)
    assert measure_difference(y, interpret(staged, inputs)["y"]) <= EXACT
