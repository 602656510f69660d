"""Choose the parts that a picture has open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.ir.errors import unknown

from .scene import Shape, unfolded


def opened(root: Shape, depth: int | None = None, parts: Iterable[str] = ()) -> set[str]:
    """The keys of open parts: those that are within fewer than `depth` others (None: layers, and what they are in), and
    those that `parts` names, by their keys or the ends of them, with what they are in.

    Raises:
        WeftError: if no part that can be opened is called so.
    """
    keys = unfolded(root) if depth is None else {key for key, level in _levels(root, 0) if level <= depth}
    above = dict(_above(root, (root.key,)))
    for name in parts:
        meant = [key for key in above if f".{key}".endswith(f".{name}")]
        if not meant:
            raise unknown("part", name, above, "a part is named by its path or the end of it, as attn or layers.0.attn")
        keys.update(key for m in meant for key in (m, *above[m]))
    return keys


def _levels(shape: Shape, level: int) -> Iterator[tuple[str, int]]:
    """Every part that can be opened, with how many others it is in."""
    if shape.arrangement is not None:
        yield shape.key, level
        for inner in shape.inner:
            yield from _levels(inner, level + 1)


def _above(shape: Shape, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every part in `shape` that can be opened, with the keys of those that it is in."""
    for inner in shape.inner:
        if inner.arrangement is not None:
            yield inner.key, keys
            yield from _above(inner, (*keys, inner.key))
