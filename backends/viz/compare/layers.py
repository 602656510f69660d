"""Align the layers of two networks of different depth by structure and weights, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..model.network import Network, Vertex

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(?=\.|$)")

Layers = dict[str, list[Vertex]]  # operations by the scope of their layer, in order


def renamed(before: Network, after: Network) -> dict[str, str]:
    """The scopes of layers of `before` that are others in `after` ("layers.6": "layers.5"); "" for those that are in no
    way there.

    Lists of layers correspond by name, then by order. Of two that are equally long, layers correspond by position. Of
    others, in order, those that have most in common (Needleman and Wunsch 1970), earlier ones first.
    """
    ours, theirs = _stacks(before), _stacks(after)
    renamed: dict[str, str] = {}
    for stem, other in _paired(list(ours), list(theirs)).items():
        a, b = ours[stem], theirs[other]
        if stem == other and len(a) == len(b):
            continue
        names, others = list(a), list(b)
        pairs = list(enumerate(range(len(b)))) if len(a) == len(b) else _aligned(_parts(a), _parts(b))
        renamed |= dict.fromkeys(names, "") | {names[i]: others[j] for i, j in pairs}
    return renamed


def layer_of(scope: str) -> str:
    """The scope of the layer that `scope` is in; "" if in none."""
    match = _LAYER.match(scope)
    return match.group() if match else ""


def _stacks(network: Network) -> dict[str, Layers]:
    """Layers by what their scopes have before the number."""
    stacks: dict[str, Layers] = {}
    for v in network.vertices:
        if layer := _LAYER.match(v.scope):
            stacks.setdefault(layer[1], {}).setdefault(layer.group(), []).append(v)
    return stacks


def _paired(ours: list[str], theirs: list[str]) -> dict[str, str]:
    """Equal names, and those left in order."""
    same = [stem for stem in ours if stem in theirs]
    left, right = ([s for s in stems if s not in same] for stems in (ours, theirs))
    return dict(zip(same, same, strict=True)) | dict(zip(left, right, strict=False))


def _parts(layers: Layers) -> list[Counter[str]]:
    """Describe each layer by its operations: once by their names, once with all their attributes."""
    counters = []
    for layer, vertices in layers.items():
        parts = Counter[str]()
        for v in vertices:
            local = f"{v.name.removeprefix(layer)} {v.op}"
            weights = [(w.shape, w.dtype, w.recipe) for w in v.weights]
            parts.update((local, f"{local} {dict(v.attrs)} {v.types} {weights}"))
        counters.append(parts)
    return counters


def _aligned(a: Sequence[Counter[str]], b: Sequence[Counter[str]]) -> list[tuple[int, int]]:
    """The pairs of places, growing in both sequences, whose elements have most in common."""
    common = [[(x & y).total() for y in b] for x in a]
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            best[i][j] = max(common[i][j] + best[i + 1][j + 1], best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if best[i][j] == common[i][j] + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs
