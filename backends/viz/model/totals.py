"""Totals of a network for comparisons, as in `weft inspect --json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weft.ir.types import sizes

from .network import Network
from .outline import PicturePart
from .part_costs import sum_costs

ITEM = 2  # bytes of a cached element, as f16


@dataclass(frozen=True)
class Totals:
    """Totals of a model: the number of `operations` and of learned `parameters`, and the fields below.

    `flops`: FLOPs of a sequence of `tokens` tokens.
    `cache`, `state`: bytes of the KV cache per token and of states per sequence, if the model's dtype is f16.
    `weights`: bytes of the weights as stored; `dtypes` are those of at least 1 % of the bytes, largest share first.
    `open`: the number of f32 elements of weights; no pass has cast them yet, so they may get any dtype.
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


def compute_totals(network: Network, tokens: int) -> Totals:
    """Return the totals of `network` for a sequence of `tokens` tokens."""
    totals = sum_costs(PicturePart(network.name, "", network.vertices))
    binding = dict.fromkeys(sizes.list_names(totals.work.flops), tokens) | {"batch": 1, "past": 0}
    elements, other_bytes = totals.state
    weights = {w.name: w for w in (*network.unread, *(w for v in network.vertices for w in v.weights))}.values()
    stored: Counter[str] = Counter()
    for weight in weights:
        stored[weight.dtype] += weight.bytes
    return Totals(
        len(network.vertices),
        totals.parameters + sum(w.learned for w in network.unread),
        sizes.evaluate(totals.work.flops, binding),
        sum(totals.cache.values()) * ITEM,
        elements * ITEM + other_bytes,
        stored.total(),
        tokens,
        stored["f32"] // 4,
        tuple(dtype for dtype, part in stored.most_common() if 100 * part >= stored.total()),
    )
