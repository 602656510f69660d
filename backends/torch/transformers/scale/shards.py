"""The part of each tensor that one device holds, as transformers divides it by the plans of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engines.plans import LAYER
from ..lower.lower import Lowered
from .split import Split

COLUMNS, ROWS, TABLE, EXPERTS = ("colwise", "packed_colwise"), "rowwise", "embedding_rowwise", "grouped_gemm"
PREFIX = "model."  # of the base model in a model with a head


def shard_numbers(key: str, shape: Sequence[int], split: Split, plans: Mapping[str, Mapping[str, Any]]) -> int:
    """Count the numbers of the tensor `key` on the device that holds most of it."""
    degree, axis = divided_axis(key, len(shape), split, plans)
    if axis is None:
        return math.prod(shape)
    return math.prod(-(-n // degree) if i == axis else n for i, n in enumerate(shape))


def divided_axis(key: str, rank: int, split: Split, plans: Mapping[str, Mapping[str, Any]]) -> tuple[int, int | None]:
    """The number of devices that share the tensor `key`, and the axis that they divide; None if each has all of it."""
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


def with_vocabulary(plans: Mapping[str, Mapping[str, Any]], lowered: Lowered) -> dict[str, dict[str, Any]]:
    """`plans` with the rule that transformers adds for the embedding, by its name; the head has one in its class."""
    found = {name: dict(plan) for name, plan in plans.items()}
    tensor = found.get("base_model_tp_plan", {})
    if tensor and lowered.emitter.embedding == "embed_tokens":
        found["base_model_tp_plan"] = {"embed_tokens": TABLE, **tensor}
    return found
