"""Templates: recipes of parameters whose checkpoint tensors have another layout.

Each function returns a `Template`: pure data movement, or an affine step, over the checkpoint's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.ir.recipes import Add, Concat, Full, Permute, Recipe, Reshape, Scale, Slice

from ...dsl import MoE
from .family import Fetch, Template
from .settings import Settings


def transposed(name: str) -> Template:
    """Return a template for a linear layer stored [in, out] (Conv1D)."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        weight = fetch(f"{name}.{part}")
        return Permute(weight, (1, 0)) if part == "weight" else weight

    return template


def packed(name: str, which: str, *, grouped: bool = False, turned: bool = False) -> Template:
    """Return a template for part `which` (q, k or v) of a fused linear layer.

    Its rows are all queries, then all keys, then all values; or, if `grouped`, per key/value head: its queries, its
    key, its value. `turned`: it is stored [in, out].
    """

    def template(fetch: Fetch, part: str, s: Settings) -> Recipe:
        weight = transposed(name)(fetch, part, s) if turned else fetch(f"{name}.{part}")
        heads, d = s.head_count, s.head_size
        runs, queries, keys = (s.groups, heads // s.groups, 1) if grouped else (1, heads, s.groups)
        first, count = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}[which]
        start, stop = first * d, (first + count) * d
        if runs == 1:
            return Slice(weight, 0, start, stop)
        rest = (-1,) if part == "weight" else ()
        grouped_rows = Reshape(weight, (runs, (queries + 2 * keys) * d, *rest))
        return Reshape(Slice(grouped_rows, 1, start, stop), (runs * count * d, *rest))

    return template


def packed_parts(prefix: str, name: str, *, grouped: bool = False, turned: bool = False) -> dict[str, Template]:
    """Return templates for the parameters q, k and v under `prefix`, `packed` in one linear layer."""
    return {f"{prefix}.{which}": packed(name, which, grouped=grouped, turned=turned) for which in "qkv"}


def gated(prefix: str, name: str) -> dict[str, str]:
    """Return names for the parameters gate, up and down under `prefix`: gate_proj, up_proj and down_proj in `name`."""
    return {f"{prefix}.{which}": f"{name}.{which}_proj" for which in ("gate", "up", "down")}


def half(name: str, index: int) -> Template:
    """Return a template for half `index` of a linear layer with the rows of gate above those of up, or vice versa."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        rows = settings.ffn
        assert isinstance(rows, int)
        return Slice(fetch(f"{name}.{part}"), 0, index * rows, (index + 1) * rows)

    return template


def shifted(name: str) -> Template:
    """Return a template for a norm that multiplies by 1 + weight (Gemma, Nemotron)."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        stored = fetch(f"{name}.{part}")
        return Add((stored,), 1.0) if part == "weight" else stored

    return template


def halves_swapped(name: str, of_keys: bool = False) -> Template:
    """Return a template for queries (or keys) whose heads store their second halves first: RoPE has the other sign."""

    def template(fetch: Fetch, part: str, s: Settings) -> Recipe:
        heads, half = (s.groups if of_keys else s.head_count), s.head_size // 2
        rest = (-1,) if part == "weight" else ()
        halves = Reshape(fetch(f"{name}.{part}"), (heads, 2, half, *rest))
        return Reshape(Concat((Slice(halves, 1, 1, 2), Slice(halves, 1, 0, 1)), 1), (heads * 2 * half, *rest))

    return template


def by_arrangement(**names: str) -> Template:
    """Return a template for the name that belongs to the arrangement of the blocks."""
    return lambda fetch, part, settings: fetch(f"{names[str(settings.first('arrangement'))]}.{part}")


def flattened(name: str) -> Template:
    """Return a template for per-head weights [heads, d] as one vector."""
    return lambda fetch, part, settings: Reshape(fetch(f"{name}.{part}"), (-1,))


def joined(name: str, of_keys: bool = False) -> Template:
    """Return a template for weights stored as a tensor per head, with {h} for the head; `of_keys`: key/value heads."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        heads = range(settings.groups if of_keys else settings.head_count)
        return Concat(tuple(fetch(f"{name.replace('{h}', str(h))}.{part}") for h in heads))

    return template


def block_diagonal(blocks: Sequence[Recipe], rows: int, columns: int) -> Recipe:
    """Return a matrix with the `blocks`, each [rows, columns], on its diagonal and zeros elsewhere: a grouped layer."""

    def pad_row(i: int) -> Recipe:
        left, right = Full(0.0, (rows, i * columns)), Full(0.0, (rows, (len(blocks) - 1 - i) * columns))
        return Concat((*([left] if i else []), blocks[i], *([right] if i < len(blocks) - 1 else [])), 1)

    return blocks[0] if len(blocks) == 1 else Concat(tuple(map(pad_row, range(len(blocks)))))


def times(name: str, *multipliers: str, bias: tuple[str, ...] | None = None) -> Template:
    """Return a template for a linear layer times the config's `multipliers`; its bias times `bias`, or the same."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        factors = multipliers if part == "weight" or bias is None else bias
        factor = math.prod(settings.multipliers[m] for m in factors)
        tensor = fetch(f"{name}.{part}")
        return tensor if factor == 1 else Scale(tensor, factor)

    return template


def half_of_each(name: str, index: int) -> Template:
    """Return a template for half `index` of the rows of tensor `name` [experts, 2 · hidden, dim], gate above up."""

    def template(fetch: Fetch, part: str, settings: Settings) -> Recipe:
        hidden = experts_of(settings).hidden
        return Slice(fetch(name), 1, index * hidden, (index + 1) * hidden)

    return template


def experts_of(settings: Settings) -> MoE:
    """Return the mixture of the layers that have one; all are alike."""
    if settings.block is None:
        candidates: tuple[Any, ...] = (settings.first("moe"),)
    else:
        block = settings.first("block")
        candidates = getattr(block, "moe", None), block.ffn, getattr(block.ffn, "moe", None)
    return next(candidate for candidate in candidates if isinstance(candidate, MoE))
