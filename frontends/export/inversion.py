"""Recipes read backwards: from parameters to the checkpoint tensors they are made of.

`restore` computes the values of known tensors: what moves numbers is undone exactly, arithmetic in float64 and rounded
once to float32. `inverted` computes nothing: it returns recipes of the tensors over the parameters of a graph, whose
shapes follow from those of the parameters. Both undo a recipe step by step, by `inverse`.
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
Layout = Callable[[str, int], Shape | None]  # a tensor's name and how many numbers it has -> its shape
_INVERSES = {"neg": "neg", "exp": "log", "log": "exp", "reciprocal": "reciprocal"}


def inverse(recipe: Recipe, value: Recipe, shape: Shape) -> Recipe:
    """Undo the last step of `recipe`, which made `value` of its one part, of `shape`: return the recipe of that part.

    Raises:
        WeftError: if the step has no inverse, or reads several parts.
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
            return value  # its results are among its arguments
    raise WeftError(f"the recipe {recipe.name}, which reads {_read(recipe)}, has no inverse")


def _read(recipe: Recipe) -> str:
    return ", ".join(_sources([recipe]))


class Group(NamedTuple):
    """Parameters and the checkpoint keys that they, and no other parameters, read."""

    params: tuple[str, ...]
    keys: tuple[str, ...]


class Piece(NamedTuple):
    """Part of the tensor `key` that is determined: its `values` where `known`, both of its shape."""

    key: str
    values: Array
    known: Array


def groups(graph: Graph) -> list[Group]:
    """The parameters of `graph` that read checkpoint tensors, and those tensors, in the order of the parameters."""
    reads = nx.Graph()
    for name, param in graph.params.items():
        reads.add_edges_from((("param", name), ("key", key)) for key in param.recipe.sources())
    at = {node: i for i, node in enumerate(reads)}
    components = []
    for component in nx.connected_components(reads):
        nodes = sorted(component, key=at.__getitem__)
        params, keys = (tuple(name for kind, name in nodes if kind == wanted) for wanted in ("param", "key"))
        components.append(Group(params, keys))
    return components


def restore(graph: Graph, *, params: Mapping[str, Array] | None = None) -> Iterator[tuple[str, Array]]:
    """Every checkpoint tensor that the parameters of `graph` read, as (key, float32 values), in the order of `groups`.

    `params` are the values of parameters by name; of those not given, the recipes say them. One group is held in
    memory at a time.

    Raises:
        WeftError: if a parameter is unknown or of another shape, a recipe has no inverse, parameters that read the same
            numbers disagree about them, or numbers of a tensor are read by none.
    """
    values = params or {}
    for name in values:
        if name not in graph.params:
            raise WeftError(f"graph {graph.name} has no parameter {name!r}")
    for group in groups(graph):
        yield from _restored(graph, group, values).items()


def _restored(graph: Graph, group: Group, given: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of `group`, by key."""
    tensors = {key: _blank(graph.reader.shape(key)) for key in group.keys}
    for name in group.params:
        recipe, shape = graph.params[name].recipe, graph.params[name].shape
        value = np.asarray(given[name] if name in given else recipe.evaluate(graph.reader))
        if value.shape != shape:
            raise WeftError(f"parameter {name} is {list(shape)}, but its value is {list(value.shape)}")
        try:
            for key, values, known in undo(recipe, value, graph.reader):
                _put(*tensors[key], values, known, key)
        except WeftError as e:
            raise WeftError(f"{name}: {e}") from None
    for key, (_, known) in tensors.items():
        if not known.all():
            missing = known.size - int(np.count_nonzero(known))
            raise WeftError(f"{missing} of the {known.size} numbers of tensor {key!r} are read by no parameter")
    return {key: values for key, (values, _) in tensors.items()}


def undo(recipe: Recipe, value: Array, reader: TensorReader) -> Iterator[Piece]:
    """Solve for the tensors in `reader` that `recipe` reads, given its `value`.

    Raises:
        WeftError: naming the step that has no inverse, and the tensors it reads.
    """
    yield from _undo(recipe, value, np.broadcast_to(np.True_, value.shape), reader)


def _undo(recipe: Recipe, value: Array, known: Array, reader: TensorReader) -> Iterator[Piece]:
    if isinstance(recipe, Source):
        yield Piece(recipe.key, value, known)
        return
    if not _read(recipe):
        return  # a constant
    shape = recipe.parts[0].shape(reader)
    match recipe:
        case Concat(items, axis):
            at = np.cumsum([item.shape(reader)[axis] for item in items])[:-1]
            for item, v, k in zip(items, np.split(value, at, axis), np.split(known, at, axis), strict=True):
                yield from _undo(item, v, k, reader)
            return
        case Add((first, *others), offset) if others and not set(first.sources()) & set(_sources(others)):
            # The first takes the change, the others stay as they are stored.
            for key in _sources(others):
                yield _stored_piece(key, reader)
            rest = sum((other.evaluate(reader).astype(np.float64) for other in others), np.float64(offset))
            yield from _undo(first, (value - rest).astype(np.float32), known, reader)
            return
        case Scale(item, Recipe() as factor, axis) if not set(item.sources()) & set(factor.sources()):
            for key in _sources([factor]):  # they stay as they are stored
                yield _stored_piece(key, reader)
            by = factor.evaluate(reader).astype(np.float64).reshape(-1, *(1,) * (value.ndim - axis - 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                yield from _undo(item, (value / by).astype(np.float32), known & (by != 0), reader)
            return
        case Slice(_, axis, start, stop, step):
            whole, seen = _blank(shape, value.dtype)
            cut = (slice(None),) * axis + (slice(start, stop, step),)
            whole[cut], seen[cut] = value, known
        case Take(_, indices, axis):  # some may be missing, others repeated
            whole, seen = _blank(shape, value.dtype)
            rows, seen_rows, value, known = (np.moveaxis(t, axis, 0) for t in (whole, seen, value, known))
            for n, i in enumerate(indices):
                _put(rows[i : i + 1], seen_rows[i : i + 1], value[n : n + 1], known[n : n + 1], _read(recipe))
        case _:
            undone = inverse(recipe, Source("value"), shape)
            if isinstance(recipe, Permute | Reshape):
                whole, seen = (undone.evaluate(MemoryReader({"value": array})) for array in (value, known))
            else:
                with np.errstate(all="ignore"):  # what is not known may be no argument of the inverse
                    whole = undone.evaluate(MemoryReader({"value": value.astype(np.float64)})).astype(np.float32)
                seen = known
    yield from _undo(recipe.parts[0], whole, seen, reader)


def _stored_piece(key: str, reader: TensorReader) -> Piece:
    stored = Source(key).evaluate(reader)
    return Piece(key, stored, np.broadcast_to(np.True_, stored.shape))


def _sources(recipes: Iterable[Recipe]) -> list[str]:
    """The tensors that `recipes` read, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(recipe.sources() for recipe in recipes)))


