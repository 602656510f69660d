"""Alignment of the layers of two networks of different depth, by structure and weights, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..model.network import Network, Vertex

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(?=\.|$)")

Layers = dict[str, list[Vertex]]  # operations by the scope of their layer, in order


def match_layers(before: Network, after: Network) -> dict[str, str]:
    """Map scopes of layers of `before` to their scopes in `after` ("layers.6": "layers.5"), or to "" if removed.

    Lists of layers with equal names are paired, then the other lists in order. In a pair of equal length, layers
    correspond by position; otherwise by the alignment that has the most operations in common (Needleman and Wunsch
    1970). The result omits pairs of lists with equal names and lengths, and unpaired lists.
    """
    ours, theirs = _find_layer_lists(before), _find_layer_lists(after)
    scopes: dict[str, str] = {}
    for stem, other in _pair_layer_lists(list(ours), list(theirs)).items():
        a, b = ours[stem], theirs[other]
        if stem == other and len(a) == len(b):
            continue
        names, new_names = list(a), list(b)
        pairs = list(enumerate(range(len(b)))) if len(a) == len(b) else _align(_count_ops(a), _count_ops(b))
        scopes |= dict.fromkeys(names, "") | {names[i]: new_names[j] for i, j in pairs}
    return scopes


def find_layer_scope(scope: str) -> str:
    """Return `scope` up to its first numeric component ("layers.3" for "layers.3.attn"); "" if it has none."""
    match = _LAYER.match(scope)
    return match.group() if match else ""


def _find_layer_lists(network: Network) -> dict[str, Layers]:
    """Map the prefix of each list of layers ("layers.") to its layers: scope of the layer → its operations."""
    stacks: dict[str, Layers] = {}
    for v in network.vertices:
        if layer := _LAYER.match(v.scope):
            stacks.setdefault(layer[1], {}).setdefault(layer.group(), []).append(v)
    return stacks


def _pair_layer_lists(ours: list[str], theirs: list[str]) -> dict[str, str]:
    equal = [stem for stem in ours if stem in theirs]
    our_rest, their_rest = ([s for s in stems if s not in equal] for stems in (ours, theirs))
    return dict(zip(equal, equal, strict=True)) | dict(zip(our_rest, their_rest, strict=False))


def _count_ops(layers: Layers) -> list[Counter[str]]:
    """Count the operations of each layer: by name and operator, and again with attributes, types and weights."""
    counters = []
    for layer, vertices in layers.items():
        parts = Counter[str]()
        for v in vertices:
            local = f"{v.name.removeprefix(layer)} {v.op}"
            weights = [(w.shape, w.dtype, w.recipe) for w in v.weights]
            parts.update((local, f"{local} {dict(v.attrs)} {v.types} {weights}"))
        counters.append(parts)
    return counters


def _align(a: Sequence[Counter[str]], b: Sequence[Counter[str]]) -> list[tuple[int, int]]:
    """Return pairs (i, j), increasing in i and in j, for which the a[i] and b[j] have the most elements in common."""
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
