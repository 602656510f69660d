"""The registry of a decode step's lowerings: how fused ops become calls of kernels."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir.graph import Node
from weft.ir.op import Op

from ..program.statements import Operand
from .emitter import StepEmitter

Emit = Callable[[StepEmitter, Node], "Operand | tuple[Operand, ...] | None"]
When = Callable[[StepEmitter, Node], "str | None"]
STEPS: dict[Op, tuple[Emit, When]] = {}


def lowers(*ops: Op, when: When = lambda e, node: None) -> Callable[[Emit], Emit]:
    """Register the decorated function as the lowering of `ops` in a decode step, unless `when` says why not.

    It returns what the outputs of a node became; or None, after which the model's own lowering takes it.
    """

    def register(emit: Emit) -> Emit:
        STEPS.update(dict.fromkeys(ops, (emit, when)))
        return emit

    return register
