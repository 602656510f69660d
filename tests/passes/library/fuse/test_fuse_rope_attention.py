"""fuse-rope-attention: where it fires and where not, caches before and after it, ONNX Runtime's own rotation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from weft import Attention, Block, Decoder, GatedMLP, RoPE
from weft.backends.onnx.export import build, in_memory
from weft.backends.onnx.lowering import refusals
from weft.backends.targets import TARGETS
from weft.frontends.api.compile import compile as compile_model
from weft.ir import Graph, TensorType, Value, WeftError, interpret, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes, sizes
from weft.passes import Report, Trace, legalize, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, difference

from ...models import Tiny, applied, count, weight, worst
from ...zoo import ZOO

FUSE = "fuse-rope-attention"


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("family/llama-mha-biases", 3),
        ("family/qwen3-gqa", 3),
        ("family/gpt-oss", 3),
        ("packed/family phi3", 3),
        ("cached/family mistral-gqa", 3),
        ("variant/rope, partial and interleaved", 2),
        ("variant/rope, yarn", 2),
        ("variant/rope in every other layer", 2),
        ("variant/local and global", 3),
        ("variant/no positions", 0),
        ("variant/latent", 0),
    ],
)
def test_rotations_join_their_attention(name: str, fused: int) -> None:
    before = ZOO[name]()
    after = applied(FUSE, before)
    assert count(after, "rotary_attention") == fused
    assert count(after, "rope") == count(before, "rope") - 2 * fused
    assert worst(before, after) <= EXACT
    assert str(applied(FUSE, after)) == str(after)


@pytest.mark.parametrize("pipeline", ["fuse-rope-attention, kv-cache", "kv-cache, fuse-rope-attention"])
def test_caches_before_and_after(pipeline: str) -> None:
    graph = Tiny(window=3).graph()
    after = run_passes(graph, f"{pipeline}, rolling-buffer, last-token-logits", verify=True)
    assert count(after, "rotary_attention") == 2 and "past_key_values.1.value" in after.inputs
    assert after.inputs["past_key_values.0.key"].shape[2] == 3


def test_frequencies_stay_wide() -> None:
    graph = applied("fuse-rope-attention, cast{dtype=bf16}", Tiny().graph())
    assert graph.params["rope.frequencies"].type.dtype == dtypes.f32
    assert graph.params["layers.0.attn.q.weight"].type.dtype == dtypes.bf16


def test_packing_sees_through_it() -> None:
    graph = Tiny().graph()
    after = applied("fuse-rope-attention, pack-qkv", graph)
    assert count(after, "split") == 2 and worst(graph, after) <= EXACT


@pytest.mark.parametrize(
    "pipeline",
    [
        "v-bias-to-o-bias",
        "gqa-to-mha",
        "permute-heads{order=[3, 5, 4, 1, 2, 0]}",
        "pad-head-dim",
        "pack-qkv, permute-heads{order=[5, 4, 3, 2, 1, 0]}, pad-head-dim, v-bias-to-o-bias, gqa-to-mha, kv-cache",
    ],
)
def test_other_passes_see_through_it(pipeline: str) -> None:
    graph, report = ZOO["variant/biases"](), Report()
    run_passes(graph, f"{FUSE}, {pipeline}", verify=True, report=report)
    assert all(record.rewrites for record in report.records)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("drop-k-bias", "RoPE turns the bias with the position of its key"),
        ("rope-layout{layout=interleaved}", "run rope-layout before fuse-rope-attention"),
    ],
)
def test_other_passes_refuse_it(pipeline: str, reason: str) -> None:
    graph, trace = applied(FUSE, ZOO["variant/biases"]()), Trace()
    assert str(applied(pipeline, graph, trace)) == str(graph)
    assert len(trace.refusals) == 2 and all(reason in refused.reason for refused in trace.refusals)


def test_a_cache_needs_the_positions_of_the_tokens() -> None:
    graph = attended()
    graph.meta["kind"] = "decoder"
    with pytest.raises(WeftError, match="turns by other positions than position_ids"):
        run_passes(graph, "fuse-rope-attention, kv-cache")


def attended(edit: str = "") -> Graph:
    """A causal attention over inputs q, k and v that are turned by the input at; `edit` spoils one thing."""
    g = Graph("one")
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    q, k, v = (g.add_input(n, TensorType(dtypes.f32, (batch, seq, w))) for n, w in (("q", 24), ("k", 12), ("v", 12)))
    at, other = (g.add_input(n, TensorType(dtypes.i64, (batch, seq))) for n in ("at", "other"))
    table = weight(g, "frequencies", 3, recipe=RopeFrequencies(6))
    slow = weight(g, "slow", 3, recipe=RopeFrequencies(6, theta=50.0))
    heads, kv_heads = (2, 1) if edit == "heads" else (4, 2)
    q_rope = ops.rope(q, at, table, heads=4, interleaved=edit == "pairs", name="q_rope")
    moved, turned = other if edit == "positions" else at, slow if edit == "frequencies" else table
    k_rope = k if edit == "keys" else ops.rope(k, moved, turned, heads=2, amplitude=1.5 if edit == "amplitude" else 1.0)
    past: list[Value | None] = [None, None, None]
    if edit == "cache":
        shape = (batch, 2, sizes.sym("capacity"), 6)
        past = [*(g.add_input(n, TensorType(dtypes.f32, shape)) for n in ("past_k", "past_v")), other]
    shared = {"heads": heads, "kv_heads": kv_heads, "causal": True}
    latent = {"value_dim": 5} if edit == "latent" else {}
    y, *_ = ops.attention.emit(q_rope, k_rope, None if latent else v, None, None, None, *past, **shared, **latent)
    g.add_output("y", y)
    if edit == "read":
        g.add_output("turned", q_rope)
    return g


REASONS = {
    "pairs": "with interleaved True and False",
    "positions": "other positions or frequencies",
    "frequencies": "other positions or frequencies",
    "amplitude": "with amplitude 1.0 and 1.5",
    "heads": "other heads than the rotations",
    "keys": "only its queries are turned",
    "read": "%q_rope is also read by the caller",
    "latent": "its values are part of the turned keys",
    "cache": "its cache is written at other positions",
}


@pytest.mark.parametrize("edit", REASONS)
def test_refusals(edit: str) -> None:
    trace, graph = Trace(), attended(edit)
    after = applied(FUSE, graph, trace)
    assert str(after) == str(graph) and not trace.rewrites
    (refused,) = trace.refusals
    assert REASONS[edit] in refused.reason


@pytest.mark.parametrize("edit", ["pairs", "positions", "frequencies", "amplitude", "heads", "keys"])
def test_each_refusal_is_needed(edit: str) -> None:
    """Turning keys as the queries are turned, or as the attention counts heads, gives other numbers."""
    graph = attended(edit)
    inputs = {
        **EquivalenceCheck().inputs(graph),
        "at": np.arange(15).reshape(3, 5),
        "other": np.arange(15).reshape(3, 5) * 3,
    }
    (node,) = (n for n in graph.nodes if n.op is ops.attention)
    (q_rope,) = graph.inputs["q"].users
    wrong = ops.rotary_attention.reference(
        *(inputs[n] for n in ("q", "k", "v", "at")),
        RopeFrequencies(6).frequencies(),
        heads=node.attrs["heads"],
        kv_heads=node.attrs["kv_heads"],
        causal=True,
        interleaved=q_rope.attrs["interleaved"],
    )
    assert difference(interpret(graph, inputs)["y"], wrong) > 0.01


DEEP = Attention(4, 2, 16, RoPE(1000.0))
MODELS: dict[str, Callable[[], Decoder]] = {
    "half": lambda: Decoder(29, 24, 2, Block(DEEP, GatedMLP(20)), context=32),
    "interleaved": lambda: Decoder(
        29, 24, 2, Block(Attention(4, 2, 16, RoPE(interleaved=True), window=4, sinks=True), GatedMLP(20)), context=32
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_backends_expand_it_and_select_as_before(target: str, name: str) -> None:
    """The model has the operators it has without the pass, and computes what the graph means."""
    graph, place = run_passes(MODELS[name]().graph(), "kv-cache"), TARGETS[target]
    fused = run_passes(graph, FUSE)
    kinds = []
    for one in (graph.clone(), fused.clone()):
        legalize(one, lambda node: refusals(node, place))
        built = build(one, place, max_length=32)
        kinds.append(sorted(n.op_type for n in built.model.graph))
    assert kinds[0] == kinds[1]
    rotary = [n.attributes["do_rotary"].value for n in built.model.graph if n.op_type == "GroupQueryAttention"]
    assert rotary == ([1, 1] if target == "ort-cpu" else [])
    assert kinds[1].count("RotaryEmbedding") == (0 if target == "ort-cpu" else 4)
    session = ort.InferenceSession(in_memory(built), providers=["CPUExecutionProvider"])
    rng, length = np.random.default_rng(0), 7
    feeds = {
        "input_ids": rng.integers(0, 29, (2, length)),
        "position_ids": np.tile(np.arange(length), (2, 1)),
        "attention_mask": np.ones((2, length), np.int64),
    }
    past = {n: np.zeros((2, 2, 9, 16), np.float32) for n in fused.inputs if n.startswith("past_key_values.")}
    wanted = interpret(fused, {**feeds, **past})["logits"]
    found = session.run(["logits"], {**feeds, **past})[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_compiled_folders_are_the_same(target: str, tmp_path: Path) -> None:
    """Model, weights and configuration: fused or not, before or behind the caches."""
    model = Decoder(29, 24, 2, Block(Attention(4, 2, 16, RoPE(), window=8), GatedMLP(20)), context=32)
    found = {}
    for name, passes in (
        ("plain", "default"),
        ("before", "fuse-rope-attention, kv-cache, rolling-buffer, last-token-logits"),
        ("plain too", "kv-cache, rolling-buffer, last-token-logits"),
        ("behind", "default, fuse-rope-attention"),
    ):
        compile_model(model, tmp_path / name, target=target, passes=passes)
        proto = onnx.load(tmp_path / name / "model.onnx", load_external_data=False)
        kinds = sorted(node.op_type for node in proto.graph.node)
        found[name] = kinds, (tmp_path / name / "genai_config.json").read_text()
    assert found["behind"] == found["plain"] and found["before"] == found["plain too"]
