"""fold-constants: ops on weights become recipes, small constants are computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft.ir import Recipe, TensorType, Value, ops, parse
from weft.ir.recipes import Full, Literal, Map, Source
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT

from ...models import Tiny, applied, weight, worst
from ...rewrites import Rewrite, rewrites
from .inputs import N, graph

FOLDED: list[tuple[str, Callable[[Value, Value], Value], str]] = [
    ("transpose", lambda w, v: ops.transpose(w, axes=(1, 0)), 'permute(source("w"), axes=[1, 0])'),
    ("noop", lambda w, v: ops.transpose(w, axes=(0, 1)), 'source("w")'),
    ("reshape", lambda w, v: ops.reshape(w, shape=(4, 12)), 'reshape(source("w"), dims=[4, 12])'),
    ("unsqueeze", lambda w, v: ops.unsqueeze(w, axes=(1,)), 'reshape(source("w"), dims=[6, 1, 8])'),
    (
        "slice",
        lambda w, v: ops.slice_(w, axis=-1, start=1, stop=8, step=3),
        'slice(source("w"), axis=1, start=1, stop=8, step=3)',
    ),
    (
        "split",
        lambda w, v: ops.split.emit(w, sizes=(2, 4), axis=0)[1],
        'slice(source("w"), axis=0, start=2, stop=6)',
    ),
    ("concat", lambda w, v: ops.concat(w, v, axis=0), 'concat([source("w"), source("v")])'),
    (
        "affine",
        lambda w, v: ops.affine(w, by=0.3, plus=-0.7),
        'add([scale(source("w"), factor=0.3)], offset=-0.7)',
    ),
    ("add", lambda w, v: ops.add(w, v), 'add([source("w"), source("v")])'),
    ("sub", lambda w, v: ops.sub(w, v), 'add([source("w"), scale(source("v"), factor=-1.0)])'),
    ("exp", lambda w, v: ops.neg(ops.exp(w)), 'map(map(source("w"), fn="exp"), fn="neg")'),
    (
        "rows",
        lambda w, v: ops.gather(w, w.graph.add_param("i", TensorType(dtypes.i64, (3,)), Literal((5, 0, 5), (3,)))),
        'take(source("w"), indices=[5, 0, 5])',
    ),
]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(("build", "recipe"), [f[1:] for f in FOLDED], ids=[f[0] for f in FOLDED])
def test_weights_change_by_recipe(build: Callable[[Value, Value], Value], recipe: str) -> None:
    g, x = graph("w", "v")
    w, v = (weight(g, k, 6, 8, recipe=Source(k)) for k in "wv")
    g.add_output("folded", build(w, v))
    g.add_output("tied", ops.linear(x, w))
    after = applied("fold-constants", g)
    assert [n.op.name for n in after.nodes] == ["linear"]
    folded = after.outputs["folded"]
    assert spell_recipe(after.params[folded.name].recipe) == recipe
    assert after.params["w"].recipe == Source("w")
    assert worst(g, after) <= EXACT


@pytest.mark.parametrize("shape", [(8,), (1, 8), (6, 1), (1, 1)])
def test_scaling_by_a_vector(shape: tuple[int, ...]) -> None:
    g, _ = graph()
    g.add_output("y", ops.mul(weight(g, "scale", *shape), weight(g, "w", 6, 8)))
    after = applied("fold-constants", g)
    assert len(after) == (shape == (1, 1))
    assert worst(g, after) <= EXACT


def test_small_constants_are_computed_and_weights_are_not() -> None:
    g, x = graph()
    frequencies = weight(g, "f", 4, recipe=RopeFrequencies(8))
    places = ops.cast(ops.iota(weight(g, "table", 7, 2), axis=0), to=dtypes.f32)
    angles = ops.mul(ops.unsqueeze(places, axes=(1,)), frequencies)
    g.add_output("cos", ops.cos(angles))
    g.add_output("grown", ops.sqrt(ops.square(weight(g, "w", 8))))
    g.add_output("long", ops.iota(weight(g, "big", 5000, 1), axis=0))
    g.add_output("row", ops.iota(x, axis=0))
    after = applied("fold-constants", g)
    assert [n.op.name for n in after.nodes] == ["square", "sqrt", "iota", "iota"]
    cos = after.params[after.outputs["cos"].name]
    assert cos.type == TensorType(dtypes.f32, (7, 4))
    assert worst(g, after) <= EXACT
    assert len(applied("fold-constants{limit=5000}", g)) == 3


def test_a_narrowing_cast_folds_and_a_widening_one_stays() -> None:
    g, _ = graph()
    w = weight(g, "w", 8)
    g.add_output("narrow", ops.cast(w, to=dtypes.f16))
    g.add_output("wide", ops.cast(g.add_param("h", w.type.with_dtype(dtypes.f16), w.recipe), to=dtypes.f32))
    after = applied("fold-constants", g)
    assert after.params["w.cast"].type.dtype == dtypes.f16
    assert [n.op.name for n in after.nodes] == ["cast"] and worst(g, after) == 0


def test_constants_meeting_activations_stay() -> None:
    g, x = graph()
    expanded = ops.expand(weight(g, "w", 8, recipe=Full(0.5, (8,))), shape=(N, 8))
    g.add_output("y", ops.add(x, expanded))
    assert len(applied("fold-constants", g)) == 2


def test_a_whole_decoder_keeps_its_meaning() -> None:
    before = Tiny(tied=True, qk_norm=True, bias="q o down").graph()
    trace = Trace()
    after = applied("dce, cse, fold-constants", before, trace)
    assert worst(before, after) == 0
    assert str(after) == str(applied("dce, cse, fold-constants", before))


def test_recipes_of_params_stay_recipes() -> None:
    """No pass may write a weight out."""
    before = Tiny().graph()
    after = applied("fold-constants, pack-qkv, pack-gate-up", before)

    def leaves(recipe: Recipe) -> list[Recipe]:
        return [leaf for part in recipe.parts for leaf in leaves(part)] if recipe.parts else [recipe]

    assert not any(isinstance(leaf, Literal) for p in after.params.values() for leaf in leaves(p.recipe))


def test_rates_fold_into_what_is_stored() -> None:
    """GGUF stores A = −e^A_log: undone, A is read as it is stored, under the name that the author gave it."""
    g, x = graph("ssm_a")
    stored = Source("ssm_a")
    a_log = g.add_param("a_log", TensorType(dtypes.f32, (6, 8)), Map(Map(stored, "neg"), "log"))
    a = ops.neg(ops.exp(a_log), name="a")
    g.add_output("y", ops.linear(x, a))
    after = run_passes(g, "fold-constants", verify=True)
    assert [(p.name, p.recipe) for p in after.params.values()] == [("a", stored)]
    assert len(after) == 1 and parse(str(after)) == after


def test_weights_that_are_trained_stay() -> None:
    g, x = graph()
    scale = ops.exp(weight(g, "w", 8))
    table = g.add_param("table", TensorType(dtypes.f32, (8,)), Literal.from_array(np.arange(8.0)))
    g.add_output("y", ops.mul(ops.mul(x, scale), ops.exp(table, name="weights")))
    after = run_passes(g, "fold-constants{weights=false}", verify=True)
    assert [n.op.name for n in after.nodes] == ["exp", "mul", "mul"] and list(after.params) == ["w", "weights"]
    assert len(run_passes(g, "fold-constants", verify=True)) == 2
