"""Costs of a model on several devices: memory per device, bytes sent between devices, and the pipeline bubble."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.ir import ops
from weft.ir.graph import Node
from weft.ir.types import sizes
from weft.passes.analysis.costs import count_state_bytes, find_cache_sizes

from ....weights import StoredTensor
from ..engines.plans import DIVIDED_EXPERTS, REPLICATED, Plans
from ..lower.lower_base_and_head import LoweredModel
from ..lower.stacked_experts import get_experts_path
from ..modeling.base import BaseModel
from .shards import PREFIX, Split, Stages, add_vocabulary_plan, check_split, count_shard_elements

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = "all-reduce", "all-gather", "all-to-all"
SEND, BROADCAST = "send", "broadcast"


@dataclass(frozen=True)
class Collective:
    """A collective operation among `degree` devices in pipeline stage `stage`. kind: such as "all-reduce". group: the
    parallelism, tp, ep or pp. path: the module whose result it sends, "logits" or "hidden states".

    size: bytes per token of the sum (all-reduce), of the gathered tensor (all-gather), or of all that one device sends
    (others; in an all-to-all, also to itself).
    """

    kind: str
    group: str
    degree: int
    stage: int
    path: str
    size: int

    @property
    def sent_bytes(self) -> float:
        """Return the bytes per token that a device sends with optimal algorithms: for all-gather and all-to-all among n
        devices (n − 1) / n of `size`, for all-reduce (reduce-scatter, then all-gather) twice that, else `size`."""
        share = (self.degree - 1) / self.degree
        return self.size * {ALL_REDUCE: 2 * share, ALL_GATHER: share, ALL_TO_ALL: share}.get(self.kind, 1.0)


def list_collectives(lowered: LoweredModel, plans: Plans, split: Split, stages: Stages, item: int) -> list[Collective]:
    """Return the collectives of a forward pass, ordered by stage; an activation has `item` bytes per element."""
    messages = [*_list_tensor(lowered, plans, split, stages, item), *_list_expert(lowered, split, stages, item)]
    messages += _list_vocabulary(lowered, plans, split, stages, item)
    if split.pp > 1:
        head, outputs = lowered.emitter.head, [*lowered.graph.outputs.values()]
        hidden = outputs[0] if head is None else head.required_operand("x")
        width = item * sizes.evaluate(hidden.shape[-1], {})
        messages += [Collective(SEND, "pp", split.pp, s, "hidden states", width) for s in range(split.pp - 1)]
        if lowered.head is not None:
            vocab = item * _get_vocab_size(lowered)
            messages.append(Collective(BROADCAST, "pp", split.pp, split.pp - 1, "logits", vocab))
    return sorted(messages, key=lambda c: c.stage)


def _list_tensor(lowered: LoweredModel, plans: Plans, split: Split, stages: Stages, item: int) -> Iterator[Collective]:
    """Yield an all-reduce for each linear map divided by rows, and, if `ep` is 1, for each divided mixture."""
    if split.tp == 1:
        return
    for unit in plans.units.values():
        for path, style in unit.items():
            experts = style == DIVIDED_EXPERTS and split.ep == 1
            if experts or (style == "rowwise" and DIVIDED_EXPERTS not in unit.values()):
                weight, axis = ("down_proj", 1) if experts else ("weight", 0)
                width = lowered.base.weights[f"{path}.{weight}"].type.concrete({})[axis]
                yield Collective(ALL_REDUCE, "tp", split.tp, stages.find_stage(path), path, item * width)


def _list_expert(lowered: LoweredModel, split: Split, stages: Stages, item: int) -> Iterator[Collective]:
    """Yield the collectives of expert parallelism for each mixture of experts.

    If ep = tp, all devices have the same tokens: one all-reduce. Otherwise two all-to-alls, to the experts and back, in
    which each of the tp devices with the same tokens sends 1 / tp of them. If tp > 1, an all-gather then joins these.
    """
    if split.ep == 1:
        return
    for node in (n for n in lowered.graph.nodes if n.op is ops.moe):
        home, up = get_experts_path(node), node.required_operand("up")
        width = item * sizes.evaluate(up.shape[-1], {})
        chosen = node.attrs["active"] or sizes.evaluate(up.shape[0], {})
        stage = stages.find_stage(home)
        if split.ep == split.tp:
            yield Collective(ALL_REDUCE, "ep", split.ep, stage, home, width)
            continue
        for _ in range(2):
            yield Collective(ALL_TO_ALL, "ep", split.ep, stage, home, -(-chosen * width // split.tp))
        if split.tp > 1:
            yield Collective(ALL_GATHER, "tp", split.tp, stage, home, width)


def _list_vocabulary(
    lowered: LoweredModel, plans: Plans, split: Split, stages: Stages, item: int
) -> Iterator[Collective]:
    """Yield the all-reduce of the embedding embed_tokens and the all-gather of the logits, both divided by tokens."""
    if split.tp == 1:
        return
    table = lowered.emitter.embedding
    if table == "embed_tokens" and plans.by_name.get("base_model_tp_plan", {}).get(table) != REPLICATED:
        width = lowered.base.weights[f"{table}.weight"].type.concrete({})[1]
        yield Collective(ALL_REDUCE, "tp", split.tp, 0, table, item * width)
    if lowered.head is not None:
        yield Collective(ALL_GATHER, "tp", split.tp, stages.count - 1, "logits", item * _get_vocab_size(lowered))


def _get_vocab_size(lowered: LoweredModel) -> int:
    return sizes.evaluate(lowered.graph.outputs["logits"].shape[-1], {})


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
