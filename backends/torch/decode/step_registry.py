"""The registry of decode-step lowerings, which lower fused ops to kernel calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.ir.graph import Node
from weft.ir.op import Op
from weft.ir.registry import Registry

from ..program.statements import Operand
from .step_emitter import StepEmitter

Emit = Callable[[StepEmitter, Node], "Operand | tuple[Operand, ...] | None"]
When = Callable[[StepEmitter, Node], "str | None"]


@dataclass(frozen=True)
class StepLowering:
    """A lowering of a fused op: `emit` emits kernel calls for a node; `when` returns a reason to refuse it, or None."""

    emit: Emit
    when: When


STEPS: Registry[StepLowering] = Registry("op of a decode step", "weft.backends.torch.decode.ops", "see `weft ops`")


def step_lowering(*ops: Op, when: When = lambda e, node: None) -> Callable[[Emit], Emit]:
    """Register the decorated function as the lowering of `ops` in decode steps. `when` returns the reason to refuse a
    node, else None. The function emits statements and returns operands for the node's outputs, or None to use the
    model's lowering instead."""

    def register(emit: Emit) -> Emit:
        for op in ops:
            STEPS.add(op.name, StepLowering(emit, when))
        return emit

    return register
