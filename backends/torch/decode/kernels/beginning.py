"""The beginning of a decode step: embeddings of tokens and positions, and with them the angles of rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.types.block_layouts import BlockLayout

from ...kernels import embed_tokens
from ...ops.calls import Call
from ...program.quantized import kept
from ...program.statements import TOP, Statement, Var
from .. import divided
from ..emitter import StepEmitter
from ..gates import maker, single


@dataclass(frozen=True)
class Embedded:
    """scale · the row of `weight` for each token + the row of `table` for its position + `offset`, if there is one."""

    weight: Param
    scale: float = 1.0
    table: Param | None = None
    offset: int = 0


def embedded(value: Value | None, alone: bool = False) -> Embedded | None:
    """`value` taken as embeddings of the tokens of the graph; it must be read once if it is not `alone` asked for."""
    if value is None or len(value.shape) != 3 or not (alone or single(value)):
        return None
    if (node := maker(value, ops.embedding)) is not None:
        ids, weight = node.inputs[:2]
        tokens = ids is not None and ids is node.graph.inputs.get("input_ids")
        return Embedded(weight) if tokens and _whole(weight) else None
    if (node := maker(value, ops.affine)) is not None and node.attrs["plus"] == 0:
        inner = embedded(node.inputs[0])
        return None if inner is None or inner.table else replace(inner, scale=inner.scale * node.attrs["by"])
    if (node := maker(value, ops.add)) is not None:
        for one, other in (node.inputs[:2], node.inputs[1::-1]):
            inner, learned = embedded(one), _learned(other)
            if inner is not None and not inner.table and learned is not None:
                return replace(inner, table=learned[0], offset=learned[1])
    return None


def _learned(value: Value | None) -> tuple[Param, int] | None:
    """The table of learned positions that `value` is read from, and what is added to positions."""
    node = maker(value, ops.embedding)
    if node is None or value is None or not single(value):
        return None
    ids, table = node.inputs[:2]
    offset, moved = 0, maker(ids, ops.affine)
    if moved is not None and moved.attrs["by"] == 1 and moved.attrs["plus"] == int(moved.attrs["plus"]):
        ids, offset = moved.inputs[0], int(moved.attrs["plus"])
    counted = ids is not None and ids is node.graph.inputs.get("position_ids")
    return (table, offset) if counted and _whole(table) and len(table.shape) == 2 else None


def _whole(weight: Value | None) -> TypeGuard[Param]:
    """Return whether `weight` is a parameter whose numbers are held, not blocks."""
    return isinstance(weight, Param) and not isinstance(kept(weight), BlockLayout)


def begins(e: StepEmitter, node: Node) -> Var | None:
    """The embeddings that `node` is the last node of."""
    found = embedded(node.output, alone=True)
    if found is None or (
        single(node.output) and any(embedded(v, alone=True) for user in node.output.users for v in user.outputs)
    ):
        return None
    ids: Value | Var = node.graph.inputs["input_ids"]
    if shared := divided.style(e, found.weight) == divided.TOKENS:
        rows = f"{{0}}.rows({{1}}, {found.weight.shape[0]})"
        ids, mine = e.hoist_many("rows", rows, divided.group(e), ids, names=("own_ids", "mine"))
    call = Call("embed_tokens").give(ids, found.weight, e.positions)
    call.set("scale", float(found.scale), default=1.0).named(table=found.table).set("offset", found.offset, default=0)
    e.scope = TOP
    parts = ["scale"] * (found.scale != 1) + ["positions"] * (found.table is not None)
    e.chose("embed_tokens", _refusal, parts=", ".join(parts))
    x = call.emit(e, name="x")
    e.program.statements[-1].text += "[0]"
    return e.emit("{0}.embedded({1}, {2})", divided.group(e), x, mine, name="x") if shared else x


def _refusal(dtype: torch.dtype) -> str | None:
    return embed_tokens.refusal(torch.empty(1, 1, dtype=dtype, device="meta"))


def with_angles(statements: Sequence[Statement]) -> list[Statement]:
    """`statements`, the angles of rotations as results of the call that embeds tokens, if there is one."""
    statements = list(statements)
    start = next((s for s in statements if s.text.startswith("embed_tokens(")), None)
    if start is None:
        return statements
    positions = start.operands[2]
    turned = [s for s in statements if s.text.startswith(ANGLES) and s.operands[0] is positions]
    turned = turned[: embed_tokens.MOST_TABLES]
    ahead = _before(statements, [o for s in turned for o in s.operands[1:]])
    if not turned or start in ahead:
        return statements
    head, tail = start.text.removesuffix("[0]").split("{2}", 1)
    operands, tables = list(start.operands), ""
    for s in turned:
        operands.append(s.operands[1])
        amplitude = s.text.rpartition("{1}")[2].strip("), ") or "1.0"
        tables += f", ({{{len(operands) - 1}}}, {amplitude})"
    merged = replace(
        start,
        text=f"{head}{{2}}{tables}{tail}",
        operands=tuple(operands),
        results=(*start.results, *(r for s in turned for r in s.results)),
    )
    rest = [merged if s is start else s for s in statements if s not in turned and s not in ahead]
    return [*ahead, *rest]


ANGLES = "(table.flatten(0, 2) for table in rotary"


def _before(statements: Sequence[Statement], wanted: Sequence[object]) -> list[Statement]:
    """The statements that make what is `wanted`, in order."""
    needed, found = {*wanted}, []
    for s in reversed(statements):
        if needed.intersection(s.results):
            found.append(s)
            needed.update(s.operands)
    return found[::-1]
