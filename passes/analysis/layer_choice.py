"""Which layers a pass is for: its argument `layers`.

Layer i is the i-th attention of a text to itself, as caches are numbered; those of an encoder come before those of its
decoder. The argument is

- ``all``, ``even`` (0, 2, 4 …) or ``odd``,
- a number (-1 is the last layer), a list of them, or text such as ``"0-5, 8"``,
- a pattern that repeats: ``"local*5 + global"``, also written ``"5:1"``, are the first five of every six.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from weft.ir import Graph, Node, WeftError

from .memory import remembers

Layers = str | int | tuple[int, ...]
ROLES = ("local", "global")


def self_attentions(graph: Graph, name: str) -> list[Node]:
    """The layers of `graph`: the softmax attentions whose keys are as many as their queries.

    Raises:
        WeftError: in the name of the pass `name`, if there are none, or if they have caches.
    """
    need_early(graph, name)
    found = [n for n in graph.nodes if n.op.name in ("attention", "relative_attention") and _to_itself(n)]
    if not found:
        raise WeftError(f"{name}: graph {graph.name} has no softmax attention of a text to itself")
    return found


def need_early(graph: Graph, name: str) -> None:
    """Raise WeftError in the name of the pass `name` if `graph` has caches, or rotations inside attentions."""
    if remembers(graph):
        raise WeftError(f"{name}: graph {graph.name} has caches already; run {name} before kv-cache")
    if any(node.op.name == "rotary_attention" for node in graph.nodes):
        raise WeftError(f"{name}: rotations are fused with attentions already; run {name} before fuse-rope-attention")


def chosen(graph: Graph, layers: Layers, name: str) -> list[Node]:
    """The self-attentions of `graph` that `layers` says, in order.

    Raises:
        WeftError: in the name of the pass `name`, if `layers` cannot be read or a layer does not exist.
    """
    found = self_attentions(graph, name)
    try:
        return [found[i] for i in numbers(layers, len(found))]
    except WeftError as e:
        raise WeftError(f"{name}: {e}") from None


def numbers(layers: Layers, count: int) -> list[int]:
    """The layers, of `count`, that `layers` says, in order.

    Raises:
        WeftError: if it cannot be read, names a layer that does not exist, or says none.
    """
    wanted = list[int]()
    for i in _read(layers, count):
        if not -count <= i < count:
            raise WeftError(f"there is no layer {i}; the graph has layers 0 to {count - 1}")
        wanted.append(i)
    if not wanted:
        raise WeftError(f"layers={layers!r} says none of the layers 0 to {count - 1}")
    return sorted({i % count for i in wanted})


def _read(layers: Layers, count: int) -> Iterable[int]:
    """The numbers that `layers` says, as they are; of a range that goes too far they are not all made."""
    if not isinstance(layers, str):
        return [layers] if isinstance(layers, int) else layers
    text = layers.strip()
    if text in ("all", "even", "odd"):
        return range(text == "odd", count, 1 if text == "all" else 2)
    if any(role in text for role in ROLES) or ":" in text:
        return [i for i, role in enumerate(roles(text, count)) if role == "local"]
    return itertools.chain.from_iterable(_range(part.strip(), layers) for part in text.split(","))


def roles(pattern: str | Sequence[str], count: int) -> list[str]:
    """``local`` or ``global`` for each of `count` layers: `pattern`, as text or as a list of the two words, repeats.

    Raises:
        WeftError: if it cannot be read.
    """
    if isinstance(pattern, str):
        period = _ratio(pattern, count)
        if period is None:
            period = [role for part in pattern.split("+") for role in _repeated(part, pattern, count)]
    else:
        period = list(pattern)
    if not period or not set(period) <= set(ROLES):
        raise WeftError(f'pattern {pattern!r} is neither "5:1", "local*5 + global" nor a list of local and global')
    return list(itertools.islice(itertools.cycle(period), count))


def _ratio(text: str, count: int) -> list[str] | None:
    """What ``5:1`` stands for; of each role no more than `count`."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
    if match is None:
        return None
    return ["local"] * min(int(match[1]), count) + ["global"] * min(int(match[2]), count)


def _repeated(part: str, pattern: str, count: int) -> list[str]:
    """What ``local*5`` stands for; no more than `count`."""
    match = re.fullmatch(r"\s*([a-z]+)\s*(?:\*\s*(\d{1,9})\s*)?", part)
    if match is None:
        raise WeftError(f"cannot read {part.strip()!r} of pattern {pattern!r}: it takes local or global, with *number")
    return [match[1]] * min(int(match[2] or 1), count)


def _range(part: str, layers: str) -> range:
    """What ``3`` and ``0-5`` stand for."""
    match = re.fullmatch(r"(-?\d{1,9})(?:\s*-\s*(\d{1,9}))?", part)
    if match is None:
        raise WeftError(
            f'cannot read {part!r} of layers={layers!r}: it takes all, even, odd, "0-5, 8" or "local*5 + global"'
        )
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise WeftError(f"layers={layers!r} ends at {last} before it begins at {first}")
    return range(first, last + 1)


def _to_itself(node: Node) -> bool:
    q, k = node.operand("q"), node.operand("k")
    return q is not None and k is not None and q.shape[1] == k.shape[1]
