"""scale-channels: the same function with weights that lose less, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.frontends.dsl import Attention, Block, Decoder, MoE
from weft.ir import Graph, WeftError, interpret, ops
from weft.ir.recipes import Map, Normal, Scale
from weft.ir.recipes.readers import Array
from weft.ir.types.block_layouts import build_integer_layout
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.library.quantize.scale_channels import FARTHEST, ScaleChannels, fit_channel_factors

from ...models import Tiny, applied, weight, worst
from ...rewrites import Rewrite, rewrites

TINY = Tiny(dim=64, hidden=96)


IDS = np.random.default_rng(4).integers(0, 37, (4, 24))


def uneven(tiny: Tiny = TINY) -> Graph:
    """A model whose channels differ widely in size: those of norms, and the hidden ones of feed-forwards."""
    graph = tiny.graph()
    for name, param in graph.params.items():
        sizes = Map(Normal((int(param.shape[0]),), 1.5, f"{name}.size"), "exp")
        if name.endswith("norm.weight"):
            param.recipe = sizes
        elif name.endswith("up.weight"):
            param.recipe = Scale(param.recipe, sizes)
    return graph


def logits(graph: Graph) -> Array:
    given = {"input_ids": IDS, "position_ids": np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)}
    return interpret(graph, {name: given[name] for name in graph.inputs})["logits"]


def factors(graph: Graph) -> dict[str, Array]:
    keys = {key for param in graph.params.values() for key in param.recipe.sources() if key.endswith(".factors")}
    return {key: graph.reader.read(key, 0, graph.reader.shape(key)[0]) for key in keys}


def fired(trace: Trace) -> set[str]:
    return {line.removeprefix("scale-channels: rewrote %") for line in trace.lines}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("tiny", [TINY, replace(TINY, norm="layer", bias="q v gate up"), replace(TINY, tied=True)])
def test_outputs_stay_equal_bit_by_bit(tiny: Tiny) -> None:
    before, trace = uneven(tiny), Trace()
    after = applied("scale-channels", before, trace)
    assert {f"layers.{i}.{name}" for i in range(2) for name in ("attn_norm", "mlp_norm")} <= fired(trace)
    np.testing.assert_array_equal(logits(before), logits(after))  # to the last bit
    for found in factors(after).values():
        mantissas, exponents = np.frexp(found)
        assert (mantissas == 0.5).all() and np.ptp(exponents) >= 2 and abs(exponents - 1).max() <= FARTHEST


def test_quantization_error_shrinks() -> None:
    one = replace(TINY, layers=1)
    exact, rounded = logits(uneven(one)), "quantize{bits=4, method=rtn}"
    pipelines = rounded, f"scale-channels{{bits=4}}, {rounded}"
    plain, scaled = (float(np.square(logits(applied(p, uneven(one))) - exact).mean()) for p in pipelines)
    assert scaled < 0.8 * plain


def test_packed_weights_are_scaled_by_piece() -> None:
    before = applied("pack-qkv, pack-gate-up", uneven())
    after = applied("scale-channels", before)
    assert {"layers.0.attn_norm.factors", "layers.0.mlp.glu.factors"} <= factors(after).keys()
    packed = after.params["layers.0.mlp.gate_up.weight"].recipe
    gate, up = (packed.evaluate(after.reader)[i * 96 : (i + 1) * 96] for i in range(2))
    was = before.params["layers.0.mlp.gate_up.weight"].recipe.evaluate(before.reader)
    rows, columns = (factors(after)[f"layers.0.{name}.factors"] for name in ("mlp.glu", "mlp_norm"))
    np.testing.assert_array_equal(gate, was[:96] * columns)
    np.testing.assert_array_equal(up, was[96:] * columns / rows[:, None])
    assert worst(before, after) <= EXACT


@pytest.mark.parametrize(
    ("pipeline", "place", "reason"),
    [
        ("dce", "layers.0.attn.attention", "attention (%layers.0.attn.attention) is between the scale and"),
        ("fold-norm-scale", "layers.0.attn_norm", "rms_norm (%layers.0.attn_norm) has no weight"),
    ],
)
def test_channels_that_cannot_be_scaled_are_refused(pipeline: str, place: str, reason: str) -> None:
    trace = Trace()
    after = applied("scale-channels", applied(pipeline, uneven()), trace)
    assert reason in {refusal.at: refusal.reason for refusal in trace.refusals}[place]
    assert f"{place}.factors" not in factors(after)


def test_tied_head_is_not_scaled() -> None:
    trace = Trace()
    applied("scale-channels", uneven(replace(TINY, tied=True)), trace)
    assert "%embed.weight is also a weight of embedding (%embed)" in [refusal.reason for refusal in trace.refusals]


def test_experts_are_not_scaled() -> None:
    graph, trace = Decoder(37, 64, 1, Block(Attention(4), MoE(32, 4, 2))).graph(), Trace()
    applied("scale-channels", graph, trace)
    assert any("is read by moe" in refusal.reason for refusal in trace.refusals)


def test_tables_looked_up_by_computed_ids_are_not_scaled() -> None:
    graph = uneven()
    table = weight(graph, "types.weight", 3, 64)
    first, at = next(iter(graph.nodes)), graph.inputs["position_ids"]
    with graph.inserting(after=first):
        x = ops.add(first.output, ops.embedding(ops.sub(at, at), table))
        first.output.replace_uses(x, keep=[x.producer])
    after = applied("scale-channels", graph)
    assert factors(after) and worst(graph, after) <= EXACT


def test_check_notices_wrong_factors() -> None:
    before = uneven()
    after = applied("scale-channels", before)
    ScaleChannels().check(before, after, EquivalenceCheck())
    after.params["layers.0.mlp_norm.weight"].recipe = before.params["layers.0.mlp_norm.weight"].recipe
    with pytest.raises(WeftError, match="differs"):
        ScaleChannels().check(before, after, EquivalenceCheck())


@pytest.mark.parametrize(
    ("pipeline", "sentence"),
    [
        ("scale-channels{bits=5}", "bits=5 must be one of 2, 3, 4, 8, and group=32 one of"),
        ("scale-channels{group=48}", "group=48 one of"),
        ("scale-channels{tokens=0}", "tokens=0 must be positive"),
        ("kv-cache, scale-channels", "has caches already"),
        ('scale-channels{calibration="nowhere.npy"}', "nowhere.npy"),
    ],
)
def test_refusals(pipeline: str, sentence: str) -> None:
    with pytest.raises(WeftError) as error:
        run_passes(TINY.graph(), pipeline)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_short_calibration_text_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20))
    with pytest.raises(WeftError, match=r"ids.npy has 20 tokens, but .*factors need 128 or more"):
        run_passes(TINY.graph(), f'scale-channels{{calibration="{tmp_path / "ids.npy"}"}}')


def test_graph_without_norms_is_unchanged() -> None:
    graph = Graph("none")
    graph.add_output("y", ops.relu(graph.add_input("x", TINY.graph().inputs["input_ids"].type)))
    assert str(applied("scale-channels", graph)) == str(graph)


def test_weights_that_are_not_finite_are_refused() -> None:
    graph = uneven()
    name = "layers.0.mlp.up.weight"
    graph.params[name].recipe = Scale(graph.params[name].recipe, float("nan"))
    with pytest.raises(WeftError, match=f"a weight of {name} is not finite: its channels cannot be scaled"):
        run_passes(graph, "scale-channels")


def test_even_channels_have_no_factors() -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.normal(size=(300, 64)), draw.normal(size=(48, 64))
    assert fit_channel_factors(x, [weight], build_integer_layout(4, 32, True)) is None
    x[:, 7] *= 40
    found = fit_channel_factors(x, [weight], build_integer_layout(8, 32, False))
    assert found is not None and found[7] == found.max() >= 4 * np.median(found)

    def error(x: Array, weight: Array) -> float:
        """Of the products, with both sides in 8 bits, a scale for 32 numbers."""

        def rounded(rows: Array) -> Array:
            groups = rows.reshape(len(rows), -1, 32)
            scales = np.abs(groups).max(-1, keepdims=True) / 127
            return np.reshape(np.rint(groups / scales) * scales, rows.shape)

        return float(np.square(rounded(x) @ rounded(weight).T - x @ weight.T).mean())

    assert error(x / found, weight * found) < 0.3 * error(x, weight)


def test_channels_of_zeros_have_finite_factors() -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.normal(size=(300, 64)), draw.normal(size=(48, 64))
    x[:, 3], weight[:, 5] = 0, 0
    x[:, 7] *= 40
    found = fit_channel_factors(x, [weight, 3 * weight], build_integer_layout(8, 32, False))
    assert found is not None and np.isfinite(found).all() and found.min() > 0
    assert fit_channel_factors(np.zeros((5, 64)), [weight], build_integer_layout(8, 32, False)) is None
