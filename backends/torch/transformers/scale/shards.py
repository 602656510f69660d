"""The shard of each weight on one device, as transformers divides weights by the plans of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engines.plans import LAYER
from ..lower.lower_base_and_head import LoweredModel
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
