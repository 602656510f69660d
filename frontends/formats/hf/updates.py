"""Functions that build recipes of weights with an adapter's update."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.recipes import Concat, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.matrices import MatMul
from weft.ir.recipes.recipe import Recipe

from .adapter import Adapter, Tokens, Update


def scale_by(recipe: Recipe, factor: float) -> Recipe:
    """Return the recipe of `factor` times the result of `recipe`; `recipe` itself if `factor` is 1."""
    return recipe if factor == 1 else Scale(recipe, factor)


def transpose_matrix(recipe: Recipe) -> Recipe:
    """Return the recipe of the transposed result of `recipe`, a matrix."""
    return Permute(recipe, (1, 0))


def find_transposed_keys(recipe: Recipe, flipped: bool = False) -> Iterator[str]:
    """Yield the keys of weights that `recipe` reads transposed, because they are stored [in, out] (Conv1D). `flipped`:
    whether the caller also transposes the result of `recipe`."""
    if isinstance(recipe, Source) and flipped:
        yield recipe.key
    if isinstance(recipe, Permute) and recipe.axes in ((1, 0), (0, 2, 1)):
        flipped = not flipped
    for part in recipe.parts:
        yield from find_transposed_keys(part, flipped)


def stack_expert_updates(update: Update, adapter: Adapter, transpose: bool) -> Recipe:
    """Return the recipe of `update` for a stack of experts: [experts, out, in], or [experts, in, out] if `transpose`.

    Factor A [experts · rank, in] has the experts one after another; in factor B [out, rank · experts] experts are the
    inner index.
    """
    (ranks, width), (height, _) = adapter.reader.shape(update.down), adapter.reader.shape(update.up)
    experts, down, up = ranks // update.rank, adapter.tensor(update.down), adapter.tensor(update.up)
    items = []
    for i in range(experts):
        a = Slice(down, 0, i * update.rank, (i + 1) * update.rank)
        b = Slice(up, 1, i, ranks, experts)
        product = MatMul(transpose_matrix(a), transpose_matrix(b)) if transpose else MatMul(b, a)
        items.append(Reshape(product, (1, width, height) if transpose else (1, height, width)))
    return scale_by(Concat(tuple(items)), update.scale)


def replace_rows(table: Recipe, count: int, tokens: Tokens, rows: Recipe) -> Recipe:
    """Return the recipe of `table` [count, width] in which row `tokens.indices[i]` is row i of `rows`, for all i."""
    order = sorted(range(len(tokens.indices)), key=tokens.indices.__getitem__)
    items: list[Recipe] = []
    n_done = 0
    while order:
        first = tokens.indices[order[0]]
        run = [i for at, i in enumerate(order) if tokens.indices[i] == first + at]
        order = order[len(run) :]
        if first > n_done:
            items.append(Slice(table, 0, n_done, first))
        items.append(Take(rows, tuple(run)))
        n_done = first + len(run)
    if n_done < count:
        items.append(Slice(table, 0, n_done, count))
    return Concat(tuple(items)) if len(items) > 1 else items[0]
