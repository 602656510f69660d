"""Recipes of weights that adapters have updated."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.recipes import Concat, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.matrices import MatMul
from weft.ir.recipes.recipe import Recipe

from .adapter import Adapter, Tokens, Update


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """Return `factor` times `recipe`."""
    return recipe if factor == 1 else Scale(recipe, factor)


def transposed(recipe: Recipe) -> Recipe:
    """Return the matrix of `recipe` with its axes swapped."""
    return Permute(recipe, (1, 0))


def transposed_keys(recipe: Recipe, flipped: bool = False) -> Iterator[str]:
    """Yield the keys that `recipe` reads with their last two axes swapped: of weights stored [in, out] (Conv1D)."""
    if isinstance(recipe, Source) and flipped:
        yield recipe.key
    if isinstance(recipe, Permute) and recipe.axes in ((1, 0), (0, 2, 1)):
        flipped = not flipped
    for part in recipe.parts:
        yield from transposed_keys(part, flipped)


def stacked(update: Update, adapter: Adapter, turned: bool) -> Recipe:
    """The update of a weight of all experts, [experts, out, in] or `turned` [experts, in, out].

    Factor A [experts · rank, in] holds one expert after the other, factor B [out, rank · experts] interleaves them.
    """
    (ranks, width), (height, _) = adapter.reader.shape(update.down), adapter.reader.shape(update.up)
    experts, down, up = ranks // update.rank, adapter.tensor(update.down), adapter.tensor(update.up)
    items = []
    for i in range(experts):
        a = Slice(down, 0, i * update.rank, (i + 1) * update.rank)
        b = Slice(up, 1, i, ranks, experts)
        product = MatMul(transposed(a), transposed(b)) if turned else MatMul(b, a)
        items.append(Reshape(product, (1, width, height) if turned else (1, height, width)))
    return scaled(Concat(tuple(items)), update.scale)


def with_rows(table: Recipe, count: int, tokens: Tokens, rows: Recipe) -> Recipe:
    """`table` of `count` rows with `rows` in the place of those of `tokens`."""
    order = sorted(range(len(tokens.indices)), key=tokens.indices.__getitem__)
    items: list[Recipe] = []
    done = 0
    while order:
        first = tokens.indices[order[0]]
        run = [i for at, i in enumerate(order) if tokens.indices[i] == first + at]
        order = order[len(run) :]
        if first > done:
            items.append(Slice(table, 0, done, first))
        items.append(Take(rows, tuple(run)))
        done = first + len(run)
    if done < count:
        items.append(Slice(table, 0, done, count))
    return Concat(tuple(items)) if len(items) > 1 else items[0]
