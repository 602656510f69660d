"""Collectives of one forward pass, with the size of each in bytes per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.types import sizes

from ..engines.plans import DIVIDED_EXPERTS, REPLICATED, Plans
from ..lower.lower_base_and_head import LoweredModel
from ..lower.stacked_experts import get_experts_path
from .shards import Stages
from .split import Split

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