def _blank(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[Array, Array]:
    return np.zeros(shape, dtype), np.zeros(shape, np.bool_)


def _put(into: Array, seen: Array, values: Array, known: Array, what: str) -> None:
    """Add what is `known` of `values` to `into`, where it must agree with what was `seen` before."""
    both = seen & known
    if both.any() and not np.array_equal(into[both], values[both], equal_nan=True):
        raise WeftError(f"numbers of {what} are read more than once, and differ: give all who read them the same")
    np.copyto(into, values, where=known, casting="same_kind")
    seen |= known


class Made(NamedTuple):
    """A tensor: how it is made, and its shape."""

    recipe: Recipe
    shape: Shape

    def reshaped(self, shape: Shape) -> Made:
        return self if shape == self.shape else Made(Reshape(self.recipe, shape), shape)

    def cut(self, axis: int, start: int, stop: int) -> Made:
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return self if shape == self.shape else Made(Slice(self.recipe, axis, start, stop), shape)


def _joined(parts: Iterable[Made], axis: int) -> Made:
    parts = tuple(parts)
    size = sum(p.shape[axis] for p in parts)
    shape = (*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :])
    return parts[0] if len(parts) == 1 else Made(Concat(tuple(p.recipe for p in parts), axis), shape)


def inverted(
    equations: Iterable[tuple[Recipe, Made]],
    layout: Layout = lambda name, count: None,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Made]:
    """The tensors of a checkpoint from whose reading by recipes come the parameters `equations`, each (recipe, value).

    `shapes` are those of tensors where they are known. Of another that is read reshaped, `layout` may say the shape,
    else biases are vectors, and others matrices whose last axis stays; of others that are joined, all are as long.

    Raises:
        WeftError: if a recipe has no inverse, or parameters that read one tensor disagree.
    """
    known = MemoryReader({key: np.broadcast_to(np.float32(0), shape) for key, shape in (shapes or {}).items()})
    waiting, solved = list(equations), dict[str, Made]()
    while waiting:
        # Slices wait until all other steps are undone; then those of one item are joined.
        parts: dict[Recipe, list[tuple[Slice, Made]]] = {}
        while waiting:
            recipe, value = waiting.pop(0)
            if isinstance(recipe, Source):
                if solved.setdefault(recipe.key, value) != value:
                    raise WeftError(f"tensor {recipe.key!r} is shared by parameters that differ")
            elif isinstance(recipe, Slice):
                parts.setdefault(recipe.item, []).append((recipe, value))
            else:
                waiting += _undone(recipe, value, layout, known)
        waiting = [(item, _together(cuts)) for item, cuts in parts.items()]
    return solved


