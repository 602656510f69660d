"""Recipes: slices agree with the whole, misfits are told, text round-trips."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ir import Graph, MemoryReader, TensorType, WeftError, parse
from weft.ir.recipes import combinators as r
from weft.ir.recipes import frequencies as fq
from weft.ir.recipes import matrices as mx
from weft.ir.recipes.blocks import Kept
from weft.ir.recipes.cache_scales import FittedScales, HeadScales
from weft.ir.recipes.recipe import REGISTRY
from weft.ir.recipes.spelling import spell_recipe
from weft.ir.types import dtypes

RNG = np.random.default_rng(7)
A = RNG.standard_normal((12, 5)).astype(np.float32)
B = RNG.standard_normal((8, 5)).astype(np.float32)
T = RNG.standard_normal((6, 4, 3)).astype(np.float32)
V = RNG.standard_normal(12).astype(np.float32)
ARCHIVE = MemoryReader(
    {
        "a": A,
        "b": B,
        "t": T,
        "v": V,
        "half": A.astype(np.float16),
        "ids": np.arange(9),
        "s": np.array(3.5, np.float32),
    }
)
a, b, t, v = map(r.Source, "abtv")
TABLE = fq.RopeFrequencies(8, theta=500.0)

UNIFORM = r.Uniform((300, 700), -2, 3, "w", seed=3).evaluate(ARCHIVE)

RECIPES: dict[str, tuple[r.Recipe, np.ndarray]] = {
    "source": (a, A),
    "source f16": (r.Source("half"), A.astype(np.float16).astype(np.float32)),
    "source int": (r.Source("ids"), np.arange(9)),
    "scalar": (r.Source("s"), np.array(3.5, np.float32)),
    "literal": (r.Literal.from_array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 2, 3], [4, 5, 6]])),
    "literal scalar": (r.Literal.from_array(0.25), np.array(0.25)),
    "full": (r.Full(2.5, (4, 3)), np.full((4, 3), 2.5, np.float32)),
    "sizes of heads": (
        HeadScales(a, 3, 4, (r.Slice(v, 0, 0, 5),), (v,)),
        ((A**2 @ V[:5] ** 2 + V**2).reshape(3, 4).mean(1) ** 0.5).astype(np.float32),
    ),
    "scales of a cache": (FittedScales(v), V),
    "kept blocks": (Kept(r.Slice(a, 0, 2, 11), "fp8"), A[2:11]),
    "sizes of one head": (HeadScales(r.Reshape(v, (12, 1)), 3, 12), np.full(3, (V**2).mean() ** 0.5, np.float32)),
    "sizes of zeros": (HeadScales(r.Full(0.0, (6, 2)), 2, 3), np.ones(2, np.float32)),
    "concat 0": (r.Concat((a, b, a)), np.concatenate([A, B, A])),
    "concat 1": (r.Concat((t, r.Slice(t, 1, 0, 2)), axis=1), np.concatenate([T, T[:, :2]], 1)),
    "slice 0": (r.Slice(a, 0, 2, 11, 3), A[2:11:3]),
    "slice 1": (r.Slice(t, 1, 1, 4, 2), T[:, 1:4:2]),
    "transpose": (r.Permute(a, (1, 0)), A.T),
    "permute inner": (r.Permute(t, (0, 2, 1)), T.transpose(0, 2, 1)),
    "permute": (r.Permute(t, (2, 0, 1)), T.transpose(2, 0, 1)),
    "permute mid": (r.Permute(t, (1, 2, 0)), T.transpose(1, 2, 0)),
    "reshape": (r.Reshape(t, (8, 9)), T.reshape(8, 9)),
    "reshape flat": (r.Reshape(a, (60,)), A.reshape(60)),
    "reshape up": (r.Reshape(v, (2, 3, 2)), V.reshape(2, 3, 2)),
    "reshape scalar": (r.Reshape(r.Source("s"), (1, 1)), np.full((1, 1), 3.5, np.float32)),
    "take 0": (r.Take(a, (7, 0, 0, 11)), A[[7, 0, 0, 11]]),
    "take scattered": (r.Take(a, (11, 0, 4, 11)), A[[11, 0, 4, 11]]),
    "shuffle 0": (r.Shuffle(a, 0, 2, 11, seed=5), A[[0, 1, *(2 + np.random.default_rng(5).permutation(9)), 11]]),
    "shuffle 1": (r.Shuffle(t, 1, 0, 4), T[:, np.random.default_rng(0).permutation(4)]),
    "take 1": (r.Take(t, (3, 1), axis=1), T[:, [3, 1]]),
    "scale": (r.Scale(a, 0.5), A * np.float32(0.5)),
    "scale rows": (r.Scale(a, v), A * V[:, None]),
    "scale columns": (r.Scale(a, r.Source("a5"), 1), A * np.arange(5, dtype=np.float32)),
    "add": (r.Add((a, a, r.Scale(a, -1.0))), A + A - A),
    "add offset": (r.Add((a,), 1.0), A + np.float32(1)),
    "map": (r.Map(v, "exp"), np.exp(V)),
    "inverse softplus": (r.Map(r.Map(v, "exp"), "inverse_softplus"), np.log(np.expm1(np.exp(V.astype(np.float64))))),
    "mean pool": (r.MeanPool(a, heads=6, groups=2), A.reshape(2, 3, 2, 5).mean(1).reshape(4, 5)),
    "mean pool vector": (r.MeanPool(v, heads=4, groups=2), V.reshape(2, 2, 3).mean(1).reshape(6)),
    "cast": (r.Cast(a, "bf16"), A.astype(dtypes.bf16.numpy).astype(np.float32)),
    "normal": (r.Normal((300, 700), 0.02, "w", seed=3), r.Normal((300, 700), 0.02, "w", seed=3).evaluate(ARCHIVE)),
    "uniform": (r.Uniform((300, 700), -2, 3, "w", seed=3), UNIFORM),
    "rope": (TABLE, TABLE.frequencies().astype(np.float32)),
    "rope table": (fq.RopeTable(TABLE, 9, "cos", 1.2), 1.2 * np.cos(np.outer(np.arange(9), TABLE.frequencies()))),
    "rope table of any": (fq.RopeTable(r.Full(0.5, (2,)), 5, "sin"), np.sin(np.outer(np.arange(5), [0.5, 0.5]))),
    "sinusoid": (fq.Sinusoid(9, 6), fq.Sinusoid(9, 6).evaluate(ARCHIVE)),
    "interpolate": (
        fq.Interpolate(a, 30, 2.5),
        np.stack([np.interp(np.arange(30) / 2.5, np.arange(12), column) for column in A.T], 1),
    ),
    "alibi": (fq.AlibiSlopes(6), fq.AlibiSlopes(6).evaluate(ARCHIVE)),
    "matmul": (mx.MatMul(a, r.Permute(b, (1, 0))), A @ B.T),
    "inverse": (mx.Inverse(mx.MatMul(r.Permute(a, (1, 0)), a)), np.linalg.inv(A.T @ A)),
    "inverses of a stack": (mx.Inverse(r.Slice(t, 1, 0, 3)), np.linalg.inv(T[:, :3])),
    "matmul vector": (mx.MatMul(a, r.Source("a5")), A.astype(float) @ np.arange(5)),
    "matmul stack": (mx.MatMul(t, r.Slice(a, 0, 0, 3)), T @ A[:3]),
    "centre rows": (mx.Centre(a, 0), A - A.mean(0)),
    "centre columns": (mx.Centre(a, 1), A - A.mean(1, keepdims=True)),
    "row norm": (mx.RowNorm(t, "rms", 0.1), T / np.sqrt(np.square(T).mean(-1, keepdims=True) + 0.1)),
    "row norm, weight and bias": (
        mx.RowNorm(a, "layer", 0.1, weight=r.Source("a5"), bias=r.Full(0.5, (5,))),
        (A - A.mean(1, keepdims=True)) / np.sqrt(A.var(1, keepdims=True) + 0.1) * np.arange(5) + 0.5,
    ),
    "norms of rows": (mx.Norms(a), np.linalg.norm(A, axis=1)),
    "norms of columns": (mx.Norms(a, 1), np.linalg.norm(A, axis=0)),
    "norms of a middle axis": (mx.Norms(t, 1), np.sqrt(np.square(T).sum((0, 2)))),
    "identity": (mx.Identity(5), np.eye(5)),
    "orthogonal": (mx.RandomOrthogonal(6, seed=3), mx.RandomOrthogonal(6, seed=3).evaluate(ARCHIVE)),
    "nested": (
        r.Scale(r.Permute(r.Concat((r.Slice(a, 0, 4, 12), b)), (1, 0)), r.Source("a5")),
        np.concatenate([A[4:12], B]).T * np.arange(5, dtype=np.float32)[:, None],
    ),
}  # fmt: skip
ARCHIVE.arrays["a5"] = np.arange(5, dtype=np.float32)
ALL = pytest.mark.parametrize(("recipe", "whole"), RECIPES.values(), ids=RECIPES)


@ALL
def test_evaluates(recipe: r.Recipe, whole: np.ndarray) -> None:
    found = recipe.evaluate(ARCHIVE)
    assert recipe.shape(ARCHIVE) == whole.shape == found.shape
    np.testing.assert_allclose(found, whole, rtol=2e-7, atol=1e-7)
    wide = ("literal", "centre", "row_norm", "random_orthogonal", "sinusoid")
    assert found.dtype == np.float32 or not isinstance(found.flat[0], np.floating) or recipe.name in wide


@ALL
def test_slices_and_blocks_equal_rows_of_the_full_tensor(recipe: r.Recipe, whole: np.ndarray) -> None:
    shape = recipe.shape(ARCHIVE)
    full = recipe.evaluate(ARCHIVE)
    for elements in (1, 7, 40, 10**6):
        blocks = list(recipe.blocks(ARCHIVE, elements))
        assert all(x.ndim == 0 or len(x) == 1 or x.size <= elements for x in blocks)
        np.testing.assert_array_equal(np.concatenate([x.reshape(-1) for x in blocks]), full.reshape(-1))
    for start in range(shape[0] if shape and shape[0] < 20 else 0):
        for stop in range(start + 1, shape[0] + 1):
            np.testing.assert_array_equal(recipe.read(ARCHIVE, start, stop), full[start:stop])


@pytest.mark.parametrize("size", [1, 5, 8, 24, 36])
def test_random_orthogonal_matrices_are_orthogonal_and_spread(size: int) -> None:
    q = mx.RandomOrthogonal(size, seed=1).evaluate(ARCHIVE)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-14)
    power = size & -size  # every number meets as many others as the Hadamard part has
    assert ((np.abs(q) > 1e-9).sum(1) >= power).all() and np.abs(q).max() <= 1 / np.sqrt(power) + 1e-12
    assert size == 1 or (q != mx.RandomOrthogonal(size, seed=2).evaluate(ARCHIVE)).any()


@ALL
def test_text_round_trips(recipe: r.Recipe, whole: np.ndarray) -> None:
    shape = ", ".join(map(str, recipe.shape(ARCHIVE)))
    text = f"graph g {{\n  param %w: f32[{shape}] = {spell_recipe(recipe)}\n}}\n"
    assert parse(text).params["w"].recipe == recipe
    assert str(parse(text)) == text
    assert hash(parse(text).params["w"].recipe) == hash(recipe)


def test_every_recipe_has_a_case() -> None:
    def names(recipe: r.Recipe) -> set[str]:
        return {recipe.name}.union(*map(names, recipe.parts))

    # Their tests are in the folder blocks.
    elsewhere = {
        "stored",
        "as_stored",
        "on_grid",
        "part",
        "quantize",
        "dequantize",
        "to_float8",
        "float8",
        "to_float4",
        "float4",
        "in_bytes",
    }
    assert set().union(*(names(x) for x, _ in RECIPES.values())) == set(REGISTRY) - elsewhere - {"block_recipe"}


@given(st.data())
def test_random_compositions_slice(data: st.DataObject) -> None:
    recipe: r.Recipe = data.draw(st.sampled_from([a, b, r.Permute(a, (1, 0)), r.Reshape(t, (9, 8))]))
    for _ in range(data.draw(st.integers(1, 4))):
        rows, columns = recipe.shape(ARCHIVE)
        start = data.draw(st.integers(0, rows - 1))
        indices = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))
        recipe = data.draw(
            st.sampled_from(
                [
                    r.Permute(recipe, (1, 0)),
                    r.Slice(recipe, 0, start, rows, 2),
                    r.Slice(recipe, 1, columns // 2, columns),
                    r.Take(recipe, tuple(indices)),
                    r.Concat((recipe, recipe), 1),
                    r.Concat((recipe, r.Scale(recipe, 2.0))),
                    r.Reshape(recipe, (columns, rows)),
                    r.Add((recipe, recipe), 0.5),
                ]
            )
        )
    whole = recipe.evaluate(ARCHIVE)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    np.testing.assert_array_equal(recipe.read(ARCHIVE, start, stop), whole[start:stop])


def test_normal_streams_are_independent() -> None:
    def draw(**changes: object) -> np.ndarray:
        settings: dict[str, object] = {"dims": (64, 64), "std": 1.0, "stream": "x", "seed": 0, **changes}
        return r.Normal(**settings).evaluate(ARCHIVE).reshape(-1)  # type: ignore[arg-type]  # keywords by name

    base = draw()
    np.testing.assert_array_equal(base, draw())
    for other in (draw(stream="y"), draw(seed=1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(base.size)
    rows = draw(dims=(200_000, 2)).reshape(-1, 2)  # several generators: neither repeats the other
    assert len(np.unique(rows[:, 0])) > 0.99 * len(rows)
    assert abs(base.mean()) < 5 / np.sqrt(base.size)
    assert abs(base.std() - 1) < 5 / np.sqrt(base.size)
    np.testing.assert_allclose(draw(std=0.5, mean=2.0), base * np.float32(0.5) + 2, rtol=1e-6)


def test_uniform_numbers_fill_their_range() -> None:
    assert UNIFORM.dtype == np.float32 and -2 <= UNIFORM.min() < -1.99 < 2.99 < UNIFORM.max() <= 3
    assert abs(UNIFORM.mean() - 0.5) < 0.02 and len(np.unique(UNIFORM[:, 0])) > 0.99 * len(UNIFORM)


def test_sources_are_listed_in_order_of_use() -> None:
    assert list(r.Concat((a, r.Scale(b, v), a)).sources()) == ["a", "b", "v", "a"]
    assert list(r.Full(0.0, (2,)).sources()) == []


MISFITS = {
    "<memory> has no tensor 'z'": r.Source("z"),
    "a literal of shape [2, 2] has 3 values, not 4": r.Literal((1, 2, 3), (2, 2)),
    "cannot concatenate a [12, 5] and t [6, 4, 3] along axis 0: the other axes differ": r.Concat((a, t)),
    "cannot take 3:13 along axis 0 of a [12, 5]": r.Slice(a, 0, 3, 13),
    "cannot take 0:1 along axis 2 of a [12, 5]": r.Slice(a, 2, 0, 1),
    "axes [0, 0] are not a permutation of the axes of a [12, 5]": r.Permute(a, (0, 0)),
    "cannot reshape a [12, 5] to [7, 9]: element counts differ": r.Reshape(a, (7, 9)),
    "cannot take indices beyond axis 0 of a [12, 5]": r.Take(a, (12,)),
    "cannot scale axis 1 of a [12, 5] by v [12]": r.Scale(a, v, 1),
    "cannot add a [12, 5] and b [8, 5]: shapes differ": r.Add((a, b)),
    "unknown function 'sqrt' in a map recipe; known are neg, exp": r.Map(a, "sqrt"),
    "cannot pool 5 heads of a [12, 5] into 1 groups": r.MeanPool(a, 5, 1),
    "cannot pool 6 heads of a [12, 5] into 4 groups": r.MeanPool(a, 6, 4),
    "cannot take norms along axis 2 of a [12, 5]": mx.Norms(a, 2),
    "RoPE rotates pairs: dimension 7 must be even and positive": fq.RopeFrequencies(7),
    "longrope needs 4 factors for dimension 8, has 2": fq.RopeFrequencies(8, scaling="longrope", factors=(1.0, 2.0)),
    "unknown RoPE scaling 'magic'; known are none, linear": fq.RopeFrequencies(8, scaling="magic"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "recipe"), MISFITS.items(), ids=lambda x: getattr(x, "name", ""))
def test_shapes_that_do_not_fit_are_refused(message: str, recipe: r.Recipe) -> None:
    with pytest.raises(WeftError) as e:
        recipe.evaluate(ARCHIVE)
    assert str(e.value).startswith(message)


def test_params_take_recipes_of_strings() -> None:
    graph = Graph()
    graph.add_param("w", TensorType(dtypes.f32, (12, 5)), r.Source('odd "key"\\ ünïcode'))
    assert json.dumps('odd "key"\\ ünïcode') in str(graph)
    assert parse(str(graph)) == graph
