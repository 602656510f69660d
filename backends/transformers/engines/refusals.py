"""Engines that take models with their own code, and the reasons for which they cannot run one.

The requirements are those of the documentation of each engine's backend for models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.ir import ops

from ..lower.emitter import STANDARD
from ..lower.lower import Lowered
from ..shell.base import BaseModel
from .plans import LAYER, Plans

BATCHES, VLLM, SGLANG = "transformers generate_batch", "vLLM", "SGLang"


def refusals(bases: Sequence[BaseModel], plans: Mapping[str, Any]) -> dict[str, list[str]]:
    """List the reasons for which each engine cannot run the model, by its name; none where it can."""
    if len(bases) > 1:
        return {engine: ["it is an encoder-decoder"] for engine in (BATCHES, VLLM, SGLANG)}
    (base,) = bases
    common = [*_common(base)]
    engines = [*common, *_for_engines(base.lowered)]
    missing = [f"it has no plan of {what} parallelism" for what, name in PLANS.items() if name not in plans]
    if not base.lowered.emitter.decodes:
        return {BATCHES: ["it is an encoder"], VLLM: engines, SGLANG: engines}
    return {BATCHES: [*common, *_paged(base.lowered)], VLLM: engines, SGLANG: [*engines, *missing]}


PLANS = {"tensor": "base_model_tp_plan", "pipeline": "base_model_pp_plan"}


def _common(base: BaseModel) -> Iterator[str]:
    """Reasons that hold wherever keys are kept in pages."""
    e, graph = base.lowered.emitter, base.lowered.graph
    attentions = [n for n in graph.nodes if n.op is ops.attention]
    others = {n.op for n in graph.nodes} & {ops.relative_attention, ops.linear_attention, ops.gated_linear_attention}
    if e.recurrent or others - {ops.relative_attention}:
        yield "recurrent layers keep states, not keys"
    if ops.relative_attention in others:
        yield "relative keys and values are in no attention function"
    if e.shared:
        yield "layers share weights, so a module has several caches"
    if base.count_field != "num_hidden_layers":
        yield "some layers have more than one cache"
    if any(n.operand("bias") is not None for n in attentions):
        yield "scores have a bias by distance (ALiBi, T5)"
    custom = sorted(kind for kind in {mask.kind for mask in e.masks.values()} if kind not in STANDARD)
    if custom:
        yield f"masks that engines do not make: {', '.join(custom)}"
    shapes = {(n.attrs["heads"], n.attrs["kv_heads"], n.required("k").width // n.attrs["kv_heads"]) for n in attentions}
    if len(shapes) > 1:
        yield "layers have different numbers or widths of heads"
    narrow = [n for n in attentions if (v := n.operand("v")) is not None and v.width != n.required("k").width]
    if narrow:
        yield "values have another width than keys"


def _for_engines(lowered: Lowered) -> Iterator[str]:
    e = lowered.emitter
    features = set().union(*(told.features for told in e.attending.values()))
    if "s_aux" in features:
        yield "attention has sinks"
    if not e.embedding:
        yield "more than one embedding reads the token ids"
    if lowered.head is not None:
        made = sum(n.op is not ops.linear for n in lowered.head.nodes)
        known = {"logit_scale": 1, "final_logit_softcapping": 3}  # by what engines know them, of so many ops
        if made != sum(count for name, count in known.items() if name in lowered.fields.values):
            yield "what follows the head is more than a scale and a soft cap"


def _paged(lowered: Lowered) -> Iterator[str]:
    features = set().union(*(told.features for told in lowered.emitter.attending.values()))
    if features & {"softcap", "s_aux"}:
        yield "scores are squashed, or have sinks, which its attention does not compute"


def explained(found: dict[str, list[str]], plans: Plans) -> list[str]:
    """A line for each engine, one for each part that stays whole under tensor parallelism, and one for a model that is
    one stage."""
    lines = [f"{engine}: {'; '.join(reasons) if reasons else 'takes it'}" for engine, reasons in found.items()]
    parts: dict[str, str] = {}
    for path, reason in plans.whole.items():  # of equal layers once
        parts.setdefault(LAYER.sub(".*", path) or "the model", LAYER.sub(".*", reason))
    lines += [f"tensor parallelism: {path} stays whole, {reason}" for path, reason in parts.items()]
    return [*lines, f"pipeline parallelism: one stage, {plans.one_stage}"] if plans.one_stage else lines
