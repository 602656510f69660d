"""extend-context: frequencies and tables, its refusals, and errors that its check notices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft import (
    MLA,
    ALiBi,
    Attention,
    LearnedPositions,
    Sinusoidal,
)
from weft.ir import Graph, WeftError, ops
from weft.ir.recipes import Literal
from weft.ir.recipes.frequencies import Interpolate, RopeFrequencies, Sinusoid, compute_yarn_amplitude
from weft.passes import Trace, parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

from ...models import applied
from ...positioned import ROPE, decoder, recipes, rotary
from ...rewrites import Rewrite, rewrites

METHODS = [
    "extend-context{method=pi, factor=3}",
    "extend-context{method=ntk, factor=2.5}",
    "extend-context{method=yarn, factor=4}",
    "extend-context{method=yarn, factor=4, beta_fast=2, beta_slow=0.2, truncate=false}",
    "extend-context{method=llama3, factor=8}",
    "extend-context{method=llama3, factor=8, original=40, low_freq=0.5, high_freq=6}",
]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("text", METHODS)
def test_methods_set_the_published_frequencies(text: str) -> None:
    for before in (rotary(), rotary(fraction=0.5, interleaved=True), decoder(MLA(2, 8, 6, 4, 6, ROPE), context=12)):
        if "ntk" in text and recipes(before)[0].dim < 4:
            continue
        after = run_passes(before, f"pack-qkv, {text}", verify=True)
        factor = recipes(after)[0].factor
        assert len(recipes(after)) == 1 and after.meta["context"] == int((40 if "40" in text else 12) * factor)
        assert str(run_passes(after, text)) == str(after)
        equivalence = EquivalenceCheck()
        inputs = equivalence.make_inputs(before)
        assert (
            measure_difference(equivalence.run(before, inputs)["logits"], equivalence.run(after, inputs)["logits"])
            > 1e-4
        )
    run_passes(after, "kv-cache", verify="yarn" in text)


def test_the_temperature_of_yarn() -> None:
    after = run_passes(rotary(), METHODS[2])
    assert {n.attrs["amplitude"] for n in after.nodes if n.op is ops.rope} == {compute_yarn_amplitude(4.0)}


def test_some_layers() -> None:
    after = run_passes(rotary(), "extend-context{method=pi, factor=2, layers=-1}", verify=True)
    assert [r.scaling for r in recipes(after)] == ["none", "linear"]
    g = rotary()
    shared = next(n for n in g.nodes if n.op is ops.rope)
    for node in [n for n in g.nodes if n.op is ops.attention]:
        node.set_input(0, shared.output)
    trace = Trace()
    applied("dce, extend-context{method=pi, factor=2, layers=1}", g, trace)
    assert [str(r) for r in trace.refusals] == [
        f"extend-context: left %{shared.output.name} alone: layers that are not selected also use it"
    ]


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("factor", [2.0, 2.5])
def test_a_table_is_interpolated(offset: int, factor: float) -> None:
    before = decoder(positions=LearnedPositions(6, offset))
    after = run_passes(before, f"extend-context{{method=pi, factor={factor}}}", verify=True)
    (name,) = (n for n in after.params if "position" in n)
    old, new = (g.params[name].recipe.evaluate(g.reader) for g in (before, after))
    assert (after.meta["context"], after.meta["max_positions"]) == (int(6 * factor),) * 2
    assert new.shape == after.params[name].shape == (offset + int(6 * factor), 16)
    np.testing.assert_array_equal(new[: offset + 1], old[: offset + 1])
    np.testing.assert_array_equal(new[offset + int(factor * 2)], old[offset + 2])
    np.testing.assert_allclose(new[offset + 1], old[offset] + (old[offset + 1] - old[offset]) / factor, rtol=1e-5)
    np.testing.assert_array_equal(new[-1], old[-1])
    assert str(run_passes(after, f"extend-context{{method=pi, factor={factor}}}")) == str(after)


def test_sinusoids_stay_exact() -> None:
    after = run_passes(decoder(positions=Sinusoidal(6)), "extend-context{method=pi, factor=2}", verify=True)
    (table,) = (p for p in after.params.values() if isinstance(p.recipe, Sinusoid))
    assert table.recipe == Sinusoid(12, 16, factor=2.0)
    np.testing.assert_allclose(table.recipe.evaluate(after.reader)[3, :2], [np.sin(1.5), np.cos(1.5)], rtol=1e-6)


def test_interpolate_reads_any_rows() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    recipe = Interpolate(Literal.from_array(rows), 12, 2.5)
    whole = recipe.evaluate(Graph().reader)
    for start, stop in ((0, 12), (3, 4), (2, 9), (10, 12)):
        np.testing.assert_array_equal(recipe.read(Graph().reader, start, stop), whole[start:stop])
    want = np.stack([np.interp(np.arange(12) / 2.5, np.arange(5), column) for column in rows.T], 1)
    np.testing.assert_allclose(whole, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(WeftError, match=r"factor=0\.0 must be above 0"):
        Interpolate(Literal.from_array(rows), 12, 0.0).shape(Graph().reader)


def computed_frequencies() -> Graph:
    g = rotary()
    for rope in [n for n in g.nodes if n.op is ops.rope]:
        with g.inserting(before=rope):
            rope.set_input(2, ops.affine(rope.inputs[2], by=2.0))
    return g


@pytest.mark.parametrize(
    ("graph", "text", "message"),
    [
        (rotary(), "extend-context{method=pi, factor=0.5}", "extend-context: factor=0.5 must be from 1 to 1e\\+06"),
        (rotary(), "extend-context{method=pi, factor=1e300}", "extend-context: factor=1e\\+300 must be from 1 to"),
        (decoder(), METHODS[0], "graph decoder has no positions to extend \\(no rotations, no table\\)"),
        (decoder(Attention(2, bias=ALiBi())), METHODS[0], "no positions to extend \\(no rotations, no table\\)"),
        (decoder(Attention(2, rope=ROPE)), METHODS[2], "yarn needs original=, the context length before scaling"),
        (rotary(), f"{METHODS[0]}, {METHODS[1]}", "its frequencies are already scaled \\(linear, factor 3\\)"),
        (rotary(scaling="dynamic", factor=2, original=9), METHODS[0], "are scaled by dynamic, which is not supported"),
        (computed_frequencies(), METHODS[0], "its frequencies are computed"),
        (decoder(positions=LearnedPositions(6)), METHODS[1], "a table of positions can only be interpolated"),
        (
            decoder(positions=LearnedPositions(6)),
            f"{METHODS[0]}, extend-context{{method=pi, factor=2}}",
            "the table %positions.weight are already interpolated, factor 3",
        ),
        (rotary(), f"kv-cache, {METHODS[0]}", "graph decoder has caches already; run extend-context before kv-cache"),
        (rotary(), "extend-context{method=pi, factor=2, layers=5}", "there is no layer 5"),
        (rotary(dim=2), METHODS[1], "ntk needs at least two pairs, and heads have 1"),
    ],
)  # fmt: skip
def test_extend_refuses(graph: Graph, text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        run_passes(graph, text)


@pytest.mark.parametrize("text", METHODS)
def test_wrong_frequencies_are_caught(text: str) -> None:
    before = rotary()
    (one,) = parse_pipeline(text).passes
    after = applied(text, before)
    param = next(p for p in after.params.values() if isinstance(p.recipe, RopeFrequencies))
    param.recipe = replace(param.recipe, factor=param.recipe.factor * 1.01)
    with pytest.raises(WeftError, match=r"frequencies %rope\.frequencies must be those of .* but differ by"):
        one.check(before, after, EquivalenceCheck())


def test_a_wrong_table_is_caught() -> None:
    (one,) = parse_pipeline("extend-context{method=pi, factor=2}").passes
    for positions, wrong in ((LearnedPositions(6), {"factor": 2.01}), (Sinusoidal(6), {"base": 9_000.0})):
        before = decoder(positions=positions)
        after = applied(str(one), before)
        param = next(p for p in after.params.values() if isinstance(p.recipe, Interpolate | Sinusoid))
        param.recipe = replace(param.recipe, **wrong)
        with pytest.raises(WeftError, match=r"output logits differs by|must contain sinusoids"):
            one.check(before, after, EquivalenceCheck())
