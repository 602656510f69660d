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
    above = dict(_above(root, ()))
    keys = unfolded(root) if depth is None else {key for key, around in above.items() if len(around) <= depth}
    above.pop(root.key, None)  # always open
    for name in parts:
        meant = [key for key in above if f".{key}".endswith(f".{name}")]
        if not meant:
            raise unknown("part", name, above, "a part is named by its path or the end of it, as attn or layers.0.attn")
        keys.update(key for m in meant for key in (m, *above[m]))
    return keys


def _above(shape: Shape, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`shape` and every part in it, if it can be opened, with the keys of those that it is in."""
    if shape.arrangement is not None:
        yield shape.key, keys
        for inner in shape.inner:
            yield from _above(inner, (*keys, shape.key))
