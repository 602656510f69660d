"""Plans of parallelism: the distribution of a model over devices, as transformers and engines read it in a config.

Names in a plan have ``*`` for layer numbers. Transformers matches them exactly; engines match them as regular
expressions from the beginning, and use the first match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...codegen.structure import Item, Loop, ModuleCall
from ...program.statements import Operand, ParamRef, Statement, Submodule, Var
from ..lower.lower_base_and_head import LoweredModel
from ..modeling.base import BaseModel
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


HIDDEN = (["hidden_states"], ["hidden_states"])
PROPERTIES = r"\.(device|dtype|shape)"  # attributes of embeddings that later stages have also


def plan_pipeline(base: BaseModel) -> dict[str, Any] | str:
    """Return module path → (input names, output names) for the modules of pipeline stages, in order of execution.
    Return the reason (str) if only one stage is possible.

    Engines replace the modules of other stages by modules that return their first argument, and pass hidden states
    instead of embeddings to later stages. So all computation between the embedding and the last module must be in
    modules.
    """
    stack, lowered = base.stack, base.lowered
    e = lowered.emitter
    if stack is None:
        return "it has no list of layers, or its layers share weights"
    if not e.embedding:
        return "more than one embedding reads the token ids"
    if any(len(c.results) != 1 for c in stack.calls):
        return "its layers return more than the hidden states"
    items = base.method.items
    place = next(i for i, item in enumerate(items) if isinstance(item, Loop) and item.calls is stack.calls)
    loop = items[place]
    assert isinstance(loop, Loop)
    before = set(_list_modules(items[:place])) - {e.embedding}
    copies: dict[Operand, Operand] = {
        i.results[0]: i.operands[0] for i in items[:place] if isinstance(i, Statement) and i.text == "{0}"
    }
    entering = loop.calls[0].inputs[loop.chained[0]]
    if before or copies.get(entering, entering) is not e.embeds:
        return f"{', '.join(sorted(before)) or 'more than the embedding'} computes the input of its layers"
    operands = [v for c in loop.calls for i, v in enumerate(c.inputs) if i != loop.chained[0]]
    if not _find_dependent_values(e.embeds, items[:place], lowered).isdisjoint(operands):
        return "its layers also read the embeddings"
    after = _follow_chain(loop.results[0], items[place + 1 :])
    if after is None or (lowered.head is not None and after[1] is not lowered.hidden):
        return "more than modules follows its layers"
    return {
        e.embedding: (["input_ids"], ["inputs_embeds"]),
        stack.path: (["hidden_states", "attention_mask"], ["hidden_states"]),
        **dict.fromkeys(after[0], HIDDEN),
    }


def _find_dependent_values(embeds: Var, items: Sequence[Item], lowered: LoweredModel) -> set[Operand]:
    """Return `embeds` and the results of `items` that depend on its elements; reads of shape, dtype or device do not
    count. Masks are left out, because every stage computes them."""
    masks = [mask.statement for mask in lowered.emitter.masks.values()]
    dependent: set[Operand] = {embeds}
    for item in items:
        read = item.operands if isinstance(item, Statement) else [v for c in _list_calls(item) for v in c.inputs]
        text = item.text if isinstance(item, Statement) else ""
        places = (i for i, v in enumerate(read) if v in dependent)
        if item not in masks and any(re.search(rf"\{{{i}\}}(?!{PROPERTIES})", text) or not text for i in places):
            dependent.update(item.results)
    return dependent


def _list_calls(item: Item) -> list[ModuleCall]:
    return [item] if isinstance(item, ModuleCall) else item.calls if isinstance(item, Loop) else []


def _follow_chain(value: Operand, items: Sequence[Item]) -> tuple[list[str], Operand] | None:
    """Return the paths of the modules that form a chain from `value`, and its result; None without a chain."""
    paths = []
    for item in items:
        if isinstance(item, Loop) or not item.results:
            return None
        modules = [*_list_modules([item])]
        read = [o for o in item.operands if isinstance(o, Var)] if isinstance(item, Statement) else item.inputs
        plain = not isinstance(item, Statement) or re.fullmatch(r"\{\d+\}\(\{\d+\}\)", item.text)
        if len(modules) != 1 or not plain or [*read] != [value]:
            return None
        paths += modules
        value = item.results[0]
    return paths, value


def _list_modules(items: Sequence[Item]) -> Iterator[str]:
    """Yield the paths of the modules that `items` call, in order; paths may repeat."""
    for item in items:
        if isinstance(item, Statement):
            yield from (o.path for o in item.operands if isinstance(o, Submodule))
        else:
            yield from (c.path for c in _list_calls(item))
