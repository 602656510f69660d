"""Engines that run models with custom code, and the reasons why they cannot run one.

The requirements come from the documentation of each engine's transformers backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    lowered, common = base.lowered, [*_list_common_reasons(base)]
    engines = [*common, *_list_engine_reasons(lowered), *_list_expert_reasons(lowered)]
    if not lowered.emitter.is_decoder:
        return {BATCHES: ["it is an encoder"], VLLM: engines, SGLANG: engines}
    return {
        BATCHES: [*common, *_list_paging_reasons(lowered)],
        VLLM: [*engines, *_list_vllm_reasons(lowered)],
        SGLANG: [*engines, *_list_sglang_reasons(lowered)],
    }


def _list_common_reasons(base: BaseModel) -> Iterator[str]:
    """Yield the reasons that apply to all engines with paged caches."""
    e, graph = base.lowered.emitter, base.lowered.graph
    attentions = [n for n in graph.nodes if n.op is ops.attention]
    special = {n.op for n in graph.nodes} & {
        *(ops.relative_attention, ops.linear_attention, ops.gated_linear_attention, ops.gated_delta_rule)
    }
    if e.recurrent or special - {ops.relative_attention}:
        yield "recurrent layers keep states, not keys"
    if ops.relative_attention in special:
        yield "relative keys and values are in no attention function"
    if any(n.op is ops.block_sparse_attention for n in graph.nodes):
        yield "blocks of keys are in no attention function"
    if e.shares_weights:
        yield "layers share weights, so a module has several caches"
    if base.count_field != "num_hidden_layers":
        yield "some layers have more than one cache"
    if any(n.operand("bias") is not None for n in attentions):
        yield "scores have a bias by distance (ALiBi, T5)"
    custom = sorted(kind for kind in {mask.kind for mask in e.masks.values()} if kind not in STANDARD_MASKS)
    if custom:
        yield f"masks that engines do not make: {', '.join(custom)}"
    if any(mask.kind == CHUNKED for mask in e.masks.values()):
        yield "attention in chunks, for which engines make no masks"
    if any(n.op in (ops.expert_choice, ops.limit_capacity) for n in graph.nodes):
        yield "experts choose among all tokens of a forward pass, also of other sequences"
    shapes = {
        (n.attrs["heads"], n.attrs["kv_heads"], n.required_operand("k").width // n.attrs["kv_heads"])
        for n in attentions
    }
    if len(shapes) > 1:
        yield "layers have different numbers or widths of heads"
    narrow = [n for n in attentions if (v := n.operand("v")) is not None and v.width != n.required_operand("k").width]
    if narrow:
        yield "values and keys differ in width"


def _list_engine_reasons(lowered: LoweredModel) -> Iterator[str]:
    e = lowered.emitter
    features = set().union(*(attending.features for attending in e.attentions.values()))
    if "s_aux" in features:
        yield "attention has sinks"
    if not e.embedding:
        yield "more than one embedding reads the token ids"
    if lowered.head is not None:
        count = sum(n.op is not ops.linear for n in lowered.head.nodes)
        supported = {"logit_scale": 1, "final_logit_softcapping": 3}  # config fields, and the number of ops of each
        if count != sum(n for name, n in supported.items() if name in lowered.fields.values):
            yield "more than a scale and a soft cap follows the head"


def _list_expert_reasons(lowered: LoweredModel) -> Iterator[str]:
    """Yield the reasons why engines cannot run the experts. Engines replace modules called experts, if they have no
    biases, by a kernel for SwiGLU experts, and read its sizes from the config."""
    replaced = [
        node
        for node in lowered.graph.nodes
        if node.op is ops.moe
        and get_experts_path(node).rpartition(".")[2] == "experts"
        and node.operand("up_bias") is None
        and node.operand("down_bias") is None
    ]
    for node in replaced:
        a, gated = node.attrs, node.operand("gate") is not None
        if not gated or a["activation"] != "silu" or a["limit"] is not None or a["shift"] != 0:
            yield "experts are not SwiGLU"
            break
    names = {
        "num_experts": {int(n.required_operand("up").shape[0]) for n in replaced},
        "num_experts_per_tok": {n.attrs["active"] for n in replaced},
        "moe_intermediate_size": {int(n.required_operand("up").shape[1]) for n in replaced},
        "hidden_size": {int(n.required_operand("up").shape[2]) for n in replaced},
    }
    fields = {name: lowered.fields.values.get(name) for name in names}
    if replaced and (odd := [name for name, sizes in names.items() if sizes != {fields[name]} or None in sizes]):
        yield f"experts are not described by the config's {', '.join(odd)}"


def _list_vllm_reasons(lowered: LoweredModel) -> Iterator[str]:
    if {"logit_scale", "final_logit_softcapping"} <= lowered.fields.values.keys():
        yield "logits are scaled before the soft cap, which it applies first"


def _list_sglang_reasons(lowered: LoweredModel) -> Iterator[str]:
    if any("softcap" in attending.features for attending in lowered.emitter.attentions.values()):
        yield "scores have a soft cap, which its attention does not compute"
    if lowered.head is not None and any(key.endswith(".bias") for key in lowered.head.weights):
        yield "the head has a bias, which it does not load"


def _list_paging_reasons(lowered: LoweredModel) -> Iterator[str]:
    features = set().union(*(attending.features for attending in lowered.emitter.attentions.values()))
    if features & {"softcap", "s_aux"}:
        yield "scores have a soft cap or sinks, which its attention does not compute"


def list_limits(lowered: LoweredModel, plans: Plans) -> list[str]:
    """Return "kind of parallelism: reason" for tensor and pipeline parallelism that vLLM and SGLang cannot use. Tensor
    parallelism requires that the heads of all attentions can be divided, pipeline parallelism several stages."""
    attentions = [n.scope for n in lowered.graph.nodes if n.op is ops.attention]
    scope = next((scope for scope in attentions if scope not in plans.units), None)
    limits = [] if scope is None else [f"tensor parallelism: {LAYER.sub('.*', scope)} is not divided"]
    return [*limits, f"pipeline parallelism: {plans.one_stage}"] if plans.one_stage else limits


def explain_engines(reasons_by_engine: dict[str, list[str]], lowered: LoweredModel, plans: Plans) -> list[str]:
    """Return the lines of `--explain`: one for each engine in `reasons_by_engine` (the result of `find_refusals`), one
    for each part that tensor parallelism does not divide, and one if the model is a single pipeline stage."""
    without = "; without ".join(["", *list_limits(lowered, plans)])
    accepts = {engine: "runs it" + (without if engine != BATCHES else "") for engine in reasons_by_engine}
    lines = [f"{engine}: {'; '.join(reasons) or accepts[engine]}" for engine, reasons in reasons_by_engine.items()]
    parts: dict[str, str] = {}
    for path, reason in plans.undivided.items():  # once for equal layers
        parts.setdefault(LAYER.sub(".*", path) or "the model", LAYER.sub(".*", reason))
    lines += [f"tensor parallelism: {path} is not divided, {reason}" for path, reason in parts.items()]
    return [*lines, f"pipeline parallelism: one stage, {plans.one_stage}"] if plans.one_stage else lines
