"""The parts of a model on one device: its shard of each weight, by the plans of a config, and its pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Node

from ..engines.plans import LAYER
from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
from .split import Split

COLUMNS, ROWS, TABLE, EXPERTS = ("colwise", "packed_colwise"), "rowwise", "embedding_rowwise", "grouped_gemm"
PREFIX = "model."  # of keys of the base model in a model with a head


def count_shard_elements(key: str, shape: Sequence[int], split: Split, plans: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the number of elements of the weight `key` of `shape` on the device with its largest shard. `plans` maps
    config fields such as base_model_tp_plan to plans."""
    degree, axis = find_divided_axis(key, len(shape), split, plans)
    return math.prod(-(-n // degree) if i == axis else n for i, n in enumerate(shape))


def find_divided_axis(
    key: str, rank: int, split: Split, plans: Mapping[str, Mapping[str, Any]]
) -> tuple[int, int | None]:
    """Return (number of devices, axis along which they divide the weight `key`, or None if each stores all of it)."""
    path = LAYER.sub(".*", key)
    module, _, name = path.rpartition(".")
    whole_experts = plans.get("base_model_ep_plan", {}) if split.ep > 1 else {}
    if whole_experts.get(path) == EXPERTS:
        return split.ep, 0
    if split.tp == 1:
        return 1, None
    tensor = plans.get("base_model_tp_plan", {})
    style = tensor.get(path) or tensor.get(module)
    if style in COLUMNS:
        return split.tp, max(rank - 2, 0)
    if style == ROWS:
        return split.tp, None if name == "bias" else rank - 1
    return split.tp, 0 if style == TABLE else None


def add_vocabulary_plan(plans: Mapping[str, Mapping[str, Any]], lowered: LoweredModel) -> dict[str, dict[str, Any]]:
    """Return a copy of `plans`. A tensor-parallel plan in it also gets the entry that transformers adds for a token
    embedding called embed_tokens, unless it has its own."""
    extended = {name: dict(plan) for name, plan in plans.items()}
    tensor = extended.get("base_model_tp_plan", {})
    if tensor and lowered.emitter.embedding == "embed_tokens":
        extended["base_model_tp_plan"] = {"embed_tokens": TABLE, **tensor}
    return extended


@dataclass(frozen=True)
class Stages:
    """A model cut into `count` pipeline stages of consecutive layers: ⌊layers / count⌋ each, and one more in each of
    the first layers mod `count` stages, as in transformers from 5.24 on."""

    lowered: LoweredModel
    base: BaseModel
    count: int

    def get_layers(self, stage: int) -> range:
        """Return the indices of the layers of `stage`; both are counted from 0."""
        number = len(self.base.stack or ())
        each, rest = divmod(number, self.count)
        start = stage * each + min(stage, rest)
        return range(start, start + each + (stage < rest))

    def find_stage(self, path: str) -> int:
        """Return the stage (from 0) of the module at `path` in the base model: the stage of its layer; outside of
        layers, the first stage for the token embedding, else the last."""
        layer = self._find_layer(path)
        if layer is not None:
            return next(s for s in range(self.count) if layer in self.get_layers(s))
        embedding = self.lowered.emitter.embedding
        return 0 if embedding and (path == embedding or path.startswith(f"{embedding}.")) else self.count - 1

    def list_stages(self, key: str) -> list[int]:
        """Return the stages that store the weight `key`, ascending: the stage of its module, the last for a weight of
        the head. If it is tied to the head, the last stage also stores it."""
        path = key.removeprefix(PREFIX) if self.lowered.head is not None else key
        if path == key and self.lowered.head is not None:
            return [self.count - 1]
        last = {self.count - 1} if path in self.lowered.tied_keys.values() else set()
        return sorted({self.find_stage(path)} | last)

    def map_nodes(self) -> dict[Node, int]:
        """Map each node of the graph to a stage: a node of a layer to the layer's, a node of the head to the last, any
        other node to the stage of the last layer before it, or the first stage if there is none."""
        stages, current, head = {}, 0, self.lowered.head
        for node in self.lowered.graph.nodes:
            layer = self._find_layer(node.scope)
            current = current if layer is None else self.find_stage(node.scope)
            in_head = layer is None and head is not None and node in head.nodes
            stages[node] = self.count - 1 if in_head else current
        return stages

    def _find_layer(self, path: str) -> int | None:
        stack = self.base.stack
        if stack is None or not path.startswith(f"{stack.path}."):
            return None
        return int(path.removeprefix(f"{stack.path}.").partition(".")[0])
