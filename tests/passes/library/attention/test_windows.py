"""sliding-window, dilate, attention-pattern and local-global: what they refuse, and that their checks notice errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft import Attention, Block, Encoder, Mamba, Mask, RelativeAttention, RoPE
from weft.ir import Graph, WeftError, ops
from weft.passes import Trace, parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference
from weft.passes.library.cache.kv_cache import run_in_chunks

from ...models import Tiny, applied, count
from ...rewrites import Rewrite, rewrites
from .decoders import FEED, decoder


def encoder() -> Graph:
    return Encoder(19, 8, 2, Block(Attention(2, rope=RoPE()), FEED)).graph()


def windows(graph: Graph) -> list[int | None]:
    return [n.attrs["window"] for n in graph.nodes if n.op is ops.attention]


def reasons(text: str, graph: Graph) -> list[str]:
    trace = Trace()
    applied(text, graph, trace)
    return [r.reason for r in trace.refusals]


GRAPHS: dict[str, Callable[[], Graph]] = {
    "decoder": lambda: Tiny(qk_norm=True).graph(),
    "packed": lambda: applied("pack-qkv, pack-gate-up, fuse-residual-norm", Tiny(bias="q k v").graph()),
    "no positions": lambda: Tiny(rope=False, tied=True).graph(),
    "encoder": encoder,
    "sinks, soft cap": lambda: decoder(*[Attention(4, 2, sinks=True, softcap=2.0)] * 2),
}


NEAR = [
    "sliding-window{size=3}",
    "sliding-window{size=2, keep_first=2, layers=odd}",
    "dilate{size=2, stride=2}",
    "attention-pattern{pattern=dilated, stride=3, window=6}",
    "attention-pattern{pattern=strided, stride=3}",
    "attention-pattern{pattern=fixed, stride=4, summary=2, keep_first=1}",
    "attention-pattern{pattern=chunked, stride=3, layers=-1}",
    'local-global{pattern="1:1", window=2}',
]


FAR = [  # their checks try smaller numbers
    "sliding-window{size=100, keep_first=5}",
    "dilate{size=9, stride=9, layers=0}",
    "attention-pattern{pattern=chunked, stride=50, layers=-1}",
    "local-global{pattern=[global, local], window=300}",
]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("text", NEAR + FAR)
def test_passes_keep_their_declared_effect(text: str, name: str) -> None:
    before = GRAPHS[name]()
    after = run_passes(before, text, verify=True)
    assert str(after) != str(before)
    assert str(run_passes(after, text)) == str(after)


@pytest.mark.parametrize("text", NEAR)
def test_windows_change_the_outputs(text: str) -> None:
    before, equivalence = decoder(), EquivalenceCheck()
    after, inputs = run_passes(before, text), equivalence.make_inputs(before, seq=12)
    assert (
        measure_difference(equivalence.run(before, inputs)["logits"], equivalence.run(after, inputs)["logits"]) > 1e-3
    )


@pytest.mark.parametrize("text", NEAR)
@pytest.mark.parametrize("attribute", ["window", "keep_first", "causal", "stride"])
def test_a_wrong_mask_is_caught(text: str, attribute: str) -> None:
    (one,) = parse_pipeline(text).passes
    before = decoder()
    after = applied(text, before)
    attrs = [n.attrs for n in after.nodes if n.op is ops.attention and n.attrs != decoder_attrs()][-1]
    if attribute == "stride" and attrs["pattern"] == "dense":
        attrs["pattern"] = "dilated"
    wrong = {"window": (attrs["window"] or 1) + 1, "keep_first": attrs["keep_first"] + 1, "causal": False}
    attrs[attribute] = wrong.get(attribute, attrs["stride"] + 1)
    with pytest.raises(WeftError, match="output logits differs by"):
        one.check(before, after, EquivalenceCheck())


def decoder_attrs() -> dict[str, Any]:
    return next(n.attrs for n in decoder().nodes if n.op is ops.attention)


def test_a_window_changes_nothing_within_it() -> None:
    before = decoder()
    after, equivalence = run_passes(before, "sliding-window{size=6}"), EquivalenceCheck()
    for seq, same in ((6, True), (7, False)):
        inputs = equivalence.make_inputs(before, seq=seq)
        assert (
            measure_difference(equivalence.run(before, inputs)["logits"], equivalence.run(after, inputs)["logits"])
            < 1e-12
        ) == same


def test_windows_of_selected_layers() -> None:
    assert windows(applied('sliding-window{size=3, layers="local+global"}', decoder())) == [3, None, 3, None]
    assert windows(applied('local-global{window=5, pattern="2:1"}', decoder())) == [5, 5, None, 5]
    narrow = decoder(Attention(2, window=2), Attention(2, window=9))
    assert windows(applied("sliding-window{size=4}", narrow)) == [2, 4]
    assert windows(applied('local-global{window=4, pattern="1:1"}', narrow)) == [4, None]


@pytest.mark.parametrize("text", ["sliding-window{size=4}", "dilate{size=2, stride=2}", "local-global{window=4}"])
def test_relative_attention_is_refused(text: str) -> None:
    graph = decoder(Attention(2), RelativeAttention(2, 3))
    assert "relative_attention" in reasons(text, graph)[0]


def test_narrower_windows_and_patterns_stay() -> None:
    narrow = decoder(Attention(2, window=2))
    assert reasons("sliding-window{size=4}", narrow) == ["its window of 2 keys is narrower"]
    sparse = decoder(Attention(2, mask=Mask(pattern="chunked", stride=3)))
    assert reasons("sliding-window{size=4}", sparse) == ["its pattern chunked defines its visible keys"]
    assert reasons("local-global{window=4}", sparse) == ["chunked defines its visible keys"]
    longrope = RoPE(scaling="longrope", original=8, factors=(1.0, 2.0))
    found = reasons("local-global{window=4, theta_local=100}", decoder(Attention(2, rope=longrope)))
    assert set(found) == {"its frequencies are scaled by longrope, which is not supported"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sliding-window{size=0}", "sliding-window: size=0 must be at least 1"),
        ("sliding-window{size=-3}", "size=-3 must be at least 1"),
        ("sliding-window{size=2, keep_first=-1}", "keep_first=-1 must be at least 0"),
        ("sliding-window{size=2, layers=4}", "sliding-window: there is no layer 4; the graph has layers 0 to 3"),
        ("dilate{size=2, stride=0}", "dilate: stride=0 must be at least 1"),
        ("attention-pattern{pattern=strided, window=0}", "attention-pattern: window=0 must be at least 1"),
        ("attention-pattern{pattern=fixed, stride=2, summary=3}", "summary=3 exceeds stride=2"),
        ("local-global{window=0}", "local-global: window=0 must be at least 1"),
        ("local-global{window=2, pattern=wide}", "local-global: pattern 'wide' is unknown"),
        ("local-global{window=2, theta_local=0.5}", "local-global: theta=0.5 must be above 1"),
    ],
)
def test_wrong_arguments(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        run_passes(decoder(), text)


@pytest.mark.parametrize("text", [NEAR[0], *NEAR[2:4], NEAR[-1]])
def test_cached_graphs_and_recurrences_are_refused(text: str) -> None:
    with pytest.raises(WeftError, match=r"graph decoder has caches already; run \S* before kv-cache"):
        run_passes(decoder(), f"kv-cache, {text}")
    with pytest.raises(WeftError, match="graph decoder has no softmax self-attention"):
        run_passes(decoder(Mamba(16)), text)


@pytest.mark.long
def test_caches_have_the_slots_of_windows() -> None:
    found = run_passes(decoder(), "sliding-window{size=3, layers=even}, kv-cache, rolling-buffer", verify=True)
    assert [found.inputs[f"past_key_values.{i}.key"].shape[2] == 3 for i in range(4)] == [True, False, True, False]
    found = run_passes(decoder(), "sliding-window{size=3, keep_first=2}, kv-cache, rolling-buffer", verify=True)
    assert found.inputs["past_key_values.0.key"].shape[2] == 5 and count(found, "attention") == 4
    run_passes(decoder(), "sliding-window{size=3, keep_first=1}, kv-cache, rolling-buffer{slack=2}", verify=True)
    run_passes(decoder(), "attention-pattern{pattern=chunked, stride=3, keep_first=1}, kv-cache", verify=True)


def test_a_rolling_cache_without_slots_for_sinks_would_be_wrong() -> None:
    """Without slots of its own, the first key would roll out with the others."""
    right = run_passes(decoder(), "sliding-window{size=3, keep_first=1}, kv-cache, rolling-buffer")
    wrong, equivalence = right.clone(), EquivalenceCheck()
    for node in wrong.nodes:
        if node.op is ops.attention:
            node.attrs["keep_first"] = 0
    inputs = equivalence.make_inputs(right, seq=9)
    whole, forgetful = (run_in_chunks(equivalence, graph, inputs, (4, 5))["logits"] for graph in (right, wrong))
    assert measure_difference(whole, forgetful) > 1e-3
