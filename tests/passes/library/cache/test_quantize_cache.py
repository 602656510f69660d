"""quantize-cache: what it marks, the scales that it fits, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.types import dtypes
from weft.passes import Trace, all_passes, parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.library.cache.kv_cache import KvCache
from weft.passes.library.cache.quantize_cache import QuantizeCache

from ....e2e.random_models import strong
from ....sampling import by_turns
from ...models import BATCH, SEQ, Tiny, applied, weight
from ...rewrites import Rewrite, rewrites
from .cached import chosen, position_biased

DECODERS = {
    "rope": Tiny(layers=1),
    "window": Tiny(layers=1, window=3, bias="q k v", qk_norm=True),
    "ALiBi": Tiny(layers=1, rope=False, alibi=True),
    "no positions": Tiny(layers=1, rope=False),
}


def codes(graph: Graph) -> list[int | None]:
    return [node.attrs["cache_bits"] for node in graph.nodes if node.op is ops.attention]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(("name", "per", "bits"), by_turns(DECODERS, ["channel", "head", "tensor"], [8, 4]))
def test_checks_pass_with_caches_and_rolling_buffers(name: str, per: str, bits: int) -> None:
    """Before and after caches and buffers that roll."""
    coded = f"quantize-cache{{bits={bits}, per={per}}}"
    graph = DECODERS[name].graph()
    for pipeline in (coded, f"kv-cache, {coded}", f"{coded}, kv-cache, rolling-buffer"):
        after = run_passes(graph, pipeline, verify=True)
        assert codes(after) == [bits]
    pasts = {str(v.type) for n, v in after.inputs.items() if n.startswith("past_key_values")}
    assert all(text.startswith(f"i{bits}[") for text in pasts)


@pytest.mark.parametrize("name", ["rope", "window"])
def test_chunks_do_not_change_outputs(name: str) -> None:
    coded = applied("quantize-cache{bits=4}", DECODERS[name].graph())
    KvCache().check(coded, applied("kv-cache", coded), EquivalenceCheck())


def test_order_with_kv_cache_does_not_matter() -> None:
    """The scales, too: those of a graph with caches are fitted to its texts read from their beginning."""
    graph = Tiny(window=4).graph()
    first, last = (applied(p, graph) for p in ("quantize-cache, kv-cache", "kv-cache, quantize-cache"))
    assert str(first) == str(last)
    for name, param in first.params.items():
        np.testing.assert_array_equal(
            param.recipe.evaluate(first.reader), last.params[name].recipe.evaluate(last.reader)
        )
    packed = applied("pack-qkv, kv-cache, rolling-buffer, quantize-cache", graph)
    names = [name for name in first.params if name.endswith("_scale")]
    assert len(names) == 4
    for name in names:
        own = packed.params[name].recipe.evaluate(packed.reader)
        np.testing.assert_allclose(own, first.params[name].recipe.evaluate(first.reader), rtol=1e-5)


def test_check_notices_another_attention_scale() -> None:
    """Other scales than those that the graph says are noticed."""
    before = Tiny().graph()
    after = applied("quantize-cache", before)
    node = next(n for n in after.nodes if n.op is ops.attention)
    node.attrs["scale"] = 0.7
    with pytest.raises(WeftError, match="output logits differs"):
        QuantizeCache().check(before, after, EquivalenceCheck())


def test_more_bits_lose_less() -> None:
    model = Decoder(
        vocab=23,
        dim=16,
        layers=2,
        block=Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(24), norm=RMSNorm()),
    )
    graph = strong(model.graph())
    inputs = {"input_ids": np.arange(20)[None] % 23, "position_ids": np.arange(20)[None]}
    exact = interpret(graph, inputs)["logits"]

    def lost(pipeline: str) -> float:
        return float(np.abs(interpret(applied(pipeline, graph), inputs)["logits"] - exact).max() / np.abs(exact).max())

    eight, four = lost("quantize-cache"), lost("quantize-cache{bits=4}")
    assert 0 < eight < four / 3
    assert eight < 0.05


@pytest.mark.parametrize(
    ("pipeline", "sentence"),
    [
        ("quantize-cache{bits=3}", "quantize-cache: bits=3 must be 8 or 4"),
        ("quantize-cache{per=foo}", 'pass quantize-cache: per="foo" must be one of channel, head, tensor'),
        ("quantize-cache{tokens=0}", "quantize-cache: tokens=0 must be positive"),
        ("quantize-cache{calibration=none.npy}", "the text none.npy"),
    ],
)
def test_refusals(pipeline: str, sentence: str) -> None:
    with pytest.raises(WeftError) as error:
        run_passes(Tiny().graph(), pipeline)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_graph_without_causal_attention_is_refused() -> None:
    graph = Graph("none")
    graph.add_output("y", ops.relu(graph.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ)))))
    with pytest.raises(WeftError, match="quantize-cache: graph none has no causal self-attention, hence no cache"):
        run_passes(graph, "quantize-cache")


def test_short_calibration_text_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20))
    with pytest.raises(WeftError, match=r"ids.npy has 20 tokens, but .*scales need 128 or more: give a longer text"):
        run_passes(Tiny().graph(), f'quantize-cache{{calibration="{tmp_path / "ids.npy"}"}}')


def test_odd_head_width_keeps_f32_instead_of_4_bits() -> None:
    trace, graph = Trace(), Graph("odd")
    ids = graph.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = ops.embedding(ids, weight(graph, "table", 5, 3))
    graph.add_output("y", ops.attention(x, x, x, heads=1, kv_heads=1, causal=True))
    QuantizeCache(bits=4).run(graph, trace)
    assert codes(graph) == [None]
    assert trace.refusals[0].reason == "two codes of 4 bits are a byte, and its heads have 3 features"
    assert codes(applied("quantize-cache", graph)) == [8]


def test_random_calibration_tokens_cause_a_warning() -> None:
    trace = Trace()
    QuantizeCache().run(Tiny().graph(), trace)
    assert any("warning: scales are fitted to random tokens" in line for line in trace.lines)


def test_a_second_run_changes_nothing() -> None:
    graph, trace = applied("quantize-cache", Tiny().graph()), Trace()
    before = str(graph)
    QuantizeCache(bits=4).run(graph, trace)
    assert str(graph) == before
    assert trace.refusals[0].reason == "its cache has codes of 8 bits already"


@pytest.mark.parametrize("cached", [False, True])
def test_exact_passes_stay_exact_after_it(cached: bool) -> None:
    """Those that change heads or the sizes of keys leave what has scales alone."""
    model = Decoder(
        vocab=23,
        dim=16,
        layers=2,
        block=Block(Attention(heads=4, kv_heads=2, rope=RoPE()), GatedMLP(24), norm=RMSNorm()),
    )
    latent = Decoder(
        vocab=23,
        dim=16,
        layers=1,
        block=Block(MLA(2, 8, 8, 4, 8, RoPE()), GatedMLP(24), norm=RMSNorm()),
    )
    wrong = []
    for decoder in (model, latent):
        graph = applied(f"quantize-cache{{bits=8}}{', kv-cache' * cached}", strong(decoder.graph()))
        equivalence = EquivalenceCheck()
        inputs = equivalence.make_inputs(graph)
        wanted = equivalence.run(graph, inputs)
        for name, kind in all_passes().items():
            if kind.effect != "exact":
                continue
            (one,) = parse_pipeline(kind.documentation().pipeline).passes
            after = graph.clone()
            try:
                one.run(after, Trace())
            except WeftError:
                continue
            try:
                equivalence.check_close(wanted, equivalence.run(after, inputs), 1e-11)
            except WeftError as e:
                wrong.append(f"{name}: {e}")
    assert not wrong


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "onnx", "torch"])
def test_cache_dtype_option_runs_the_pass_on_every_target(target: str, tmp_path: Path) -> None:
    block = Block(Attention(2, rope=RoPE()), GatedMLP(48), RMSNorm())
    model = Decoder(97, 32, 1, block, context=64)
    weft.compile(model, tmp_path / "out", target=target, cache_dtype="int4", weights="int8")
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert manifest["pipeline"].startswith("quantize{bits=8") and "; quantize-cache{bits=4}" in manifest["pipeline"]
    assert {cache["bits"] for cache in manifest["cache"]} == {4}
    with pytest.raises(WeftError, match="--cache-dtype 'int2' is unknown: choose int8 or int4"):
        weft.compile(model, tmp_path / "out", target=target, cache_dtype="int2")


def test_sparse_key_index_is_not_quantized() -> None:
    trace, coded = Trace(), position_biased(chosen)
    QuantizeCache().run(coded, trace)
    coded = applied("kv-cache", coded)
    assert [r.reason for r in trace.refusals] == ["lightning_index has no scales for its cache"]
    assert str(coded.inputs["past_index.0.key"].type.dtype) == "f32"
