"""New arrangements of attention heads in their weights: reordered, repeated, dropped, or padded with zeros."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import Node, Param, Recipe, Value, ops
from weft.ir.recipes import Concat, Full, Reshape, Take

from ...analysis.projections import Branch, find_branch, unpack_branch
from ...edits.edit import derive_param, rebuild_node, replace_param, replace_weights, require_param


@dataclass(frozen=True)
class HeadLayout:
    """An arrangement of heads along an axis: new head i is old head heads[i] (`width` features), then `zeros` zeros."""

    heads: tuple[int, ...]
    width: int
    zeros: int = 0

    @property
    def size(self) -> int:
        """Return the new length of the axis: number of heads · (width + zeros)."""
        return len(self.heads) * (self.width + self.zeros)

    @property
    def is_identity(self) -> bool:
        """Return whether new head i is old head i and no zeros are appended; the last heads may be dropped."""
        return self.heads == tuple(range(len(self.heads))) and not self.zeros

    @property
    def rows(self) -> tuple[int, ...]:
        """Return `rows`: new feature i is old feature rows[i], not counting the zeros."""
        return _list_rows(self.heads, self.width)

    def rearrange(self, recipe: Recipe, shape: tuple[int, ...], axis: int = 0) -> Recipe:
        """Return `recipe` (a tensor of `shape` with the old heads along `axis`) with its heads rearranged."""
        if self.heads != tuple(range(shape[axis] // self.width)):
            recipe = Take(recipe, self.rows, axis)
        if not self.zeros:
            return recipe
        lead, trailing = (*shape[:axis], len(self.heads)), shape[axis + 1 :]
        zeros = Full(0.0, (*lead, self.zeros, *trailing))
        padded = Concat((Reshape(recipe, (*lead, self.width, *trailing)), zeros), axis + 1)
        return Reshape(padded, (*shape[:axis], self.size, *trailing))

    def derive_param(self, old: Param, axis: int = 0) -> Param:
        """Return a new parameter: `old` with the heads along `axis` rearranged. `old` is not erased."""
        shape = tuple(old.shape)
        new_shape = *shape[:axis], self.size, *shape[axis + 1 :]
        return derive_param(old, self.rearrange(old.recipe, shape, axis), new_shape)


@functools.lru_cache(maxsize=64)
def _list_rows(heads: tuple[int, ...], width: int) -> tuple[int, ...]:  # cached: layers mostly share a layout
    return tuple(h * width + i for h in heads for i in range(width))


def find_obstacle(branch: Branch, layout: HeadLayout) -> str | None:
    """Return a reason (str) why a node between linear and attention cannot work on heads in `layout`, or None."""
    has_norm = False
    for node in branch.between:
        reason = _find_node_obstacle(node, layout, branch.start.width)
        if has_norm and layout.zeros and node.op in (ops.clip, ops.affine, ops.add):
            reason = "works on the output of a norm, which padding with zeros makes larger"
        if reason is not None:
            return f"{node.op.name} (%{node.output.name}) {reason}"
        has_norm |= node.op is ops.rms_norm
    return None


def find_layouts(
    node: Node, roles: str, make_layout: Callable[[str, int, int], HeadLayout]
) -> dict[str, tuple[Branch, HeadLayout]] | str:
    """Return (branch, layout) for each of the `roles`, such as "qkv", of the attention `node`.

    The layout is make_layout(role, number of heads, head width). Return a reason (str) if `find_branch` or
    `find_obstacle` returns one.
    """
    layouts = {}
    for role in roles:
        branch, heads = find_branch(node, role), int(node.attrs["heads" if role == "q" else "kv_heads"])
        if isinstance(branch, str):
            return branch
        layout = make_layout(role, heads, branch.start.width // heads)
        if (reason := find_obstacle(branch, layout)) is not None:
            return reason
        layouts[role] = branch, layout
    return layouts


def compute_norm_growth(branch: Branch, layout: HeadLayout) -> float:
    """Return the factor by which padding enlarges the result of `branch`: √((width + zeros) / width) per RMSNorm."""
    norms = sum(node.op is ops.rms_norm for node in branch.between)
    return math.sqrt((layout.width + layout.zeros) / layout.width) ** norms


def _find_node_obstacle(node: Node, layout: HeadLayout, width: int) -> str | None:
    if node.op is ops.rope:
        return None
    if node.op is ops.reshape:
        of_heads = [s if isinstance(s, int) else 0 for s in node.output.shape[2:]]
        splits_heads = of_heads == [width] or of_heads == [width // layout.width, layout.width]
        return None if splits_heads and math.prod(of_heads) == width else "regroups more than heads"
    if node.op is ops.clip:
        low, high = node.attrs["low"], node.attrs["high"]
        keeps_zero = (low is None or low <= 0) and (high is None or high >= 0)
        return None if keeps_zero or not layout.zeros else "maps zeros to other values"
    if node.op is ops.affine:
        return "maps zeros to other values" if layout.zeros and node.attrs["plus"] else None
    if node.op in (ops.rms_norm, ops.layer_norm, ops.mul, ops.add):
        operands, vector_shape = (v for v in node.inputs[1:] if v is not None), node.output.shape[-1:]
        if not all(isinstance(v, Param) and v.shape == vector_shape for v in operands):
            return "has an operand that is not a vector over the features"
        return "takes a mean that zeros would change" if layout.zeros and node.op is ops.layer_norm else None
    return "is between the linear and the attention"


def apply_layout(reader: Node, layouts: Mapping[str, tuple[Branch, HeadLayout]]) -> None:
    """Rearrange the heads of the operands q, k, v of the attention `reader`; `layouts` maps roles to (branch, layout).
    The weight rows of the linears are rearranged, and the nodes between linears and `reader` are rebuilt. For each
    pair, `find_obstacle` must return None. If a width changes, packed linears are first split, and the caller must then
    set the attributes of `reader` that depend on it."""
    if any(layout.size != branch.start.width for branch, layout in layouts.values()):
        layouts = {role: (unpack_branch(reader, role), layout) for role, (_, layout) in layouts.items()}
    linears: dict[Node, list[tuple[Branch, HeadLayout]]] = {}
    for branch, layout in layouts.values():
        linears.setdefault(branch.linear, []).append((branch, layout))
    # Once for each linear: the spans of q, k and v count rows of the old weight.
    repacked = {linear: repack_linear(linear, branches) for linear, branches in linears.items()}
    for role, (branch, layout) in layouts.items():
        value = branch.start if branch.is_packed else repacked[branch.linear]
        derived: list[tuple[Value | None, Value | None]] = []
        for node in branch.between:
            value = _rebuild_on_layout(node, value, layout, reader, derived)
        reader.set_input(reader.op.operand_index(role), value)
        # Readers first: only a node without readers can be erased.
        for node in reversed(branch.between):
            reader.graph.erase(node)
        for old, new in derived:
            replace_param(old, new)


def rearrange_columns(linear: Node, layout: HeadLayout) -> None:
    """Rearrange the heads along the input axis of the weight of `linear`, which is rebuilt."""
    weight = require_param(linear, "weight")
    new_weight = layout.derive_param(weight, axis=1)
    rebuild_node(linear, {"weight": new_weight})
    replace_param(weight, new_weight)


def repack_linear(linear: Node, branches: list[tuple[Branch, HeadLayout]]) -> Value:
    """Replace `linear` by one with rearranged rows of weight and bias; return its output.
    `branches` are the (branch, layout) of each operand that `linear` computes."""
    (branch, layout), *_ = branches
    weight, bias = branch.weight, branch.bias
    if not branch.is_packed:
        vector = None if bias is None else layout.rearrange(bias.recipe, tuple(bias.shape))
        return replace_weights(linear, layout.rearrange(weight.recipe, tuple(weight.shape)), vector, layout.size).output
    index = list(range(weight.shape[0]))
    for branch, layout in branches:
        start, stop = branch.span
        index[start:stop] = (start + i for i in layout.rows)
    vector = None if bias is None else take_rows(bias.recipe, index)
    return replace_weights(linear, take_rows(weight.recipe, index), vector).output


def take_rows(recipe: Recipe, index: Sequence[int]) -> Recipe:
    """Return a recipe of the rows `index` of `recipe`; if `recipe` is a Take of rows, both are combined into one."""
    if isinstance(recipe, Take) and recipe.axis == 0:
        return Take(recipe.item, tuple(recipe.indices[i] for i in index))
    return Take(recipe, tuple(index))


def _rebuild_on_layout(
    node: Node, x: Value, layout: HeadLayout, reader: Node, derived: list[tuple[Value | None, Value | None]]
) -> Value:
    """Emit `node` again on the rearranged `x`, before `reader`, and return its output.
    The pairs (old operand, new operand) of its other operands are appended to `derived`."""
    attrs, head_width = dict(node.attrs), layout.width + layout.zeros
    per_head = HeadLayout((0,), layout.width, layout.zeros) if len(node.output.shape) == 4 else layout
    operands = list(node.inputs[1:])
    if node.op is ops.rope:
        attrs["heads"] = len(layout.heads)
    elif node.op is ops.reshape:
        split = len(node.output.shape) == 4
        attrs["shape"] = (*node.output.shape[:2], *((len(layout.heads), head_width) if split else (layout.size,)))
    else:
        operands = [per_head.derive_param(v) if isinstance(v, Param) else v for v in operands]
    if node.op is ops.rms_norm:
        attrs["eps"] *= layout.width / head_width  # zeros shrink the mean of squares by this factor
    derived += zip(node.inputs[1:], operands, strict=True)
    with node.graph.inserting(before=reader):
        y = node.op(x, *operands, **attrs)
    node.output.name, y.name = y.name, node.output.name
    assert y.producer is not None
    y.producer.scope = node.scope
    return y
