"""Costs of a model on several devices: memory per device, bytes sent between devices, and the pipeline bubble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.ir.graph import Node
from weft.ir.types import sizes
from weft.passes.analysis.costs import count_state_bytes, find_cache_sizes

from ....weights import StoredTensor
from ..engines.plans import Plans
from ..modeling.base import BaseModel
from .shards import PREFIX, Stages, add_vocabulary_plan, count_shard_elements
from .split import Split, check_split
from .traffic import Collective, list_collectives


@dataclass(frozen=True)
class StageCost:
    """The costs of one device of a pipeline stage: weights, KV cache and states in bytes.

    layers: index of the first layer, and of the one after the last. cache: KV cache of one sequence of
    `ParallelCosts.tokens` tokens; cache_per_token: of one token. state: recurrent states of one sequence. flops:
    operations of the entire stage for all its tokens.
    """

    layers: tuple[int, int]
    weights: int
    cache_per_token: int
    cache: int
    state: int
    flops: int


@dataclass(frozen=True)
class ParallelCosts:
    """The costs of a model divided by `split`, for one sequence of `tokens` tokens with activations in `dtype`.

    stages: costs of one device of each stage. bubble: share of the time in which a device waits for other stages.
    """

    split: Split
    dtype: str
    tokens: int
    stages: tuple[StageCost, ...]
    collectives: tuple[Collective, ...]
    bubble: float

    def json(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible data, with `Split.devices` and, as key sent, `Collective.sent_bytes`."""
        data = asdict(self)
        data["split"]["devices"] = self.split.devices
        for collective, entry in zip(self.collectives, data["collectives"], strict=True):
            entry["sent"] = collective.sent_bytes
        return data


def estimate_costs(
    base: BaseModel, plans: Plans, tensors: dict[str, StoredTensor], split: Split, dtype: str, item: int, tokens: int
) -> ParallelCosts:
    """Return the costs of `base` divided by `split`, given its `plans` and the stored `tensors` by key.

    tokens: length of the sequence. item: bytes per element of activations and caches, whose dtype is called `dtype`.

    Raises:
        WeftError: if `split` cannot divide a part of the model, which it names.
    """
    check_split(split, base, plans)
    lowered = base.lowered
    stages, tables = Stages(lowered, base, split.pp), add_vocabulary_plan(plans.by_name, lowered)
    weights = [0] * split.pp
    for key, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if key.startswith(PREFIX) or lowered.head is None:
            elements = count_shard_elements(key.removeprefix(PREFIX), shape, split, tables)
        else:  # the head is divided as the logits are
            elements = math.prod(shape) * -(-shape[0] // split.tp) // shape[0]
        for stage in stages.list_stages(key):
            weights[stage] += -(-elements * tensor.dtype.bits // 8)
    places = stages.map_nodes()
    binding = {"batch": 1, "seq": tokens, "past": 0, "total": tokens, "capacity": tokens, "source": tokens}
    costs = []
    for stage in range(split.pp):
        nodes = [node for node, place in places.items() if place == stage]
        per_token, all_tokens = _count_cached_elements(nodes, plans, split.tp, tokens)
        flops = sum(sizes.evaluate(node.op.node_cost(node).flops, binding) for node in nodes)
        layers, state = stages.get_layers(stage), count_state_bytes(nodes, item)
        bounds, caches = (layers.start, layers.stop), (item * per_token, item * all_tokens)
        costs.append(StageCost(bounds, weights[stage], *caches, state, flops))
    sent = list_collectives(lowered, plans, split, stages, item)
    bubble = compute_bubble([c.flops for c in costs], split.microbatches)
    return ParallelCosts(split, dtype, tokens, tuple(costs), tuple(sent), bubble)


def _count_cached_elements(nodes: Sequence[Node], plans: Plans, tp: int, tokens: int) -> tuple[int, int]:
    """Return the elements of KV caches on one device for one token, and for `tokens` tokens (fewer with a window).
    Attentions that `plans` divide have 1 / `tp` of their elements on each device."""
    per_token = total = 0
    for node in nodes:
        for width, window in find_cache_sizes([node]):
            share = width // (tp if node.scope in plans.units else 1)
            per_token += share
            total += share * min(window or tokens, tokens)
    return per_token, total


def compute_bubble(work: Sequence[int], microbatches: int) -> float:
    """Return the share of the time in which a device, on average, waits for other stages: 0 to 1.

    `work` is the time of each stage for one microbatch. For p equal stages and m `microbatches` the share is (p − 1) /
    (m + p − 1) (GPipe, Huang 2019, arXiv 1811.06965).
    """
    busy, slowest = sum(work), max(work)
    return 1 - microbatches * busy / (len(work) * (busy + (microbatches - 1) * slowest)) if busy else 0.0
