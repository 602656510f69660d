"""Recipes read backwards: every tensor comes back as it was, or one sentence says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.frontends.export import inversion
from weft.frontends.export.inversion import ShapedRecipe, invert_recipes, undo_recipe
from weft.ir import Graph, MemoryReader, Recipe, TensorType, WeftError
from weft.ir.recipes import Add, Cast, Concat, Full, Map, MeanPool, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes import combinators as r
from weft.ir.types import dtypes

RNG = np.random.default_rng(3)
TENSORS = {
    "a": RNG.standard_normal((12, 5)).astype(np.float32),
    "b": RNG.standard_normal((8, 5)).astype(np.float32),
    "t": RNG.standard_normal((6, 4, 3)).astype(np.float32),
    "v": RNG.standard_normal(12).astype(np.float32),
    "s": np.array(3.5, np.float32),
}
ARCHIVE = MemoryReader(TENSORS)
a, b, t, v, s = map(r.Source, "abtvs")


def graph_of(params: Mapping[str, r.Recipe]) -> Graph:
    graph = Graph()
    graph.reader = ARCHIVE
    for name, recipe in params.items():
        graph.add_param(name, TensorType(dtypes.f32, recipe.shape(ARCHIVE)), recipe)
    return graph


EXACT: dict[str, dict[str, r.Recipe]] = {
    "itself": {"w": a},
    "scalar": {"w": r.Reshape(s, (1, 1))},
    "tied": {"w": a, "head": a},
    "tied in another order": {"w": a, "head": r.Permute(a, (1, 0))},
    "packed": {"q": r.Slice(a, 0, 0, 6), "k": r.Slice(a, 0, 6, 9), "v": r.Slice(a, 0, 9, 12)},
    "overlapping": {"w": r.Slice(a, 0, 0, 9), "x": r.Slice(a, 0, 4, 12)},
    "interleaved": {"gate": r.Slice(a, 0, 0, 12, 2), "up": r.Slice(a, 0, 1, 12, 2)},
    "packed columns": {"k": r.Permute(r.Slice(a, 1, 0, 2), (1, 0)), "v": r.Permute(r.Slice(a, 1, 2, 5), (1, 0))},
    "stacked": {"w": r.Concat((r.Reshape(a, (1, 12, 5)), r.Reshape(r.Concat((b, r.Slice(a, 0, 0, 4))), (1, 12, 5))))},
    "beside": {"w": r.Concat((t, r.Slice(t, 1, 0, 2)), 1)},
    "split heads": {"w": r.Permute(r.Reshape(a, (3, 2, 2, 5)), (0, 2, 1, 3))},
    "rows shuffled": {"w": r.Take(v, (3, 1, 2, 0, 7, 6, 5, 4, 8, 11, 9, 10))},
    "rows repeated": {"w": r.Take(a, tuple(range(12)) * 2)},
    "columns shuffled": {"w": r.Take(b, (4, 2, 0, 1, 3), 1)},
    "a repeated part of a part": {"w": r.Slice(r.Take(v, tuple(range(12)) * 2), 0, 7, 19)},
    "beside a constant": {"w": r.Concat((b, r.Full(1.0, (4, 5))))},
    "doubled": {"w": r.Scale(a, -2)},
    "negative": {"w": r.Map(v, "neg")},
    "stored in fewer bits": {"w": r.Cast(s, "bf16")},
}


@pytest.mark.parametrize("params", EXACT.values(), ids=EXACT)
def test_moved_elements_are_restored_bit_for_bit(params: dict[str, r.Recipe]) -> None:
    graph = graph_of(params)
    found = dict(inversion.restore_tensors(graph))
    assert list(found) == [key for group in inversion.group_params(graph) for key in group.keys]
    assert set(found) == {key for recipe in params.values() for key in recipe.sources()}
    for key, values in found.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, TENSORS[key])


def test_integers_are_restored_exactly() -> None:
    """Also those that float32 has not: codes of weights are packed into words."""
    words = RNG.integers(-(2**31), 2**31, (12, 5)).astype(np.int32)
    reader = MemoryReader({"a": words, "b": words[:8]})
    recipe = r.Permute(r.Concat((r.Take(r.Slice(a, 0, 2, 12), (3, 1, 2, 0, 5, 4)), r.Reshape(b, (8, 5)))), (1, 0))
    pieces = {key: (values, known) for key, values, known in undo_recipe(recipe, recipe.evaluate(reader), reader)}
    values, known = pieces["a"]
    assert values.dtype == np.int32 and known[:, 0].tolist() == [False] * 2 + [True] * 6 + [False] * 4
    np.testing.assert_array_equal(values[known], words[known])
    np.testing.assert_array_equal(pieces["b"][0], words[:8])


ELEMENTWISE = [
    r.Add((a,), 1.0),
    r.Scale(a, 0.3),
    r.Map(r.Map(a, "exp"), "neg"),
    r.Map(a, "exp"),
    r.Map(a, "reciprocal"),
    r.Map(r.Map(a, "exp"), "log"),
    r.Slice(r.Map(r.Take(a, (*range(12), 0)), "exp"), 0, 1, 13),
]


@pytest.mark.parametrize("recipe", ELEMENTWISE)
def test_elementwise_steps_are_restored_up_to_rounding(recipe: r.Recipe) -> None:
    """Tensors come back to rounding, and what is made of them is what was there."""
    ((_, values),) = inversion.restore_tensors(graph_of({"w": recipe}))
    np.testing.assert_allclose(values, TENSORS["a"], rtol=3e-7, atol=3e-7)
    again = recipe.evaluate(MemoryReader({"a": values}))
    np.testing.assert_allclose(again, recipe.evaluate(ARCHIVE), rtol=3e-7, atol=3e-7)


def test_one_plus_weight_gives_the_same_sum() -> None:
    """1 + w, as RMSNorm of some families has it: the restored w gives the same sum, bit for bit."""
    recipe = r.Add((v,), 1.0)
    ((_, values),) = inversion.restore_tensors(graph_of({"w": recipe}))
    assert not np.array_equal(values, TENSORS["v"])
    np.testing.assert_array_equal(recipe.evaluate(MemoryReader({"v": values})), recipe.evaluate(ARCHIVE))


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        (r.Add((a, r.Reshape(r.Take(t, (2,) * 5), (12, 5)))), "t"),
        (r.Scale(a, r.Map(v, "exp")), "v"),
        (r.Scale(a, r.Slice(v, 0, 2, 7), 1), "v"),
    ],
)
def test_first_term_or_factor_takes_a_change(recipe: r.Recipe, kept: str) -> None:
    """Terms and factors stay as they are stored, rows too that are not read."""
    graph = graph_of({"w": recipe})
    other = RNG.standard_normal((12, 5)).astype(np.float32)
    found = dict(inversion.restore_tensors(graph, params={"w": other}))
    np.testing.assert_array_equal(found[kept], TENSORS[kept])
    again = graph.params["w"].recipe.evaluate(MemoryReader(found))
    np.testing.assert_allclose(again, other, rtol=3e-7, atol=3e-7)


@given(st.data())
def test_random_movements_are_undone(data: st.DataObject) -> None:
    whole: r.Recipe = data.draw(st.sampled_from([a, b, r.Reshape(t, (9, 8)), r.Reshape(v, (3, 4))]))
    pieces = [whole]
    for _ in range(data.draw(st.integers(1, 5))):
        piece = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        rows, columns = piece.shape(ARCHIVE)
        step = data.draw(st.sampled_from(["permute", "reshape", "take", "cut", "deal", "repeat"]))
        if step == "permute":
            pieces.append(r.Permute(piece, (1, 0)))
        elif step == "reshape":
            pieces.append(r.Reshape(piece, (columns, rows)))
        elif step == "take":
            pieces.append(r.Take(piece, tuple(data.draw(st.permutations(range(columns)))), 1))
        elif step == "repeat":
            pieces.append(r.Concat((piece, r.Slice(piece, 0, 0, max(1, rows // 2)))))
        elif rows > 1:
            at = data.draw(st.integers(1, rows - 1))
            cuts = ((0, at, 1), (at, rows, 1)) if step == "cut" else ((0, rows, 2), (1, rows, 2))
            pieces += [r.Slice(piece, 0, *cut) for cut in cuts]
        else:
            pieces.append(piece)
    ((key, values),) = inversion.restore_tensors(graph_of({f"w{i}": piece for i, piece in enumerate(pieces)}))
    np.testing.assert_array_equal(values, TENSORS[key])


def test_given_values_replace_the_recipes() -> None:
    graph = graph_of({"q": r.Slice(a, 0, 0, 6), "k": r.Slice(a, 0, 6, 12), "other": b})
    k = RNG.standard_normal((6, 5))
    found = dict(inversion.restore_tensors(graph, params={"k": k}))
    np.testing.assert_array_equal(found["a"], np.concatenate([TENSORS["a"][:6], k.astype(np.float32)]))
    np.testing.assert_array_equal(found["b"], TENSORS["b"])


def test_groups_contain_parameters_that_share_tensors() -> None:
    graph = graph_of({"x": b, "y": r.Concat((a, b)), "free": r.Full(1.0, (3,)), "z": t, "u": r.Slice(t, 0, 0, 2)})
    assert inversion.group_params(graph) == [(("x", "y"), ("b", "a")), (("z", "u"), ("t",))]


REFUSED: dict[str, tuple[dict[str, r.Recipe], dict[str, np.ndarray]]] = {
    "parameter w: tensor a cannot be restored: mean_pool has no inverse": ({"w": r.MeanPool(a, 6, 2)}, {}),
    "parameter w: tensor a cannot be restored: scale has no inverse": ({"w": r.Scale(a, 0)}, {}),
    "parameter w: tensor a cannot be restored: add has no inverse": ({"w": r.Add((a, a))}, {}),
    "parameter w: tensor v cannot be restored: map has no inverse": ({"w": r.Reshape(r.Map(v, "sin"), (3, 4))}, {}),
    "'a' cannot be restored: no parameter reads 20 of its 60 elements": ({"w": r.Slice(a, 0, 0, 8)}, {}),
    "parameter head: parameters that share elements of tensor 'a' have different values: make them equal": (
        {"embed": a, "head": a}, {"head": TENSORS["a"] + 1}
    ),
    "parameter w: parameters that share elements of tensor": ({"w": r.Take(v, (0, 0))}, {"w": np.array([1.0, 2.0])}),
    "graph model has no parameter 'x'": ({"w": a}, {"x": TENSORS["a"]}),
    "parameter w has shape [12, 5], but its value [5, 12]": ({"w": a}, {"w": TENSORS["a"].T}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "case"), REFUSED.items(), ids=REFUSED)
def test_tensors_that_cannot_be_restored_are_refused(
    message: str, case: tuple[dict[str, r.Recipe], dict[str, np.ndarray]]
) -> None:
    graph = graph_of(case[0])
    with pytest.raises(WeftError) as e:
        list(inversion.restore_tensors(graph, params=case[1]))
    assert str(e.value).startswith(message)


# -- recipes over parameters

S = Source("stored")


READ: dict[str, tuple[tuple[int, ...], list[Recipe]]] = {
    "as it is": ((6, 4), [S]),
    "turned": ((6, 4), [Permute(S, (1, 0))]),
    "rows of three": ((6, 4), [Slice(S, 0, 0, 2), Slice(S, 0, 2, 3), Slice(S, 0, 3, 6)]),
    "columns of one that is turned": ((6, 4), [Slice(Permute(S, (1, 0)), 0, 0, 3), Slice(Permute(S, (1, 0)), 0, 3, 4)]),
    "grouped": (
        (6, 4),
        [
            Reshape(Slice(Reshape(S, (2, 3, -1)), 1, 0, 1), (2, -1)),
            Reshape(Slice(Reshape(S, (2, 3, -1)), 1, 1, 3), (4, -1)),
        ],
    ),
    "pairs apart": ((8, 3), [Reshape(Permute(Reshape(S, (2, 2, 2, -1)), (0, 2, 1, 3)), (8, -1))]),
    "every other": ((6, 4), [Slice(S, 0, 0, 6, 2), Slice(S, 0, 1, 6, 2)]),
    "every other column": ((3, 6), [Slice(S, 1, 0, 6, 2), Slice(S, 1, 1, 6, 2)]),
    "shuffled": ((4, 2), [Take(S, (2, 0, 3, 1))]),
    "shifted": ((4,), [Add((S,), 1.0)]),
    "scaled": ((4,), [Scale(S, -0.5)]),
    "of a logarithm": ((4,), [Map(Map(S, "exp"), "neg")]),
    "rounded before": ((4,), [Cast(S, "f32")]),
}


@pytest.mark.parametrize("name", READ)
def test_inverted_recipes_restore_the_stored_tensor(name: str, rng: np.random.Generator) -> None:
    """A recipe reads from the restored tensor what it read from the original, whatever the tensor."""
    shape, recipes = READ[name]
    stored = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    reader = MemoryReader({"stored": stored})
    values = {f"v{i}": recipe.evaluate(reader) for i, recipe in enumerate(recipes)}
    wanted = [(r, ShapedRecipe(Source(n), v.shape)) for r, (n, v) in zip(recipes, values.items(), strict=True)]
    found = invert_recipes(wanted)["stored"]
    got = found.recipe.evaluate(MemoryReader(values))
    assert (found.shape, got.shape) == (shape, shape)
    np.testing.assert_allclose(got, stored, rtol=1e-6)
    if not any(recipe.has(Add, Scale, Map) for recipe in recipes):
        assert np.array_equal(got, stored)


def test_inverted_recipes_split_concatenated_tensors(rng: np.random.Generator) -> None:
    heads = [rng.standard_normal(3) for _ in range(2)]
    recipes = Concat((Source("head.0"), Source("head.1"))), Reshape(Source("flat"), (-1,))
    values = {"a": np.concatenate(heads), "b": rng.standard_normal(6)}
    wanted = [(r, ShapedRecipe(Source(n), (6,))) for r, n in zip(recipes, values, strict=True)]
    found = invert_recipes(wanted, lambda key, count: (2, 3) if key == "flat" else None)
    reader = MemoryReader(values)
    assert [found[f"head.{i}"].recipe.evaluate(reader).tolist() for i in range(2)] == [h.tolist() for h in heads]
    assert np.array_equal(found["flat"].recipe.evaluate(reader), values["b"].reshape(2, 3))


STORED = {"a": (5, 3), "b": (2, 3), "taps": (7, 1, 4), "by": (7,)}


@pytest.mark.parametrize(
    "recipe",
    [
        Concat((Source("a"), Source("b"))),
        Reshape(Source("taps"), (7, -1)),
        Add((Concat((Source("a"), Source("b"))), Reshape(Slice(Source("taps"), 2, 0, 3), (7, 3)))),
        Scale(Concat((Source("a"), Source("b"))), Source("by")),
    ],
    ids=["of several lengths", "of a known rank", "with other terms", "with factors"],
)
def test_inverted_recipes_keep_known_shapes_and_other_terms(recipe: Recipe, rng: np.random.Generator) -> None:
    """Parts have the lengths they have; terms and factors beside what takes the change stay as they are stored."""
    tensors = {key: rng.uniform(0.5, 1.5, shape) for key, shape in STORED.items() if key in recipe.sources()}
    value = rng.standard_normal(recipe.shape(MemoryReader(tensors)))
    found = invert_recipes([(recipe, ShapedRecipe(Source("value"), value.shape))], shapes=STORED)
    reader = MemoryReader(tensors | {"value": value})
    made = {key: tensor.recipe.evaluate(reader) for key, tensor in found.items()}
    assert {key: array.shape for key, array in made.items()} == {key: array.shape for key, array in tensors.items()}
    np.testing.assert_allclose(recipe.evaluate(MemoryReader(made)), value, rtol=1e-6, atol=1e-6)


def test_concatenated_tensors_of_unknown_sizes_are_refused() -> None:
    with pytest.raises(WeftError, match="cannot split a parameter into a, b: their sizes are unknown"):
        invert_recipes([(Concat((Source("a"), Source("b"))), ShapedRecipe(Source("value"), (7, 3)))])


def test_equal_offsets_cancel_without_rounding() -> None:
    """1 + (w − 1) is not w in f32: from a family that adds 1 to one that does, the tensor stays what it is."""
    (found,) = invert_recipes([(Add((S,), 1.0), ShapedRecipe(Add((Source("theirs"),), 1.0), (4,)))]).values()
    assert found.recipe == Source("theirs")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([(MeanPool(S, 4, 2), (4, 2))], "tensor stored cannot be restored: mean_pool has no inverse"),
        ([(Slice(S, 0, 1, 3), (2, 2))], "tensor stored cannot be restored: its slices leave gaps"),
        ([(Slice(S, 0, 0, 4, 2), (2, 2))], "tensor stored cannot be restored: its slices leave gaps"),
        ([(S, (2, 2)), (S, (2, 2))], "parameters that share tensor 'stored' have different values"),
    ],
)
def test_recipes_without_inverse_are_refused(wanted: list[Any], told: str) -> None:
    pairs = [(recipe, ShapedRecipe(Full(float(i), shape), shape)) for i, (recipe, shape) in enumerate(wanted)]
    with pytest.raises(WeftError, match=told):
        invert_recipes(pairs)
