"""Weights of a decode step that processes share: how each kind is divided, and what the processes exchange for it."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Param, Value

from ..program.statements import Submodule, Var
from .emitter import StepEmitter

# How a plan divides modules, as it is written in parallel.py: outputs, inputs or experts of layers, rows of the
# embedding and outputs of the head.
COLUMNS, ROWS, EXPERTS = "ColwiseParallel()", "RowwiseParallel()", "ExpertParallel()"
TOKENS, LOGITS = "RowwiseParallel(input_layouts=Replicate())", "ColwiseParallel(output_layouts=Replicate())"
GROUP = Submodule("group", "Group(module)")


def style(e: StepEmitter, weight: Value | None) -> str:
    """Return how the module that holds `weight` is divided; nothing, if every process has all of it."""
    if weight is not None and weight.producer is not None and weight.producer.op is ops.pack:
        return style(e, weight.producer.inputs[0])
    return e.styles.get(weight.name.rpartition(".")[0], "") if isinstance(weight, Param) else ""


def group(e: StepEmitter) -> Var:
    """The processes that share the model, which layers hand on."""
    made = e.hoist("group", "{0}", GROUP, name="group")
    made.type = "Group"
    return made


def whole(e: StepEmitter, made: Var, weight: Value) -> Var:
    """The product `made` of what this process holds of `weight`, as all make it; a bias comes after this."""
    match style(e, weight):
        case kind if kind == ROWS:
            return e.emit("{0}.sum({1})", group(e), made, replaces=1)
        case kind if kind == LOGITS:
            return e.emit(f"{{0}}.gather({{1}}, {weight.shape[0]})", group(e), made, replaces=1)
    return made
