"""Totals of a network, to compare two: the numbers of `weft inspect --json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weft.ir.types import sizes

from .facts import facts
from .network import Network
from .outline import Part

ITEM = 2  # bytes of a number in a cache, as f16


@dataclass(frozen=True)
class Totals:
    """Operations; learned numbers; FLOPs of a text of `tokens` tokens; bytes that the cache takes for a token and
    recurrences keep for a text, where a number takes two; bytes of the weights as they are stored.

    `open` of the weights are f32, which is what a model has that nothing has cast: it can be had in any dtype. `dtypes`
    are those that at least a hundredth of the bytes is stored in, the most first.
    """

    operations: int
    parameters: int
    flops: int
    cache: int
    state: int
    weights: int
    tokens: int
    open: int = 0
    dtypes: tuple[str, ...] = ()


def totals(network: Network, tokens: int) -> Totals:
    """Those of `network`, for a text of so many tokens."""
    totals = facts(Part(network.name, "", network.vertices))
    binding = dict.fromkeys(sizes.names(totals.flops), tokens) | {"batch": 1, "past": 0}
    numbers, others = totals.state
    weights = {w.name: w for w in (*network.unread, *(w for v in network.vertices for w in v.weights))}.values()
    stored: Counter[str] = Counter()
    for weight in weights:
        stored[weight.dtype] += weight.bytes
    return Totals(
        len(network.vertices),
        totals.parameters + sum(w.learned for w in network.unread),
        sizes.evaluate(totals.flops, binding),
        sum(totals.cache.values()) * ITEM,
        numbers * ITEM + others,
        stored.total(),
        tokens,
        stored["f32"] // 4,
        tuple(dtype for dtype, part in stored.most_common() if 100 * part >= stored.total()),
    )
