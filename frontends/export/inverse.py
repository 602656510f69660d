"""Recipes read backwards: from the values of parameters to the checkpoint tensors they were made of.

Data movement (concatenations, slices, permutations, gathers) is undone exactly; a number added or multiplied and an
invertible function of every element are undone in float64 and rounded once to float32. What is restored are the
tensors that parameters read, a group at a time: a group is what hangs together, as the parts of a packed tensor do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import networkx as nx
import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Add, Cast, Concat, Map, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.recipe import Recipe

INVERSES: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "exp": np.log,
    "log": np.exp,
    "reciprocal": np.reciprocal,
}


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
    read = ", ".join(dict.fromkeys(recipe.sources()))
    if not read:
        return  # a constant
    inner = recipe.parts[0]
    match recipe:
        case Concat(items, axis):
            at = np.cumsum([item.shape(reader)[axis] for item in items])[:-1]
            for item, v, k in zip(items, np.split(value, at, axis), np.split(known, at, axis), strict=True):
                yield from _undo(item, v, k, reader)
            return
        case Permute(_, axes):
            back = np.argsort(axes)
            value, known = value.transpose(back), known.transpose(back)
        case Reshape():
            shape = inner.shape(reader)
            value, known = value.reshape(shape), known.reshape(shape)
        case Slice(_, axis, start, stop, step):
            whole, seen = _blank(inner.shape(reader))
            cut = (slice(None),) * axis + (slice(start, stop, step),)
            whole[cut], seen[cut] = value, known
            value, known = whole, seen
        case Take(_, indices, axis):
            whole, seen = _blank(inner.shape(reader))
            rows, seen_rows, value, known = (np.moveaxis(t, axis, 0) for t in (whole, seen, value, known))
            for n, i in enumerate(indices):
                _put(rows[i : i + 1], seen_rows[i : i + 1], value[n : n + 1], known[n : n + 1], read)
            value, known = whole, seen
        case Scale(_, (int() | float()) as factor) if factor:
            value = _rounded(value.astype(np.float64) / factor)
        case Add((_,), offset):
            value = _rounded(value.astype(np.float64) - offset) if offset else value
        case Map(_, fn) if fn in INVERSES:
            with np.errstate(all="ignore"):  # what was not known may be no argument of the inverse
                value = _rounded(INVERSES[fn](value.astype(np.float64)))
        case Cast():
            pass  # its results are among its arguments
        case _:
            raise WeftError(f"the recipe {recipe.name}, which reads {read}, has no inverse")
    yield from _undo(inner, value, known, reader)


def _rounded(value: Array) -> Array:
    return value.astype(np.float32)


def _blank(shape: tuple[int, ...]) -> tuple[Array, Array]:
    return np.zeros(shape, np.float32), np.zeros(shape, np.bool_)


def _put(into: Array, seen: Array, values: Array, known: Array, what: str) -> None:
    """Add what is `known` of `values` to `into`, where it must agree with what was `seen` before."""
    both = seen & known
    if both.any() and not np.array_equal(into[both], values[both], equal_nan=True):
        raise WeftError(f"numbers of {what} are read more than once, and differ: give all who read them the same")
    np.copyto(into, values, where=known, casting="same_kind")
    seen |= known
