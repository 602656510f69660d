"""A family's recipes read backwards: the recipes of its checkpoint's tensors, over the parameters of a graph.

`weft.frontends.export.inverse` restores the values of known tensors. Here nothing is evaluated, and shapes follow from
those of the parameters. Parts of one tensor (packed q, k and v) are joined; what moves or scales numbers is undone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes import Add, Cast, Concat, Full, Map, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.recipe import Recipe

Shape = tuple[int, ...]
Layout = Callable[[str, int], Shape | None]  # a tensor's name and how many numbers it has -> its shape
_INVERSES = {
    "neg": ("neg",),
    "exp": ("log",),
    "log": ("exp",),
    "reciprocal": ("reciprocal",),
}


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


def inverted(equations: Iterable[tuple[Recipe, Made]], layout: Layout = lambda name, count: None) -> dict[str, Made]:
    """The tensors of a checkpoint from whose reading by recipes come the parameters `equations`, each (recipe, value).

    Of a tensor that is read reshaped, `layout` may say the shape; otherwise biases are vectors, and others matrices
    whose last axis stays.

    Raises:
        WeftError: if a recipe has no inverse, or parameters that read one tensor disagree.
    """
    waiting, solved = list(equations), dict[str, Made]()
    while waiting:
        parts: dict[Recipe, list[tuple[Slice, Made]]] = {}
        while waiting:
            recipe, value = waiting.pop(0)
            if isinstance(recipe, Source):
                if solved.setdefault(recipe.key, value) != value:
                    raise WeftError(f"tensor {recipe.key!r} is shared by parameters that differ")
            elif isinstance(recipe, Slice):
                parts.setdefault(recipe.item, []).append((recipe, value))
            else:
                waiting += _undone(recipe, value, layout)
        waiting = [(item, _together(known)) for item, known in parts.items()]
    return solved


def _undone(recipe: Recipe, value: Made, layout: Layout) -> list[tuple[Recipe, Made]]:
    """Invert the last step of `recipe` on `value`: its parts, each with its value."""
    if (same := _step(value.recipe)) is not None and same == _step(recipe):  # undone without rounding
        return [(recipe.parts[0], Made(value.recipe.parts[0], value.shape))]
    match recipe:
        case Permute(item, axes):
            back = tuple(int(a) for a in np.argsort(axes))
            return [(item, Made(Permute(value.recipe, back), tuple(value.shape[a] for a in back)))]
        case Reshape(item, _):
            return [(item, value.reshaped(_shape(item, math.prod(value.shape)) or _stored(item, value.shape, layout)))]
        case Concat(items, axis):
            each = value.shape[axis] // len(items)
            starts = range(0, value.shape[axis], each)
            return [(item, value.cut(axis, at, at + each)) for item, at in zip(items, starts, strict=True)]
        case Scale(item, (int() | float()) as factor) if factor:
            return [(item, Made(Scale(value.recipe, 1 / factor), value.shape))]
        case Add((item,), offset):
            return [(item, Made(Add((value.recipe,), -offset), value.shape))]
        case Map(item, fn) if fn in _INVERSES:
            inverse = value.recipe
            for step in _INVERSES[fn]:
                inverse = Map(inverse, step)
            return [(item, Made(inverse, value.shape))]
        case Cast(item, _):
            return [(item, value)]
        case Take(item, indices, axis) if sorted(indices) == list(range(len(indices))):
            back = tuple(int(i) for i in np.argsort(indices))
            return [(item, Made(Take(value.recipe, back, axis), value.shape))]
    if not any(True for _ in recipe.sources()):
        return []
    raise WeftError(f"the recipe {recipe.name}, which reads {', '.join(recipe.sources())}, has no inverse")


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
    distinct = [next(same) for _, same in itertools.groupby(parts, key=lambda part: (part[0].start, part[1]))]
    for s, _ in distinct:
        if (s.axis, s.start, s.step) != (axis, ends, 1):
            raise WeftError(f"the slices of {read} do not make it whole")
        ends = s.stop
    return _joined((value for _, value in distinct), axis)


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
        case Add((item,)) | Scale(item) | Map(item) | Cast(item):
            return _shape(item, count)
    return None


def _stored(recipe: Recipe, shape: Shape, layout: Layout) -> Shape:
    """The shape of the tensor that `recipe` reads, which is reshaped to `shape`."""
    key, count = next(recipe.sources()), math.prod(shape)
    usual = (count,) if key.endswith("bias") or len(shape) == 1 else (count // shape[-1], shape[-1])
    return layout(key, count) or usual
