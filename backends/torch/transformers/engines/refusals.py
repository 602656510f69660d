"""Engines that run models with custom code, and the reasons why they cannot run one.

The requirements come from the documentation of each engine's transformers backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.ir import ops

from ..lower.lower_base_and_head import LoweredModel
from ..lower.model_emitter import CHUNKED, STANDARD_MASKS
from ..lower.stacked_experts import get_experts_path
from ..modeling.base import BaseModel
from .plans import LAYER, Plans

BATCHES, VLLM, SGLANG = "transformers generate_batch", "vLLM", "SGLang"


def find_refusals(bases: Sequence[BaseModel]) -> dict[str, list[str]]:
    """Return engine → the reasons why it cannot run the model with base models `bases`; [] for an engine that can."""
    if len(bases) > 1:
        return {engine: ["it is an encoder-decoder"] for engine in (BATCHES, VLLM, SGLANG)}
    (base,) = bases
    lowered, common = base.lowered, _list_common_reasons(base)
    engines = [*common, *_list_engine_reasons(lowered), *_list_expert_reasons(lowered)]
    if not lowered.emitter.is_decoder:
        return {BATCHES: ["it is an encoder"], VLLM: engines, SGLANG: engines}
    features, head = _find_features(lowered), lowered.head
    paging = {"scores have a soft cap or sinks, which its attention does not compute": features & {"softcap", "s_aux"}}
    scaled = {"logit_scale", "final_logit_softcapping"} <= lowered.fields.values.keys()
    vllm = {"logits are scaled before the soft cap, which it applies first": scaled}
    biased = head is not None and any(key.endswith(".bias") for key in head.weights)
    sglang = {
        "scores have a soft cap, which its attention does not compute": "softcap" in features,
        "the head has a bias, which it does not load": biased,
    }
    return {
        BATCHES: [*common, *_select_true(paging)],
        VLLM: [*engines, *_select_true(vllm)],
        SGLANG: [*engines, *_select_true(sglang)],
    }


def _select_true(reasons: Mapping[str, Any]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def _find_features(lowered: LoweredModel) -> set[str]:
    """Return the optional features that the attentions use (see `AttentionRecord.features`)."""
    return set().union(*(attending.features for attending in lowered.emitter.attentions.values()))


def _list_common_reasons(base: BaseModel) -> list[str]:
    """Return the reasons why no engine with a paged cache can run the model of `base`."""
    e, nodes = base.lowered.emitter, base.lowered.graph.nodes
    kinds, masks = {n.op for n in nodes}, {mask.kind for mask in e.masks.values()}
    recurrent = kinds & {ops.linear_attention, ops.gated_linear_attention, ops.gated_delta_rule}
    attentions = [n for n in nodes if n.op is ops.attention]
    shapes = {
        (n.attrs["heads"], n.attrs["kv_heads"], n.required_operand("k").width // n.attrs["kv_heads"])
        for n in attentions
    }
    narrow = any((v := n.operand("v")) is not None and v.width != n.required_operand("k").width for n in attentions)
    custom = sorted(masks - STANDARD_MASKS.keys())
    return _select_true(
        {
            "recurrent layers keep states, not keys": e.recurrent or recurrent,
            "relative keys and values are in no attention function": ops.relative_attention in kinds,
            "blocks of keys are in no attention function": ops.block_sparse_attention in kinds,
            "layers share weights, so a module has several caches": e.shares_weights,
            "some layers have more than one cache": base.count_field != "num_hidden_layers",
            "scores have a bias by distance (ALiBi, T5)": any(n.operand("bias") is not None for n in attentions),
            f"masks that engines do not make: {', '.join(custom)}": custom,
            "attention in chunks, for which engines make no masks": CHUNKED in masks,
            "experts choose among all tokens of a forward pass, also of other sequences": kinds
            & {ops.expert_choice, ops.limit_capacity},
            "layers have different numbers or widths of heads": len(shapes) > 1,
            "values and keys differ in width": narrow,
        }
    )


def _list_engine_reasons(lowered: LoweredModel) -> Iterator[str]:
    """Yield the reasons why neither vLLM nor SGLang can run the model, apart from the common ones and those for its
    experts (`_list_common_reasons`, `_list_expert_reasons`)."""
    if "s_aux" in _find_features(lowered):
        yield "attention has sinks"
    if not lowered.emitter.embedding:
        yield "more than one embedding reads the token ids"
    if lowered.head is not None:
        count = sum(n.op is not ops.linear for n in lowered.head.nodes)
        supported = {"logit_scale": 1, "final_logit_softcapping": 3}  # config fields, and the number of ops of each
        if count != sum(n for name, n in supported.items() if name in lowered.fields.values):
            yield "more than a scale and a soft cap follows the head"


def _list_expert_reasons(lowered: LoweredModel) -> Iterator[str]:
    """Yield the reasons why vLLM and SGLang cannot run the experts. They replace modules called experts, if these have
    no biases, by a kernel for SwiGLU experts, and read its sizes from the config."""
    replaced = [
        node
        for node in lowered.graph.nodes
        if node.op is ops.moe
        and get_experts_path(node).rpartition(".")[2] == "experts"
        and all(node.operand(bias) is None for bias in ("up_bias", "down_bias"))
    ]
    plain = {"activation": "silu", "limit": None, "shift": 0}
    if any(n.operand("gate") is None or any(n.attrs[k] != value for k, value in plain.items()) for n in replaced):
        yield "experts are not SwiGLU"
    names = {
        "num_experts": {int(n.required_operand("up").shape[0]) for n in replaced},
        "num_experts_per_tok": {n.attrs["active"] for n in replaced},
        "moe_intermediate_size": {int(n.required_operand("up").shape[1]) for n in replaced},
        "hidden_size": {int(n.required_operand("up").shape[2]) for n in replaced},
    }
    fields = {name: lowered.fields.values.get(name) for name in names}
    if replaced and (odd := [name for name, sizes in names.items() if sizes != {fields[name]} or None in sizes]):
        yield f"experts are not described by the config's {', '.join(odd)}"


def list_limits(lowered: LoweredModel, plans: Plans) -> list[str]:
    """Return why vLLM and SGLang cannot divide the model, as "tensor parallelism: reason" and "pipeline parallelism:
    reason"; [] if they can. Tensor parallelism requires that all attentions are divided, pipelines several stages."""
    attentions = [n.scope for n in lowered.graph.nodes if n.op is ops.attention]
    scope = next((scope for scope in attentions if scope not in plans.units), None)
    limits = [] if scope is None else [f"tensor parallelism: {LAYER.sub('.*', scope)} is not divided"]
    return [*limits, f"pipeline parallelism: {plans.one_stage}"] if plans.one_stage else limits


def explain_engines(reasons_by_engine: dict[str, list[str]], lowered: LoweredModel, plans: Plans) -> list[str]:
    """Return the lines of `--explain`: one for each engine in `reasons_by_engine` (the result of `find_refusals`), one
    for each path pattern that tensor parallelism does not divide, and one if there is a single pipeline stage."""
    without = "; without ".join(["", *list_limits(lowered, plans)])
    accepts = {engine: "runs it" + (without if engine != BATCHES else "") for engine in reasons_by_engine}
    lines = [f"{engine}: {'; '.join(reasons) or accepts[engine]}" for engine, reasons in reasons_by_engine.items()]
    parts: dict[str, str] = {}
    for path, reason in plans.undivided.items():  # once for equal layers
        parts.setdefault(LAYER.sub(".*", path) or "the model", LAYER.sub(".*", reason))
    lines += [f"tensor parallelism: {path} is not divided, {reason}" for path, reason in parts.items()]
    return [*lines, f"pipeline parallelism: one stage, {plans.one_stage}"] if plans.one_stage else lines
