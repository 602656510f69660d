"""The registry of lowerings from ops to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.ir.graph import Node
from weft.ir.op import Op
from weft.ir.registry import Alternatives

from .emitter import Emitter
from .statements import Operand

Emit = Callable[[Emitter, Node], "Operand | Iterable[Operand] | None"]
When = Callable[[Node], str | None]


@dataclass(frozen=True)
class Lowering:
    """A lowering of an op: `emit` emits a node; `when` returns the reason to refuse a node, else None. With `kernels`
    the emitted code calls the package `kernels`, which folders for transformers do not contain."""

    name: str
    when: When
    emit: Emit
    kernels: bool = False


LOWERINGS: Alternatives[Lowering] = Alternatives("lowered op", "weft.backends.torch.ops", "see `weft ops`")


def lowering(
    *ops: Op, when: When = lambda node: None, first: bool = False, kernels: bool = False
) -> Callable[[Emit], Emit]:
    """Register the decorated function as a lowering of `ops`; lowerings are tried in the order of registration. `when`
    returns the reason to refuse a node, else None. With `first`, the lowering precedes those registered earlier. The
    function returns operands for the node's outputs, or None if it has assigned ``emitter[output]`` itself."""

    def register(emit: Emit) -> Emit:
        for op in ops:
            name = getattr(emit, "__name__", op.name)
            LOWERINGS.put(op.name, Lowering(name, when, emit, kernels), first)
        return emit

    return register
