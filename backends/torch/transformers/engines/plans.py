"""Plans of parallelism: the distribution of a model over devices, as transformers and engines read it in a config.

Names in a plan have ``*`` for layer numbers. Transformers matches them exactly; engines match them as regular
expressions from the beginning, and use the first match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...program.statements import ParamRef, Submodule
from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
from .pipeline import plan_pipeline
from .tensor import find_tensor_units

REPLICATED = "replicate"
PACKED = {"gate_up_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"}
LAYER = re.compile(r"\.\d+(?=\.|$)")  # the number of a layer in a path
DIVIDED_EXPERTS = "moe_tp_experts"
SHARDED = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight"}  # by default


@dataclass
class Plans:
    """The plans of parallelism of a config.

    by_name: config field → plan (module path → style; for the pipeline, → input and output names). units: unit path →
    {module path: style}, for each attention, feed-forward or mixture that tensor parallelism divides. undivided: path →
    the reason, for other parts ("": the model). one_stage: why there is one pipeline stage, or "".
    """

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    undivided: dict[str, str] = field(default_factory=dict)
    one_stage: str = ""


def make_plans(bases: Sequence[BaseModel]) -> Plans:
    """Return the plans of tensor, pipeline, expert and data (FSDP2) parallelism of a model with base models `bases`."""
    by_kind: dict[str, dict[str, Any]] = {name: {} for name in ("tp", "pp", "ep", "fsdp")}
    units: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    staged = plan_pipeline(bases[0]) if len(bases) == 1 else "it is an encoder-decoder"
    stages = {} if isinstance(staged, str) else staged
    for base in reversed(bases):
        tensor, side_units, side_reasons = _plan_tensors(base.lowered)
        by_kind["tp"] |= _prefix_paths(base, tensor)
        units |= {base.path + name: _prefix_paths(base, unit) for name, unit in side_units.items()}
        by_kind["ep"] |= _prefix_paths(base, _plan_experts(base.lowered))
        by_kind["fsdp"] |= _prefix_paths(base, _plan_fsdp(base, stages))
        reasons |= {name.strip("."): reason for name, reason in _prefix_paths(base, side_reasons).items()}
    if by_kind["fsdp"] == SHARDED:
        del by_kind["fsdp"]
    by_name = {f"base_model_{name}_plan": plan for name, plan in (by_kind | {"pp": stages}).items() if plan}
    return Plans(by_name, units, reasons, staged if isinstance(staged, str) else "")


def _prefix_paths(base: BaseModel, plan: Mapping[str, str]) -> dict[str, str]:
    """Return `plan` (path → style) with paths relative to the full model instead of the base model `base`."""
    return {base.path + path: style for path, style in plan.items()}


def _plan_tensors(lowered: LoweredModel) -> tuple[dict[str, str], dict[str, dict[str, str]], dict[str, str]]:
    """Return the tensor-parallel plan (Shoeybi 2019, arXiv 1909.08053) as path pattern → style, then `Plans.units` and
    `Plans.undivided`, for one base model."""
    divided = find_tensor_units(lowered.graph, lowered.base)
    units, reasons = divided.styles, divided.undivided
    for home in lowered.emitter.experts:
        names = [k.rpartition(".")[2] for k in lowered.base.weights if k.startswith(f"{home}.")]
        units[home] = {}
        if any(name.endswith("_bias") for name in names):
            reasons[home] = "every device would add the biases of its experts"
        else:
            units[home] = {f"{home}.{name}": PACKED[name] for name in names} | {home: DIVIDED_EXPERTS}
    styles, agreed = _agree_styles(units, lowered)
    for name in (n for n in units if units[n] and n not in agreed):
        reasons[name] = "layers that are divided otherwise have parts of the same names"
    if not agreed and not reasons:
        reasons[""] = "it has no attention and no feed-forward of linear maps"
    table = lowered.emitter.embedding
    read = {o.path for s in lowered.base.statements for o in s.operands if isinstance(o, ParamRef)}
    if styles and table and f"{table}.weight" in read:  # read directly, not through its module
        styles = {table: REPLICATED, **styles}
    return _order_matches(styles, lowered), agreed, reasons


def _agree_styles(
    units: Mapping[str, dict[str, str]], lowered: LoweredModel
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return `units` as path pattern → style (``*`` for layer numbers), and as unit path → {module path: style}. A unit
    is left out if it is empty, or if its modules have another style, or none, in other layers."""
    every = [*lowered.base.weights, *(k.rpartition(".")[0] for k in lowered.base.weights)]
    agreed = {name: unit for name, unit in units.items() if unit}
    while True:
        styles = {path: style for unit in agreed.values() for path, style in unit.items()}
        by_pattern: dict[str, set[str | None]] = {}
        for path in dict.fromkeys([*every, *styles]):
            by_pattern.setdefault(LAYER.sub(".*", path), set()).add(styles.get(path))
        odd = {n for n, unit in agreed.items() if any(len(by_pattern[LAYER.sub(".*", path)]) > 1 for path in unit)}
        if not odd:
            return {LAYER.sub(".*", path): style for path, style in styles.items()}, agreed
        agreed = {n: unit for n, unit in agreed.items() if n not in odd}


def _order_matches(plan: Mapping[str, str], lowered: LoweredModel) -> dict[str, str]:
    """Return `plan` (path pattern → style), reordered so that the first entry that engines match with a linear map has
    the style of this map. A map without a style gets an entry "replicate" if its first match has another style."""
    operands = [o for s in lowered.base.statements for o in s.operands if isinstance(o, Submodule)]
    linears = dict.fromkeys(LAYER.sub(".0", o.path) for o in operands if o.init.startswith("nn.Linear"))
    styles = {path: plan.get(LAYER.sub(".*", path), REPLICATED) for path in linears}
    ordered = dict(plan)
    for _ in range(len(linears) + 1):
        fixes = {LAYER.sub(".*", path): style for path, style in styles.items() if _find_style(ordered, path) != style}
        if not fixes:
            return ordered
        ordered = fixes | {name: style for name, style in ordered.items() if name not in fixes}
    raise AssertionError(f"no order of this plan is right for engines: {plan}")


def _find_style(plan: Mapping[str, str], path: str) -> str:
    """Return the style of the first entry of `plan` that engines match with `path`; "replicate" without one."""
    return next((style for name, style in plan.items() if re.match(name, path)), REPLICATED)


def _plan_experts(lowered: LoweredModel) -> dict[str, str]:
    """Return the expert-parallel plan (path pattern → style): each device has some of the experts, each undivided."""
    units = {}
    for home in lowered.emitter.experts:
        names = (k for k in lowered.base.weights if k.startswith(f"{home}."))
        units[home] = dict.fromkeys(names, "grouped_gemm") | {home: "ep_dispatch_experts"}
    return _agree_styles(units, lowered)[0]


def _plan_fsdp(base: BaseModel, staged: Mapping[str, Any]) -> dict[str, str]:
    """Return the FSDP2 plan (path → style); {} without layers. The embedding and each layer free their gathered weights
    after they run, the modules after the layers (paths in `staged`) after the backward pass."""
    if base.stack is None:
        return {}
    embedding, layers = base.lowered.emitter.embedding, base.stack.path
    ends = [path for path in staged if path not in (embedding, layers)]
    parts = dict.fromkeys(filter(None, (embedding, f"{layers}.*")), "free_full_weight")
    return parts | dict.fromkeys(ends, "keep_full_weight")
