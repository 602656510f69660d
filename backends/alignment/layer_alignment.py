"""Alignment of the layers of two models of different depth, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(?=\.|$)")


def find_layer(scope: str) -> str:
    """Return `scope` up to its first numeric component ("layers.3" for "layers.3.attn"); "" if it has none."""
    match = _LAYER.match(scope)
    return match.group() if match else ""


def match_layers(ours: Mapping[str, Counter[str]], theirs: Mapping[str, Counter[str]]) -> dict[str, str]:
    """Map layers of one model ("layers.6") to layers of another ("layers.5"), or to "" if they are absent there.

    The arguments have the contents of each layer, keyed by its scope. Lists of layers with equal names are paired, then
    the other lists in order. In a pair of equal length, layers correspond by position; otherwise by the alignment that
    has the most contents in common. The result omits pairs of lists with equal names and lengths, and unpaired lists.
    """
    lists, their_lists = _group_by_stem(ours), _group_by_stem(theirs)
    scopes: dict[str, str] = {}
    for stem, their_stem in _pair_stems(list(lists), list(their_lists)).items():
        a, b = lists[stem], their_lists[their_stem]
        if stem == their_stem and len(a) == len(b):
            continue
        pairs = list(enumerate(range(len(b))))
        if len(a) != len(b):
            pairs = align_sequences([[(ours[x] & theirs[y]).total() for y in b] for x in a])
        scopes |= dict.fromkeys(a, "") | {a[i]: b[j] for i, j in pairs}
    return scopes


def align_sequences(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return pairs (i, j), increasing in i and in j, with the largest sum of scores[i][j] (Needleman, Wunsch 1970)."""
    rows, columns = len(scores), len(scores[0]) if scores else 0
    best = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            best[i][j] = max(scores[i][j] + best[i + 1][j + 1], best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < rows and j < columns:
        if best[i][j] == scores[i][j] + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _group_by_stem(layers: Mapping[str, Counter[str]]) -> dict[str, list[str]]:
    """Map the prefix of each list of layers ("layers.") to the scopes of its layers."""
    stems: dict[str, list[str]] = {}
    for layer in layers:
        stems.setdefault(layer.rstrip("0123456789"), []).append(layer)
    return stems


def _pair_stems(ours: list[str], theirs: list[str]) -> dict[str, str]:
    equal = [stem for stem in ours if stem in theirs]
    our_rest, their_rest = ([s for s in stems if s not in equal] for stems in (ours, theirs))
    return dict(zip(equal, equal, strict=True)) | dict(zip(our_rest, their_rest, strict=False))
