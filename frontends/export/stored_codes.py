"""Codes of quantized weights, which exports store instead of dequantized values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from weft.backends.options import make_no_effect_error
from weft.ir.errors import WeftError
from weft.ir.recipes import Reshape
from weft.ir.recipes.blocks import BlockRecipe, Stored, find_block_layout, unwrap_stored_blocks
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.recipe import BLOCK_ELEMENTS, SWEEP_ELEMENTS, Recipe
from weft.ir.types.block_layouts import BlockLayout, Blocks, unpack_codes

from .inversion import ShapedRecipe

WEIGHTS = ("auto", "codes", "float")
SHOWN = 3  # the number of tensors that a note lists


@dataclass(frozen=True)
class StoredCodes:
    """The codes of a quantized matrix or stack [..., out, in], in which every row begins a new block of `layout`."""

    recipe: Recipe
    layout: BlockLayout
    shape: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Return the number of groups in a row."""
        return -(-self.shape[-1] // self.layout.group)

    def part(self, name: str) -> Recipe:
        """Return the recipe of the part `name` (`weft.ir.recipes.blocks.parts`), such as "steps", of all rows."""
        return Stored(self.recipe, name)

    def blocks(self, reader: TensorReader) -> Iterator[Blocks]:
        """Yield the blocks of all rows, a few rows at a time; the last group of a row is padded to a complete one."""
        row = int(np.prod(self.shape[1:]))
        step = max(1, (SWEEP_ELEMENTS if self.recipe.needs_full_read else BLOCK_ELEMENTS) // row)
        layout, names = self.layout, ["steps", "packed"]
        names += ["points"] * layout.has_zeros + ["offsets"] * layout.has_minimum
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            parts = {name: self.part(name).read(reader, start, stop) for name in names}
            packed = parts["packed"].reshape(*parts["steps"].shape, -1)  # every group starts at a byte
            zeros = unpack_codes(parts["points"], layout.bits, self.groups) if layout.has_zeros else None
            codes = unpack_codes(packed, layout.bits, layout.group)
            yield Blocks(codes, parts["steps"], parts.get("offsets"), zeros)


def check_weights(weights: str) -> None:
    """Raise WeftError unless `weights` is a way to store quantized weights ("auto", "codes" or "float")."""
    if weights not in WEIGHTS:
        raise WeftError(f"--weights {weights!r} is unknown; known are {', '.join(WEIGHTS)}")


def choose_codes(
    tensors: Mapping[str, ShapedRecipe],
    reader: TensorReader,
    weights: str,
    refusal: Callable[[str, StoredCodes], str],
    note: Callable[[str], None],
    aside: Collection[str] = (),
) -> dict[str, StoredCodes]:
    """Return the codes to store, keyed by tensor name.

    weights: "auto" stores the codes of all weights that a pass quantized, or of none if `refusal` refuses one; "codes"
    stores all that are not refused, including blocks of the source's checkpoint; "float" stores none.
    refusal: returns the reason why a format cannot store a tensor's codes, or "". note: reports refused tensors.
    aside: names of tensors that never store codes and do not count as refused.

    Raises:
        WeftError: if "codes" finds no codes to store, or no weight is quantized, so that "float" has no effect.
    """
    codes: dict[str, StoredCodes] = {}
    if weights == "float":
        matrices = (tensor.recipe for tensor in tensors.values() if len(tensor.shape) > 1)
        if not any(isinstance(_find_layout(recipe, reader)[1], BlockLayout) for recipe in matrices):
            raise make_no_effect_error("--weights float", "no weights are quantized")
        return codes
    refusals: dict[str, str] = {}  # tensor name -> reason
    for key, tensor in tensors.items():
        quantized = tensor.recipe.has(BlockRecipe)
        if len(tensor.shape) < 2 or key in aside or not (quantized or weights == "codes"):
            continue
        recipe, layout = _find_layout(tensor.recipe, reader)
        if isinstance(layout, BlockLayout):
            candidate = StoredCodes(recipe, layout, tensor.shape)
            if reason := refusal(key, candidate):
                refusals[key] = reason
            else:
                codes[key] = candidate
        elif quantized:
            refusals[key] = layout
    if weights == "codes" and not codes:
        reason = "".join(f" ({key}: {fault})" for key, fault in [*refusals.items()][:1])
        raise WeftError(f"--weights codes has no effect: no weight has codes that can be stored{reason}")
    if refusals and weights == "auto":
        note(f"all weights are written as floats, since some codes do not fit: {_list_refusals(refusals)}")
        return {}
    if refusals:
        note(f"written as floats: {_list_refusals(refusals)}")
    return codes


def _find_layout(recipe: Recipe, reader: TensorReader) -> tuple[Recipe, BlockLayout | str]:
    """Return `recipe` after `_keep_rows`, and its block layout, or a str: the reason why it has none."""
    rows = _keep_rows(unwrap_stored_blocks(recipe), reader)
    return rows, find_block_layout(rows, reader)


def describe_layouts(stored: Mapping[str, StoredCodes]) -> str:
    """Return the number of weights in each layout as a phrase for a note: "24 as int4_64"."""
    counts = Counter(str(codes.layout) for codes in stored.values())
    return ", ".join(f"{count} as {layout}" for layout, count in sorted(counts.items()))


def list_first(keys: Collection[str]) -> str:
    """Return the first SHOWN of `keys` and the number of the remaining ones, as a phrase for a note."""
    return ", ".join(list(keys)[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _list_refusals(refusals: Mapping[str, str]) -> str:
    reason = next(iter(refusals.values()))
    keys = [key for key, refusal in refusals.items() if refusal == reason]
    n_others = len(refusals) - len(keys)
    return f"{list_first(keys)} ({reason})" + (f", and {n_others} for other reasons" if n_others else "")


def _keep_rows(recipe: Recipe, reader: TensorReader) -> Recipe:
    """Return `recipe` with -1 for the last size of each reshape in it that keeps the length of the last axis."""
    recipe = recipe.map_parts(lambda part: _keep_rows(part, reader))
    if isinstance(recipe, Reshape) and recipe.dims and recipe.dims[-1:] == recipe.item.shape(reader)[-1:]:
        return replace(recipe, dims=(*recipe.dims[:-1], -1))
    return recipe
