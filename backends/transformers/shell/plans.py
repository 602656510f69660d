"""Plans of parallelism: a model divided among devices, as transformers and engines read it in a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.ir.errors import WeftError

from ...torch.codegen.structure import Item, Loop
from ...torch.decode.divided import COLUMNS, ROWS
from ...torch.package.parallel import Plan, make_plan
from ...torch.program.statements import Statement, Submodule
from ..lower.lower import Lowered
from .base import BaseModel

PACKED = {"gate_up_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"}
LAYER = re.compile(r"\.\d+(?=\.|$)")  # the number of a layer in a path
HIDDEN = (["hidden_states"], ["hidden_states"])


def plans(bases: Sequence[BaseModel]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The plans of tensor, pipeline and expert parallelism that a config holds, by their names there; and why parts
    stay whole under tensor parallelism."""
    tensor, experts, whole = dict[str, str](), dict[str, str](), dict[str, str]()
    for base in reversed(bases):
        divided, reasons = _tensor(base.lowered)
        tensor |= {base.path + path: style for path, style in divided.items()}
        experts |= {base.path + path: style for path, style in _experts(base.lowered).items()}
        whole |= {(base.path + path).strip("."): reason for path, reason in reasons.items()}
    found: dict[str, dict[str, Any]] = {
        "base_model_tp_plan": tensor,
        "base_model_pp_plan": pipeline(bases[0]) if len(bases) == 1 else {},
        "base_model_ep_plan": experts,
    }
    return {name: plan for name, plan in found.items() if plan}, whole


def _tensor(lowered: Lowered) -> tuple[dict[str, str], dict[str, str]]:
    """Linear maps by columns and rows (Shoeybi 2019, arXiv 1909.08053), and the reasons for those that stay whole."""
    try:
        plan = make_plan(lowered.graph, 1, lowered.base)
        whole = {path: reason for path, reason in plan.whole.items() if "experts" not in reason}
    except WeftError as nothing:
        plan, whole = Plan(), {"": str(nothing)}
    styles = {COLUMNS: "colwise", ROWS: "rowwise"}
    found = {path: styles[style] for path, style in plan.styles.items() if style in styles}
    for home in lowered.emitter.experts:
        held = (k.rpartition(".")[2] for k in lowered.base.weights if k.startswith(f"{home}."))
        found |= {f"{home}.{name}": PACKED[name] for name in held if name in PACKED} | {home: "moe_tp_experts"}
    return _folded(found, lowered), whole


def _experts(lowered: Lowered) -> dict[str, str]:
    """Whole experts on each device."""
    found: dict[str, str] = {}
    for home in lowered.emitter.experts:
        held = (k for k in lowered.base.weights if k.startswith(f"{home}."))
        found |= dict.fromkeys(held, "grouped_gemm") | {home: "ep_dispatch_experts"}
    return _folded(found, lowered)


def pipeline(base: BaseModel) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """The embedding, the layers and what follows them, in stages; nothing where layers hand on more than one value."""
    stack, e = base.stack, base.lowered.emitter
    if stack is None or not e.embedding or any(len(c.results) != 1 for c in stack.calls):
        return {}
    items = base.method.items
    place = next(i for i, item in enumerate(items) if isinstance(item, Loop) and item.calls is stack.calls)
    before, after = (list(_modules(part)) for part in (items[:place], items[place + 1 :]))
    if before != [e.embedding]:  # more than the embedding makes what enters the layers
        return {}
    return {
        e.embedding: (["input_ids"], ["inputs_embeds"]),
        stack.path: (["hidden_states", "attention_mask"], ["hidden_states"]),
        **dict.fromkeys(after, HIDDEN),
    }


def _modules(items: Sequence[Item]) -> Iterator[str]:
    """The paths of the modules that `items` call."""
    for item in items:
        if isinstance(item, Statement):
            yield from (o.path for o in item.operands if isinstance(o, Submodule))
        else:
            yield from (c.path for c in (item.calls if isinstance(item, Loop) else [item]))


def _folded(by_path: Mapping[str, str], lowered: Lowered) -> dict[str, str]:
    """`by_path` with ``*`` for the numbers of layers, as far as all layers that have a part agree."""
    every = {*by_path, *lowered.base.weights, *(k.rpartition(".")[0] for k in lowered.base.weights)}
    found: dict[str, set[str | None]] = {}
    for path in every:
        found.setdefault(LAYER.sub(".*", path), set()).add(by_path.get(path))
    order = dict.fromkeys(LAYER.sub(".*", path) for path in by_path)
    return {name: style for name in order for style in found[name] if style and len(found[name]) == 1}
