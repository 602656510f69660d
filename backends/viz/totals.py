"""What a whole network has and costs, to compare two: the numbers of `weft inspect --json`."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import sizes

from .facts import facts
from .network import Network
from .outline import Part

ITEM = 2  # bytes of a number in a cache, as f16


@dataclass(frozen=True)
class Totals:
    """Operations; learned numbers; FLOPs of a text of `tokens` tokens; bytes that the cache takes for a token and
    recurrences keep for a text, where a number takes two; bytes of the weights in their dtypes."""

    operations: int
    parameters: int
    flops: int
    cache: int
    state: int
    weights: int
    tokens: int


def totals(network: Network, tokens: int) -> Totals:
    """Those of `network`, for a text of so many tokens."""
    found = facts(Part(network.name, "", network.vertices))
    binding = dict.fromkeys(sizes.names(found.flops), tokens) | {"batch": 1, "past": 0}
    numbers, others = found.state
    weights = [*network.unread, *(w for v in network.vertices for w in v.weights)]
    return Totals(
        len(network.vertices),
        found.parameters + sum(w.learned for w in network.unread),
        sizes.evaluate(found.flops, binding),
        sum(found.cache.values()) * ITEM,
        numbers * ITEM + others,
        sum({w.name: w.bytes for w in weights}.values()),
        tokens,
    )
