"""Templates: functions that return the recipe of a parameter whose checkpoint tensors have another layout.

A template appends a part ("weight" or "bias") to `name`. It only moves elements, scales them, adds 1 or pads with 0.
Functions with the decorator `template` are called with the arguments after the first three, and return a template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from weft.ir.recipes import Add, Concat, Full, Permute, Recipe, Reshape, Scale, Slice

from ...dsl import MoE
from .family import Fetch, Template, template
from .settings import Settings


@template
def transpose_linear(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return the linear layer `name`, whose weight is stored [in, out] (Conv1D)."""
    weight = fetch(f"{name}.{part}")
    return Permute(weight, (1, 0)) if part == "weight" else weight


@template
def slice_qkv(
    fetch: Fetch, part: str, s: Settings, name: str, which: str, *, grouped: bool = False, transposed: bool = False
) -> Recipe:
    """Return the rows of q, k or v (`which`) in the fused linear layer `name`.
    Its outputs are all queries, then all keys, then all values; or, if `grouped`, for each key/value head its queries,
    its key and its value. `transposed`: its weight is stored [in, out]."""
    weight = transpose_linear(name)(fetch, part, s) if transposed else fetch(f"{name}.{part}")
    heads, d = s.head_count, s.head_size
    runs, queries, keys = (s.groups, heads // s.groups, 1) if grouped else (1, heads, s.groups)
    first, count = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}[which]
    start, stop = first * d, (first + count) * d
    if runs == 1:
        return Slice(weight, 0, start, stop)
    rest = (-1,) if part == "weight" else ()
    grouped_rows = Reshape(weight, (runs, (queries + 2 * keys) * d, *rest))
    return Reshape(Slice(grouped_rows, 1, start, stop), (runs * count * d, *rest))


def split_qkv(prefix: str, name: str, *, grouped: bool = False, transposed: bool = False) -> dict[str, Template]:
    """Return the templates that slice q, k and v from the fused linear layer `name`, keyed by `prefix`.q, .k and .v."""
    return {f"{prefix}.{which}": slice_qkv(name, which, grouped=grouped, transposed=transposed) for which in "qkv"}


def name_gated_mlp(prefix: str, name: str) -> dict[str, str]:
    """Return `name`.gate_proj, `name`.up_proj and `name`.down_proj, keyed by `prefix`.gate, .up and .down."""
    return {f"{prefix}.{which}": f"{name}.{which}_proj" for which in ("gate", "up", "down")}


@template
def slice_rows(
    fetch: Fetch, part: str, settings: Settings, name: str, index: int, count: Callable[[Settings], Any]
) -> Recipe:
    """Return layer number `index` of the fused layer `name`, which has `count(settings)` rows for each layer in it."""
    rows = count(settings)
    return Slice(fetch(f"{name}.{part}"), 0, index * rows, (index + 1) * rows)


def slice_half(name: str, index: int) -> Template:
    """Return a template for the first (`index` 0) or second (1) half of the layer `name`, which fuses gate and up."""
    return slice_rows(name, index, lambda settings: settings.ffn)


@template
def add_one(fetch: Fetch, part: str, settings: Settings, name: str) -> Recipe:
    """Return the norm `name`, whose weight is stored minus 1 (Gemma, Nemotron)."""
    stored = fetch(f"{name}.{part}")
    return Add((stored,), 1.0) if part == "weight" else stored


@template
def swap_halves(fetch: Fetch, part: str, s: Settings, name: str, of_keys: bool = False) -> Recipe:
    """Return queries (`of_keys`: keys) `name` with the halves of each head swapped (RoPE of opposite sign)."""
    heads, half = (s.groups if of_keys else s.head_count), s.head_size // 2
    rest = (-1,) if part == "weight" else ()
    halves = Reshape(fetch(f"{name}.{part}"), (heads, 2, half, *rest))
    return Reshape(Concat((Slice(halves, 1, 1, 2), Slice(halves, 1, 0, 1)), 1), (heads * 2 * half, *rest))


def split_gate_up(prefix: str, name: str) -> dict[str, Template]:
    """Return the templates that slice gate and up from the fused layer `name`, keyed by `prefix`.gate and .up."""
    return {f"{prefix}.{which}": slice_half(name, index) for index, which in enumerate(("gate", "up"))}


def pick_by_arrangement(**names: str) -> Template:
    """Return a template for the layer `names[arrangement]`, with the arrangement of the first block."""
    return lambda fetch, part, settings: fetch(f"{names[str(settings.find_first('arrangement'))]}.{part}")


def flatten_heads(name: str) -> Template:
    """Return a template for the layer `name`, whose weight [heads, d] is flattened to a vector [heads · d]."""
    return lambda fetch, part, settings: Reshape(fetch(f"{name}.{part}"), (-1,))


def reshape_tensor(name: str, *dims: int) -> Template:
    """Return a template for the tensor with the full name `name`, reshaped to `dims`; one of them may be -1."""
    return lambda fetch, part, settings: Reshape(fetch(name), dims)


@template
def concat_heads(fetch: Fetch, part: str, settings: Settings, name: str, of_keys: bool = False) -> Recipe:
    """Return the concatenated tensors `name`, with {h} replaced by each query head, or KV head if `of_keys`."""
    heads = range(settings.groups if of_keys else settings.head_count)
    return Concat(tuple(fetch(f"{name.replace('{h}', str(h))}.{part}") for h in heads))


def build_block_diagonal(blocks: Sequence[Recipe], rows: int, columns: int) -> Recipe:
    """Return the block-diagonal matrix of `blocks`, each [rows, columns]: the weight of a grouped linear layer."""

    def pad_row(i: int) -> Recipe:
        left, right = Full(0.0, (rows, i * columns)), Full(0.0, (rows, (len(blocks) - 1 - i) * columns))
        return Concat((*([left] if i else []), blocks[i], *([right] if i < len(blocks) - 1 else [])), 1)

    return blocks[0] if len(blocks) == 1 else Concat(tuple(map(pad_row, range(len(blocks)))))


@template
def scale_linear(
    fetch: Fetch, part: str, settings: Settings, name: str, *multipliers: str, bias: tuple[str, ...] | None = None
) -> Recipe:
    """Return the linear layer `name` times the product of the settings' multipliers named `multipliers`. If `bias` is
    not None, it names the multipliers of the layer's bias."""
    factors = multipliers if part == "weight" or bias is None else bias
    factor = math.prod(settings.multipliers[m] for m in factors)
    tensor = fetch(f"{name}.{part}")
    return tensor if factor == 1 else Scale(tensor, factor)


@template
def slice_expert_half(fetch: Fetch, part: str, settings: Settings, name: str, index: int) -> Recipe:
    """Return gate (`index` 0) or up (1): half of axis 1 of tensor `name` [experts, 2 · hidden, …]."""
    hidden = find_experts(settings).hidden
    return Slice(fetch(name), 1, index * hidden, (index + 1) * hidden)


def find_experts(settings: Settings) -> MoE:
    """Return the mixture of experts of the first layer that has one; all layers of a model have equal ones."""
    if settings.block is None:
        candidates: tuple[Any, ...] = (settings.find_first("moe"),)
    else:
        block = settings.find_first("block")
        candidates = getattr(block, "moe", None), block.ffn, getattr(block.ffn, "moe", None)
    return next(candidate for candidate in candidates if isinstance(candidate, MoE))
