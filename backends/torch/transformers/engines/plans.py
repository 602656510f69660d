"""Plans of parallelism: a model divided among devices, as transformers and engines read it in a config.

Names in a plan have ``*`` for the numbers of layers: for transformers it is exact, engines match it as a regular
expression from its beginning, and the first that matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...program.statements import ParamRef, Submodule
from ..lower.lower import Lowered
from ..shell.base import BaseModel
from .pipeline import pipeline
from .tensor import tensor_units

WHOLE = "replicate"
PACKED = {"gate_up_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"}
LAYER = re.compile(r"\.\d+(?=\.|$)")  # the number of a layer in a path
DIVIDED_EXPERTS = "moe_tp_experts"
SHARDED = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight"}  # by default


@dataclass
class Plans:
    """The plans that a config holds, by their names there; the `units` that tensor parallelism divides, with the styles
    of their modules by path; why parts stay whole, by path; and why the model is one stage, if it is."""

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    one_stage: str = ""


def plans(bases: Sequence[BaseModel]) -> Plans:
    """The plans of tensor, pipeline, expert and data parallelism (FSDP2); an encoder-decoder is one stage."""
    found: dict[str, dict[str, Any]] = {name: {} for name in ("tp", "pp", "ep", "fsdp")}
    units: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    staged = pipeline(bases[0]) if len(bases) == 1 else "it is an encoder-decoder"
    stages = {} if isinstance(staged, str) else staged
    for base in reversed(bases):
        tensor, kept, reasons = _tensor(base.lowered)
        found["tp"] |= _below(base, tensor)
        units |= {base.path + name: _below(base, unit) for name, unit in kept.items()}
        found["ep"] |= _below(base, _experts(base.lowered))
        found["fsdp"] |= _below(base, _sharded(base, stages))
        whole |= {name.strip("."): reason for name, reason in _below(base, reasons).items()}
    if found["fsdp"] == SHARDED:
        del found["fsdp"]
    named = {f"base_model_{name}_plan": plan for name, plan in (found | {"pp": stages}).items() if plan}
    return Plans(named, units, whole, staged if isinstance(staged, str) else "")


def _below(base: BaseModel, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan of one side with the paths that its parts have in the whole."""
    return {base.path + path: style for path, style in plan.items()}


def _tensor(lowered: Lowered) -> tuple[dict[str, str], dict[str, dict[str, str]], dict[str, str]]:
    """Linear maps by columns and rows (Shoeybi 2019, arXiv 1909.08053), as a plan and as units, and the reasons for
    those that stay whole."""
    found = tensor_units(lowered.graph, lowered.base)
    units, whole = found.styles, found.whole
    for home in lowered.emitter.experts:
        held = [k.rpartition(".")[2] for k in lowered.base.weights if k.startswith(f"{home}.")]
        units[home] = {}
        if any(name.endswith("_bias") for name in held):
            whole[home] = "every device would add the biases of its experts"
        else:
            units[home] = {f"{home}.{name}": PACKED[name] for name in held} | {home: DIVIDED_EXPERTS}
    styles, kept = _agreed(units, lowered)
    for name in (n for n in units if units[n] and n not in kept):
        whole[name] = "layers that are divided otherwise have parts of the same names"
    if not kept and not whole:
        whole[""] = "it has no attention and no feed-forward of linear maps"
    if styles and (table := lowered.emitter.embedding) and _reads(lowered, f"{table}.weight"):
        styles = {table: WHOLE, **styles}
    return _first_matches(styles, lowered), kept, whole


def _agreed(units: Mapping[str, dict[str, str]], lowered: Lowered) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The styles of parts with ``*`` for the numbers of layers, and the units that keep theirs: those of which no other
    layer treats parts of the same names otherwise."""
    every = [*lowered.base.weights, *(k.rpartition(".")[0] for k in lowered.base.weights)]
    kept = {name: unit for name, unit in units.items() if unit}
    while True:
        styles = {path: style for unit in kept.values() for path, style in unit.items()}
        found: dict[str, set[str | None]] = {}
        for path in dict.fromkeys([*every, *styles]):
            found.setdefault(LAYER.sub(".*", path), set()).add(styles.get(path))
        odd = {n for n, unit in kept.items() if any(len(found[LAYER.sub(".*", path)]) > 1 for path in unit)}
        if not odd:
            return {LAYER.sub(".*", path): style for path, style in styles.items()}, kept
        kept = {n: unit for n, unit in kept.items() if n not in odd}


def _first_matches(plan: Mapping[str, str], lowered: Lowered) -> dict[str, str]:
    """`plan` in such an order that each linear map is matched by its own entry first; those that stay whole get one
    where they would be taken for another."""
    linears = dict.fromkeys(LAYER.sub(".0", path) for path in _linears(lowered))
    ordered = dict(plan)
    for _ in range(len(linears) + 1):
        wrong = [path for path in linears if _first(ordered, path) != plan.get(LAYER.sub(".*", path), WHOLE)]
        if not wrong:
            return ordered
        own = {LAYER.sub(".*", path): plan.get(LAYER.sub(".*", path), WHOLE) for path in wrong}
        ordered = own | {name: style for name, style in ordered.items() if name not in own}
    raise AssertionError(f"no order of this plan is right for engines: {plan}")


def _first(plan: Mapping[str, str], path: str) -> str:
    """The style that engines find for the linear map at `path`."""
    return next((style for name, style in plan.items() if re.match(name, path)), WHOLE)


def _linears(lowered: Lowered) -> list[str]:
    """The paths of the linear maps of a base model."""
    operands = (o for s in lowered.base.statements for o in s.operands)
    return [*dict.fromkeys(o.path for o in operands if isinstance(o, Submodule) and o.init.startswith("nn.Linear"))]


def _reads(lowered: Lowered, weight: str) -> bool:
    """Return whether the base model reads a weight elsewhere than in its module."""
    return any(isinstance(o, ParamRef) and o.path == weight for s in lowered.base.statements for o in s.operands)


def _experts(lowered: Lowered) -> dict[str, str]:
    """Whole experts on each device."""
    units = {}
    for home in lowered.emitter.experts:
        held = (k for k in lowered.base.weights if k.startswith(f"{home}."))
        units[home] = dict.fromkeys(held, "grouped_gemm") | {home: "ep_dispatch_experts"}
    return _agreed(units, lowered)[0]


def _sharded(base: BaseModel, staged: Mapping[str, Any]) -> dict[str, str]:
    """The modules whose weights are gathered when they run (FSDP2); those behind the layers keep them until the
    backward."""
    if base.stack is None:
        return {}
    embedding, layers = base.lowered.emitter.embedding, base.stack.path
    ends = [path for path in staged if path not in (embedding, layers)]
    parts = dict.fromkeys(filter(None, (embedding, f"{layers}.*")), "free_full_weight")
    return parts | dict.fromkeys(ends, "keep_full_weight")
