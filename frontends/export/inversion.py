"""Inversion of recipes: from parameters to the checkpoint tensors that they read.

`restore_tensors` computes the values of the tensors: steps that move elements are inverted exactly; arithmetic is
inverted in float64 and rounded once to float32. `invert_recipes` computes no values: it returns the tensors as recipes
over the parameters, with shapes derived from the parameters' shapes. Both invert one step at a time by `invert_step`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Add, Cast, Concat, Full, Map, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.readers import Array, MemoryReader, TensorReader
from weft.ir.recipes.recipe import Recipe

Shape = tuple[int, ...]
Layout = Callable[[str, int], Shape | None]  # a tensor's name and its number of elements -> its shape
_INVERSES = {"neg": "neg", "exp": "log", "log": "exp", "reciprocal": "reciprocal"}


def invert_step(recipe: Recipe, value: Recipe, shape: Shape) -> Recipe:
    """Return the recipe that computes the single part of `recipe` from `value`, the recipe of the result of `recipe`.
    The part has the shape `shape`.

    Raises:
        WeftError: if `recipe` has no inverse, or has several parts.
    """
    match recipe:
        case Permute(_, axes):
            return Permute(value, tuple(int(a) for a in np.argsort(axes)))
        case Reshape():
            return Reshape(value, shape)
        case Take(_, indices, axis) if sorted(indices) == list(range(shape[axis])):
            return Take(value, tuple(int(i) for i in np.argsort(indices)), axis)
        case Scale(_, (int() | float()) as factor) if factor:
            return Scale(value, 1 / factor)
        case Add((_,), offset):
            return Add((value,), -offset)
        case Map(_, fn) if fn in _INVERSES:
            return Map(value, _INVERSES[fn])
        case Cast():
            return value  # a cast maps its own results to themselves
    raise WeftError(f"tensor {_list_sources(recipe)} cannot be restored: {recipe.name} has no inverse")


def _list_sources(recipe: Recipe) -> str:
    return ", ".join(_list_keys([recipe]))


class Group(NamedTuple):
    """Parameters, and the checkpoint keys that only they read."""

    params: tuple[str, ...]
    keys: tuple[str, ...]


class TensorPiece(NamedTuple):
    """A part of the tensor `key`: `values` are determined where the mask `known` is true."""

    key: str
    values: Array
    known: Array


def group_params(graph: Graph) -> list[Group]:
    """Return groups of the parameters that read checkpoint tensors, in order; a shared tensor joins its parameters."""
    reads = nx.Graph()
    for name, param in graph.params.items():
        reads.add_edges_from((("param", name), ("key", key)) for key in param.recipe.sources())
    order = {node: i for i, node in enumerate(reads)}
    components = []
    for component in nx.connected_components(reads):
        nodes = sorted(component, key=order.__getitem__)
        params, keys = (tuple(name for kind, name in nodes if kind == node_kind) for node_kind in ("param", "key"))
        components.append(Group(params, keys))
    return components


def restore_tensors(graph: Graph, *, params: Mapping[str, Array] | None = None) -> Iterator[tuple[str, Array]]:
    """Yield (key, float32 values) of every checkpoint tensor that parameters of `graph` read, in `group_params` order.

    `params` maps names of parameters to values; other parameters are evaluated by their recipes. Only one group is in
    memory at a time.

    Raises:
        WeftError: if a parameter is unknown or of another shape, a recipe has no inverse, parameters that read the same
            elements disagree about them, or elements of a tensor are not read by any parameter.
    """
    values = params or {}
    for name in values:
        if name not in graph.params:
            raise WeftError(f"graph {graph.name} has no parameter {name!r}")
    for group in group_params(graph):
        yield from _restore_group(graph, group, values).items()


def _restore_group(graph: Graph, group: Group, params: Mapping[str, Array]) -> dict[str, Array]:
    """Return key → values for the tensors of `group`."""
    tensors = {key: _make_blank(graph.reader.shape(key)) for key in group.keys}
    for name in group.params:
        recipe, shape = graph.params[name].recipe, graph.params[name].shape
        value = np.asarray(params[name] if name in params else recipe.evaluate(graph.reader))
        if value.shape != shape:
            raise WeftError(f"parameter {name} has shape {list(shape)}, but its value {list(value.shape)}")
        try:
            for key, values, mask in undo_recipe(recipe, value, graph.reader):
                _merge(*tensors[key], values, mask, key)
        except WeftError as e:
            raise WeftError(f"parameter {name}: {e}") from None
    for key, (_, known) in tensors.items():
        if not known.all():
            missing = known.size - int(np.count_nonzero(known))
            raise WeftError(f"{key!r} cannot be restored: no parameter reads {missing} of its {known.size} elements")
    return {key: values for key, (values, _) in tensors.items()}


def undo_recipe(recipe: Recipe, value: Array, reader: TensorReader) -> Iterator[TensorPiece]:
    """Yield the pieces of checkpoint tensors that follow from `value`, the result of `recipe`.

    Tensors that `recipe` adds or multiplies by are yielded as stored in `reader`.

    Raises:
        WeftError: if a step has no inverse; it names the step and the tensors it reads.
    """
    yield from _undo_masked(recipe, value, np.broadcast_to(np.True_, value.shape), reader)


def _undo_masked(recipe: Recipe, value: Array, mask: Array, reader: TensorReader) -> Iterator[TensorPiece]:
    if isinstance(recipe, Source):
        yield TensorPiece(recipe.key, value, mask)
        return
    if not _list_sources(recipe):
        return  # a constant
    shape = recipe.parts[0].shape(reader)
    match recipe:
        case Concat(items, axis):
            ends = np.cumsum([item.shape(reader)[axis] for item in items])[:-1]
            for item, v, k in zip(items, np.split(value, ends, axis), np.split(mask, ends, axis), strict=True):
                yield from _undo_masked(item, v, k, reader)
            return
        case Add((first, *addends), offset) if addends and not set(first.sources()) & set(_list_keys(addends)):
            # The first addend takes the change, the rest stay as stored.
            for key in _list_keys(addends):
                yield _read_stored(key, reader)
            rest = sum((addend.evaluate(reader).astype(np.float64) for addend in addends), np.float64(offset))
            yield from _undo_masked(first, (value - rest).astype(np.float32), mask, reader)
            return
        case Scale(item, Recipe() as factor, axis) if not set(item.sources()) & set(factor.sources()):
            for key in _list_keys([factor]):  # factors stay as stored
                yield _read_stored(key, reader)
            divisors = factor.evaluate(reader).astype(np.float64).reshape(-1, *(1,) * (value.ndim - axis - 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                yield from _undo_masked(item, (value / divisors).astype(np.float32), mask & (divisors != 0), reader)
            return
        case Slice(_, axis, start, stop, step):
            item_value, item_mask = _make_blank(shape, value.dtype)
            cut = (slice(None),) * axis + (slice(start, stop, step),)
            item_value[cut], item_mask[cut] = value, mask
        case Take(_, indices, axis):  # some indices may be missing, others repeated
            item_value, item_mask = _make_blank(shape, value.dtype)
            rows, mask_rows, value, mask = (np.moveaxis(t, axis, 0) for t in (item_value, item_mask, value, mask))
            for n, i in enumerate(indices):
                _merge(rows[i : i + 1], mask_rows[i : i + 1], value[n : n + 1], mask[n : n + 1], _list_sources(recipe))
        case _:
            inverted = invert_step(recipe, Source("value"), shape)
            if isinstance(recipe, Permute | Reshape):
                item_value, item_mask = (inverted.evaluate(MemoryReader({"value": array})) for array in (value, mask))
            else:
                with np.errstate(all="ignore"):  # undetermined elements may be outside the domain of the inverse
                    item_value = inverted.evaluate(MemoryReader({"value": value.astype(np.float64)})).astype(np.float32)
                item_mask = mask
    yield from _undo_masked(recipe.parts[0], item_value, item_mask, reader)


def _read_stored(key: str, reader: TensorReader) -> TensorPiece:
    stored = Source(key).evaluate(reader)
    return TensorPiece(key, stored, np.broadcast_to(np.True_, stored.shape))


def _list_keys(recipes: Iterable[Recipe]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(recipe.sources() for recipe in recipes)))


def _make_blank(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[Array, Array]:
    return np.zeros(shape, dtype), np.zeros(shape, np.bool_)


def _merge(into: Array, determined: Array, values: Array, mask: Array, label: str) -> None:
    """Copy the elements of `values` under `mask` to `into`, and add `mask` to `determined`, both in place. Raises
    WeftError, naming `label`, if an element was determined before with another value."""
    overlap = determined & mask
    if overlap.any() and not np.array_equal(into[overlap], values[overlap], equal_nan=True):
        raise WeftError(f"parameters that share elements of tensor {label!r} have different values: make them equal")
    np.copyto(into, values, where=mask, casting="same_kind")
    determined |= mask


class ShapedRecipe(NamedTuple):
    """A tensor as a recipe with its shape."""

    recipe: Recipe
    shape: Shape

    def reshape(self, shape: Shape) -> ShapedRecipe:
        return self if shape == self.shape else ShapedRecipe(Reshape(self.recipe, shape), shape)

    def slice_axis(self, axis: int, start: int, stop: int) -> ShapedRecipe:
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return self if shape == self.shape else ShapedRecipe(Slice(self.recipe, axis, start, stop), shape)


Equation = tuple[Recipe, ShapedRecipe]  # a recipe, and the value that it yields


def _concat_tensors(parts: Iterable[ShapedRecipe], axis: int) -> ShapedRecipe:
    parts = tuple(parts)
    size = sum(p.shape[axis] for p in parts)
    shape = (*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :])
    return parts[0] if len(parts) == 1 else ShapedRecipe(Concat(tuple(p.recipe for p in parts), axis), shape)


def invert_recipes(
    equations: Iterable[Equation],
    layout: Layout = lambda name, count: None,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, ShapedRecipe]:
    """Return the checkpoint tensors, keyed by name, from which the recipes in `equations` compute their values.

    `shapes` maps tensor names to known shapes. If another tensor is read reshaped, its shape is stated by its recipe or
    by `layout`; else a bias is a vector, and any other tensor a matrix with the same last axis. Concatenated tensors of
    unknown shape are taken to have equal lengths.

    Raises:
        WeftError: if a recipe has no inverse, or equations disagree about a tensor.
    """
    placeholders = MemoryReader({key: np.broadcast_to(np.float32(0), shape) for key, shape in (shapes or {}).items()})
    waiting, solved = list(equations), dict[str, ShapedRecipe]()
    while waiting:
        # Slices wait until all other steps are undone; then the slices of one item are joined.
        parts: dict[Recipe, list[tuple[Slice, ShapedRecipe]]] = {}
        while waiting:
            recipe, value = waiting.pop(0)
            if isinstance(recipe, Source):
                if solved.setdefault(recipe.key, value) != value:
                    raise WeftError(f"parameters that share tensor {recipe.key!r} have different values")
            elif isinstance(recipe, Slice):
                parts.setdefault(recipe.item, []).append((recipe, value))
            else:
                waiting += _undo_step(recipe, value, layout, placeholders)
        waiting = [(item, _join_slices(slices)) for item, slices in parts.items()]
    return solved


def _undo_step(recipe: Recipe, value: ShapedRecipe, layout: Layout, reader: TensorReader) -> list[Equation]:
    """Undo the outermost step of `recipe`, which yields `value`: return equations (part of `recipe`, its value).
    Addends and factors that `reader` has keep their values, also as equations. [] if `recipe` reads no tensor."""
    if not any(True for _ in recipe.sources()):
        return []  # a constant
    item, shape = recipe.parts[0], value.shape
    if (step := _step_key(value.recipe)) is not None and step == _step_key(recipe):  # undone without rounding
        return [(item, ShapedRecipe(value.recipe.parts[0], shape))]
    match recipe:
        case Concat(items, axis):
            length = shape[axis] if axis < len(shape) else 0
            shapes = [_read_shape(i, reader) for i in items]
            sizes = [item_shape[axis] if item_shape else length // len(items) for item_shape in shapes]
            if sum(sizes) != length:
                raise WeftError(f"cannot split a parameter into {_list_sources(recipe)}: their sizes are unknown")
            ends = itertools.accumulate(sizes)
            return [(i, value.slice_axis(axis, end - n, end)) for i, n, end in zip(items, sizes, ends, strict=True)]
        case Add((first, *addends), offset) if addends and (stored := _keep_stored(addends, first, reader)) is not None:
            rest = Add((value.recipe, *(Scale(addend, -1.0) for addend in addends)), -offset)
            return [(first, ShapedRecipe(rest, shape)), *stored]
        case Scale(item, Recipe() as factor, axis) if (stored := _keep_stored([factor], item, reader)) is not None:
            return [(item, ShapedRecipe(Scale(value.recipe, Map(factor, "reciprocal"), axis), shape)), *stored]
        case Permute(_, axes):
            shape = tuple(shape[a] for a in np.argsort(axes))
        case Reshape():
            exact_shape = _read_shape(item, reader) or _infer_shape(item, math.prod(shape))
            shape = exact_shape or _guess_shape(item, shape, layout)
            if shape == value.shape:
                return [(item, value)]
    return [(item, ShapedRecipe(invert_step(recipe, value.recipe, shape), shape))]


def _step_key(recipe: Recipe) -> tuple[object, ...] | None:
    """Return a key that is equal for recipes that apply the same elementwise step to one part; None for others."""
    match recipe:
        case Add((_,), offset):
            return (Add, offset)
        case Scale(_, (int() | float()) as factor):
            return (Scale, factor)
        case Map(_, fn):
            return (Map, fn)
    return None


def _join_slices(parts: list[tuple[Slice, ShapedRecipe]]) -> ShapedRecipe:
    """Return the tensor whose slices along one axis are `parts`, up to the last of them; raise WeftError if they leave
    gaps or overlap."""
    parts = sorted(parts, key=lambda part: part[0].start)
    axis, step, ends = parts[0][0].axis, parts[0][0].step, 0
    read = ", ".join(dict.fromkeys(parts[0][0].sources()))
    if step > 1:
        if [(s.start, s.step) for s, _ in parts] != [(i, step) for i in range(step)]:
            raise WeftError(f"tensor {read} cannot be restored: its slices leave gaps")
        expanded = [v.reshape((*v.shape[: axis + 1], 1, *v.shape[axis + 1 :])) for _, v in parts]
        stack = _concat_tensors(expanded, axis + 1)
        return stack.reshape((*stack.shape[:axis], math.prod(stack.shape[axis : axis + 2]), *stack.shape[axis + 2 :]))
    # Several parameters may read one slice (tied weights): equal slices count once.
    distinct = [next(equal) for _, equal in itertools.groupby(parts, key=lambda part: (part[0].start, part[1]))]
    for s, _ in distinct:
        if (s.axis, s.start, s.step) != (axis, ends, 1):
            raise WeftError(f"tensor {read} cannot be restored: its slices leave gaps")
        ends = s.stop
    return _concat_tensors((value for _, value in distinct), axis)


def _keep_stored(recipes: Iterable[Recipe], item: Recipe, reader: TensorReader) -> list[Equation] | None:
    """Return equations that keep the tensors of `recipes` as stored; None if `reader` lacks one or `item` reads one."""
    keys = _list_keys(recipes)
    if set(keys) - set(reader.keys()) or set(keys) & set(item.sources()):
        return None
    return [(Source(key), ShapedRecipe(Source(key), tuple(reader.shape(key)))) for key in keys]


def _read_shape(recipe: Recipe, reader: TensorReader) -> Shape | None:
    return recipe.shape(reader) if set(recipe.sources()) <= set(reader.keys()) else None


def _infer_shape(recipe: Recipe, count: int) -> Shape | None:
    """Return the shape of the result of `recipe`, which has `count` elements; None if no step of it states one. Items
    of a Concat are taken to have equal shapes."""
    match recipe:
        case Reshape(_, dims):
            size = math.prod(d for d in dims if d != -1)
            return tuple(count // size if d == -1 else d for d in dims)
        case Permute(item, axes):
            inner = _infer_shape(item, count)
            return inner and tuple(inner[a] for a in axes)
        case Slice(Reshape(_, dims), axis, start, stop, step):
            dims_of_slice = (*dims[:axis], len(range(start, stop, step)), *dims[axis + 1 :])
            return _infer_shape(Reshape(Full(0, ()), dims_of_slice), count)
        case Concat(items, axis):
            inner = _infer_shape(items[0], count // len(items))
            return inner and (*inner[:axis], inner[axis] * len(items), *inner[axis + 1 :])
        case Add((item,)) | Scale(item) | Map(item) | Cast(item):
            return _infer_shape(item, count)
    return None


def _guess_shape(recipe: Recipe, shape: Shape, layout: Layout) -> Shape:
    """Return the shape of the tensor that `recipe` reads and reshapes to `shape`: from `layout`, or the usual shape."""
    key, count = next(recipe.sources()), math.prod(shape)
    usual = (count,) if key.endswith("bias") or len(shape) == 1 else (count // shape[-1], shape[-1])
    return layout(key, count) or usual
