"""Choice of the parts that are open in a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.ir.errors import unknown_name_error

from .scene import Shape, list_default_open


def select_open(root: Shape, depth: int | None = None, parts: Iterable[str] = ()) -> set[str]:
    """Return the keys of the shapes to open: `root`, those chosen by `depth`, and `parts` with their containers.

    `depth`: the maximum number of containers of an open shape (0: `root` only); None: layers and their containers.
    `parts`: keys, or ends of keys that name every part with that end ("attn").

    Raises:
        WeftError: if no part that can be opened has such a name.
    """
    above = dict(_list_containers(root, ()))
    keys = list_default_open(root) if depth is None else {key for key, around in above.items() if len(around) <= depth}
    above.pop(root.key, None)  # always open
    for name in parts:
        matches = [key for key in above if f".{key}".endswith(f".{name}")]
        if not matches:
            hint = "name a part by its path or the end of its path, such as layers.0.attn or attn"
            raise unknown_name_error("part", name, above, hint)
        keys.update(key for m in matches for key in (m, *above[m]))
    return keys


def _list_containers(shape: Shape, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (key, keys of its containers, outermost first) for `shape` and each shape inside it that can open; `keys`
    are the containers of `shape`."""
    if shape.arrangement is not None:
        yield shape.key, keys
        for inner in shape.inner:
            yield from _list_containers(inner, (*keys, shape.key))