def _undone(recipe: Recipe, value: Made, layout: Layout, reader: TensorReader) -> list[tuple[Recipe, Made]]:
    """Invert the last step of `recipe` on `value`: its parts, each with its value."""
    if not any(True for _ in recipe.sources()):
        return []  # a constant
    item, shape = recipe.parts[0], value.shape
    if (same := _step(value.recipe)) is not None and same == _step(recipe):  # undone without rounding
        return [(item, Made(value.recipe.parts[0], shape))]
    match recipe:
        case Concat(items, axis):
            length = shape[axis] if axis < len(shape) else 0
            sizes = [known[axis] if (known := _known(i, reader)) else length // len(items) for i in items]
            if sum(sizes) != length:
                raise WeftError(f"the sizes of {_read(recipe)}, which are read as one, are not known")
            ends = itertools.accumulate(sizes)
            return [(i, value.cut(axis, end - n, end)) for i, n, end in zip(items, sizes, ends, strict=True)]
        case Add((first, *others), offset) if others and (kept := _kept(others, first, reader)) is not None:
            rest = Add((value.recipe, *(Scale(other, -1.0) for other in others)), -offset)
            return [(first, Made(rest, shape)), *kept]
        case Scale(item, Recipe() as factor, axis) if (kept := _kept([factor], item, reader)) is not None:
            return [(item, Made(Scale(value.recipe, Map(factor, "reciprocal"), axis), shape)), *kept]
        case Permute(_, axes):
            shape = tuple(shape[a] for a in np.argsort(axes))
        case Reshape():
            shape = _known(item, reader) or _shape(item, math.prod(shape)) or _stored(item, shape, layout)
            if shape == value.shape:
                return [(item, value)]
    return [(item, Made(inverse(recipe, value.recipe, shape), shape))]


def _step(recipe: Recipe) -> tuple[object, ...] | None:
    """Return a key of the elementwise step that `recipe` applies to its one part; None if it is not elementwise."""
    match recipe:
        case Add((_,), offset):
            return (Add, offset)
        case Scale(_, (int() | float()) as factor):
            return (Scale, factor)
        case Map(_, fn):
            return (Map, fn)
    return None


def _together(parts: list[tuple[Slice, Made]]) -> Made:
    """The tensor whose slices along one axis are `parts`."""
    parts = sorted(parts, key=lambda part: part[0].start)
    axis, step, ends = parts[0][0].axis, parts[0][0].step, 0
    read = ", ".join(dict.fromkeys(parts[0][0].sources()))
    if step > 1:
        if [(s.start, s.step) for s, _ in parts] != [(i, step) for i in range(step)]:
            raise WeftError(f"the slices of {read} do not make it whole")
        apart = [v.reshaped((*v.shape[: axis + 1], 1, *v.shape[axis + 1 :])) for _, v in parts]
        whole = _joined(apart, axis + 1)
        return whole.reshaped((*whole.shape[:axis], math.prod(whole.shape[axis : axis + 2]), *whole.shape[axis + 2 :]))
    # Several parameters may read one slice (tied weights): equal ones count once.
    distinct = [next(same) for _, same in itertools.groupby(parts, key=lambda part: (part[0].start, part[1]))]
    for s, _ in distinct:
        if (s.axis, s.start, s.step) != (axis, ends, 1):
            raise WeftError(f"the slices of {read} do not make it whole")
        ends = s.stop
    return _joined((value for _, value in distinct), axis)


def _kept(others: Iterable[Recipe], item: Recipe, reader: TensorReader) -> list[tuple[Recipe, Made]] | None:
    """The tensors that `others` read, to stay as they are stored, if they are known and `item` reads none of them."""
    keys = _sources(others)
    if set(keys) - set(reader.keys()) or set(keys) & set(item.sources()):
        return None
    return [(Source(key), Made(Source(key), tuple(reader.shape(key)))) for key in keys]


def _known(recipe: Recipe, reader: TensorReader) -> Shape | None:
    """The shape of what `recipe` makes of tensors in `reader`, if it has them all."""
    return recipe.shape(reader) if set(recipe.sources()) <= set(reader.keys()) else None


def _shape(recipe: Recipe, count: int) -> Shape | None:
    """The shape of what `recipe` makes, `count` numbers, as far as the recipe itself tells."""
    match recipe:
        case Reshape(_, dims):
            known = math.prod(d for d in dims if d != -1)
            return tuple(count // known if d == -1 else d for d in dims)
        case Permute(item, axes):
            inner = _shape(item, count)
            return inner and tuple(inner[a] for a in axes)
        case Slice(Reshape(_, dims), axis, start, stop, step):
            cut = (*dims[:axis], len(range(start, stop, step)), *dims[axis + 1 :])
            return _shape(Reshape(Full(0, ()), cut), count)
        case Concat(items, axis):
            inner = _shape(items[0], count // len(items))
            return inner and (*inner[:axis], inner[axis] * len(items), *inner[axis + 1 :])
        case Add((item,)) | Scale(item) | Map(item) | Cast(item):
            return _shape(item, count)
    return None


def _stored(recipe: Recipe, shape: Shape, layout: Layout) -> Shape:
    """The shape of the tensor that `recipe` reads, which is reshaped to `shape`."""
    key, count = next(recipe.sources()), math.prod(shape)
    usual = (count,) if key.endswith("bias") or len(shape) == 1 else (count // shape[-1], shape[-1])
    return layout(key, count) or usual
