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
    """A lowering of a node to kernel calls, `emit`, for the nodes for which `when` returns None, not a reason (str)."""

    emit: Emit
    when: When


STEPS: Registry[StepLowering] = Registry("op of a decode step", "weft.backends.torch.decode.ops", "see `weft ops`")


def step_lowering(*ops: Op, when: When = lambda e, node: None) -> Callable[[Emit], Emit]:
    """Register the decorated function as the lowering of `ops` in a decode step, if `when` returns no reason.

    The function emits statements for a node and returns operands for its outputs, or None to fall back to the lowering
    of the model.
    """

    def register(emit: Emit) -> Emit:
        for op in ops:
            STEPS.add(op.name, StepLowering(emit, when))
        return emit

    return register
