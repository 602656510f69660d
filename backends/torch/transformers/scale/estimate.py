"""Costs of a model that several devices share: memory of each, bytes between them, the bubble of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.ir.graph import Node
from weft.ir.types import sizes
from weft.passes.analysis.costs import cached, state_bytes

from ....weights import StoredTensor
from ..engines.plans import Plans
from ..shell.base import BaseModel
from .shards import PREFIX, shard_numbers, with_vocabulary
from .split import Split, check
from .stages import Stages
from .traffic import Collective, collectives


@dataclass(frozen=True)
class StageCost:
    """A device of a stage: bytes of its weights, of the cache of one token and of `Parallel.tokens` tokens, and of
    states of recurrences; `flops` are those of the stage for that many tokens."""

    layers: tuple[int, int]
    weights: int
    cache_per_token: int
    cache: int
    state: int
    flops: int


@dataclass(frozen=True)
class Parallel:
    """A model divided by `split`, its numbers in `dtype`, for one text of `tokens` tokens: a device of each stage, the
    collectives of a token, and the share of time in which a stage waits for others."""

    split: Split
    dtype: str
    tokens: int
    stages: tuple[StageCost, ...]
    collectives: tuple[Collective, ...]
    bubble: float

    def json(self) -> dict[str, Any]:
        """Everything as plain data; bytes of collectives are of one token."""
        data = asdict(self)
        data["split"]["devices"] = self.split.devices
        for collective, entry in zip(self.collectives, data["collectives"], strict=True):
            entry["sent"] = collective.sent
        return data


def estimate(
    base: BaseModel,
    plans: Plans,
    tensors: dict[str, StoredTensor],
    split: Split,
    dtype: str,
    item: int,
    tokens: int,
) -> Parallel:
    """The costs of `split`, of the `tensors` that a folder stores, where a number takes `item` bytes.

    Raises:
        WeftError: naming what cannot be divided so.
    """
    check(split, base, plans)
    lowered = base.lowered
    stages, tables = Stages(lowered, base, split.pp), with_vocabulary(plans.by_name, lowered)
    weights = [0] * split.pp
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if key.startswith(PREFIX) or lowered.head is None:
            numbers = shard_numbers(key.removeprefix(PREFIX), shape, split, tables)
        else:  # of the head: divided as logits are
            numbers = math.prod(shape) * -(-shape[0] // split.tp) // shape[0]
        for stage in stages.of_key(key):
            weights[stage] += -(-numbers * tensor.dtype.bits // 8)
    places = stages.of_nodes()
    binding = {"batch": 1, "seq": tokens, "past": 0, "total": tokens, "capacity": tokens, "source": tokens}
    costs = []
    for stage in range(split.pp):
        nodes = [node for node, place in places.items() if place == stage]
        one, all_tokens = _caches(nodes, plans, split.tp, tokens)
        flops = sum(sizes.evaluate(node.op.node_cost(node).flops, binding) for node in nodes)
        layers = stages.layers(stage)
        costs.append(
            StageCost(
                (layers.start, layers.stop),
                weights[stage],
                item * one,
                item * all_tokens,
                state_bytes(nodes, item),
                flops,
            )
        )
    sent = collectives(lowered, plans, split, stages, item)
    return Parallel(
        split, dtype, tokens, tuple(costs), tuple(sent), bubble([c.flops for c in costs], split.microbatches)
    )


def _caches(nodes: Sequence[Node], plans: Plans, tp: int, tokens: int) -> tuple[int, int]:
    """Numbers that a device keeps of one token and of `tokens` tokens: divided attention keeps its own heads."""
    one = whole = 0
    for node in nodes:
        for width, window in cached([node]):
            share = width // (tp if node.scope in plans.units else 1)
            one += share
            whole += share * min(window or tokens, tokens)
    return one, whole


def bubble(work: Sequence[int], microbatches: int) -> float:
    """The share of time in which a device waits, of stages with so much `work` for each of `microbatches` that follow
    each other (GPipe, Huang 2019, arXiv 1811.06965): (p − 1) / (m + p − 1) for equal stages."""
    busy, slowest = sum(work), max(work)
    return 1 - microbatches * busy / (len(work) * (busy + (microbatches - 1) * slowest)) if busy else 0.0
