"""Codes of quantized weights, as exports store them in place of the numbers that they stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.backends.options import no_effect
from weft.ir.errors import WeftError
from weft.ir.recipes import Reshape
from weft.ir.recipes.blocks import BlockRecipe, Stored, block_layout, in_file
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.recipe import BLOCK_ELEMENTS, SWEEP_ELEMENTS, Recipe
from weft.ir.types.block_layouts import BlockLayout, Blocks, unpack_codes

from .inversion import Made

WEIGHTS = ("auto", "codes", "float")
SHOWN = 3  # tensors that a note names


class Refused(NamedTuple):
    """A tensor whose codes cannot be kept, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class Codes:
    """A matrix [..., out, in], or several, made of whole rows of blocks of `layout`."""

    recipe: Recipe
    layout: BlockLayout
    shape: tuple[int, ...]

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return -(-self.shape[-1] // self.layout.group)

    def part(self, name: str) -> Recipe:
        """The recipe of the part `name` (`weft.ir.recipes.blocks.parts`) of all rows."""
        return Stored(self.recipe, name)

    def blocks(self, reader: TensorReader) -> Iterator[Blocks]:
        """The blocks of all rows, some at a time; a row ends with a whole group."""
        row = int(np.prod(self.shape[1:]))
        step = max(1, (SWEEP_ELEMENTS if self.recipe.needs_full_read else BLOCK_ELEMENTS) // row)
        layout = self.layout
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])

            def read(name: str, first: int = start, last: int = stop) -> Array:
                return self.part(name).read(reader, first, last)

            scales = read("steps")
            packed = read("packed").reshape(*scales.shape, -1)  # every group begins with a byte
            zeros = unpack_codes(read("points"), layout.bits, self.groups) if layout.has_zeros else None
            offsets = read("offsets") if layout.has_minimum else None
            yield Blocks(unpack_codes(packed, layout.bits, layout.group), scales, offsets, zeros)


def check_weights(weights: str) -> None:
    """Raise WeftError unless `weights` says how quantized weights may be stored."""
    if weights not in WEIGHTS:
        raise WeftError(f"--weights {weights!r} is not known; an export takes {', '.join(WEIGHTS)}")


def choose(
    tensors: Mapping[str, Made],
    reader: TensorReader,
    weights: str,
    refusal: Callable[[str, Codes], str],
    note: Callable[[str], None],
    aside: Collection[str] = (),
) -> dict[str, Codes]:
    """The tensors whose codes are kept, by name: of weights that a pass quantized, unless `weights` is "float".

    `refusal` says why a format does not take some, "" if it does. If it does not take all, "auto" keeps none; "codes"
    keeps those that it takes, blocks of the source's checkpoint too. `note` is told what is not kept. Tensors `aside`
    never keep codes, which is no reason against the others.

    Raises:
        WeftError: if "codes" finds none to keep, or "float" none to leave.
    """
    kept: dict[str, Codes] = {}
    if weights == "float":
        matrices = (made.recipe for made in tensors.values() if len(made.shape) > 1)
        if not any(isinstance(_layout(recipe, reader)[1], BlockLayout) for recipe in matrices):
            raise no_effect("--weights float", "no weights are quantized")
        return kept
    refused: list[Refused] = []
    for key, made in tensors.items():
        quantized = made.recipe.has(BlockRecipe)
        if len(made.shape) < 2 or key in aside or not (quantized or weights == "codes"):
            continue
        recipe, layout = _layout(made.recipe, reader)
        if isinstance(layout, BlockLayout):
            found = Codes(recipe, layout, made.shape)
            reason = refusal(key, found)
            if not reason:
                kept[key] = found
                continue
        else:
            reason = layout
        if quantized or isinstance(layout, BlockLayout):
            refused.append(Refused(key, reason))
    if weights == "codes" and not kept:
        reason = f": {refused[0].key}: {refused[0].reason}" if refused else ""
        raise WeftError(f"--weights codes finds no weights whose codes can be kept{reason}")
    if refused and weights == "auto":
        note(f"all weights are written as floats, since not all codes fit the format: {_listed(refused)}")
        return {}
    if refused:
        note(f"written as floats: {_listed(refused)}")
    return kept


def _layout(recipe: Recipe, reader: TensorReader) -> tuple[Recipe, BlockLayout | str]:
    """Return `recipe` in whole rows of what the file has, and the layout of its codes, or why it has none."""
    rows = _by_rows(in_file(recipe), reader)
    return rows, block_layout(rows, reader)


def counted_layouts(kept: Mapping[str, Codes]) -> str:
    """Return how many weights keep the codes of which layout, for a note."""
    counts = Counter(str(codes.layout) for codes in kept.values())
    return ", ".join(f"{count} as {layout}" for layout, count in sorted(counts.items()))


def shortened(keys: Collection[str]) -> str:
    """Return the first of `keys`, and how many others there are."""
    first = list(keys)[:SHOWN]
    return ", ".join(first) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _listed(refused: list[Refused]) -> str:
    reason = refused[0].reason
    same = [key for key, other in refused if other == reason]
    others = len(refused) - len(same)
    return f"{shortened(same)} ({reason})" + (f", and {others} for other reasons" if others else "")


def _by_rows(recipe: Recipe, reader: TensorReader) -> Recipe:
    """`recipe` with the last size of every reshaping as -1 where that keeps rows whole."""
    recipe = recipe.map_parts(lambda part: _by_rows(part, reader))
    if isinstance(recipe, Reshape) and recipe.dims and recipe.dims[-1:] == recipe.item.shape(reader)[-1:]:
        return replace(recipe, dims=(*recipe.dims[:-1], -1))
    return recipe
