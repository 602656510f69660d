"""A step as formulas, for people: ``h' = a · h + (1 − a) · x``."""

from __future__ import annotations

import re

from weft.ir import Node, Value, ops
from weft.ir.graph.step import Step
from weft.ir.op import Op

NEW = "'"  # the state after the token; the fonts of pictures lack the sign of a prime
_SIGNS: dict[Op, tuple[str, int]] = {
    **{ops.add: (" + ", 1), ops.sub: (" − ", 1), ops.mul: (" · ", 2), ops.div: (" / ", 2), ops.matmul: (" @ ", 2)},
    **{ops.less: (" < ", 0), ops.less_equal: (" ≤ ", 0), ops.equal: (" = ", 0)},
}
_MOVES = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.expand, ops.cast)
_ATOM = 4


def formulas(step: Step) -> list[str]:
    """Return a formula for each new state and output of `step`, in which what moves numbers only is left out.

    Values that are read several times have formulas of their own before them.
    """
    names: dict[Value, str] = {v: name for name, v in step.graph.inputs.items()}
    new = {step.new(name): f"{name}{NEW}" for name in step.states}
    outputs = {step.graph.outputs[name]: name for name in step.outputs}
    lines, letters = [], (c for c in "uvwpqrtabcdefgijklnoz" if c not in {*step.graph.inputs, *step.outputs})

    def called(v: Value, op: Op) -> str:
        own = re.sub(r"_\d+$", "", v.name)
        return new.get(v) or outputs.get(v) or (next(letters, v.name) if own == op.name else v.name)

    for node in step.graph.nodes:
        v, *others = node.outputs
        once = len(v.uses) + (v in new) + (v in outputs) < 2
        if not others and v not in new and (once or node.op in _MOVES or _is_short(node)):
            continue
        text, _ = _formula(node, names)
        names |= {v: called(v, node.op) for v in node.outputs}
        lines.append(f"{', '.join(names[v] for v in node.outputs)} = {text}")
    for v, name in outputs.items():
        text, _ = _text(v, names)
        if text != name:
            lines.append(f"{name} = {text}")
    return lines


def _is_short(node: Node) -> bool:
    """Return whether a formula reads better with the node written out each time: 1 − x."""
    return node.op is ops.affine and node.required("x").producer is None


def _text(value: Value, names: dict[Value, str]) -> tuple[str, int]:
    """The text of a value, and how tightly its last sign binds."""
    if value in names:
        return names[value], _ATOM
    assert value.producer is not None
    return _formula(value.producer, names)


def _formula(node: Node, names: dict[Value, str]) -> tuple[str, int]:
    given = [_text(v, names) for v in node.inputs if v is not None]
    if node.op in _MOVES:
        return given[0]
    if node.op in _SIGNS:
        sign, binds = _SIGNS[node.op]
        (x, left), (y, right) = given
        strict = node.op in (ops.sub, ops.div, ops.matmul)
        return f"{_within(x, left < binds)}{sign}{_within(y, right < binds + strict)}", binds
    if node.op is ops.neg:
        return f"−{_within(given[0][0], given[0][1] < 2)}", 1
    if node.op is ops.affine:
        return _scaled(given[0], node.attrs["by"], node.attrs["plus"])
    return f"{node.op.name}({', '.join(text for text, _ in given)})", _ATOM


def _scaled(given: tuple[str, int], by: float, plus: float) -> tuple[str, int]:
    """x · by + plus."""
    if by == 0:
        return _number(plus), _ATOM
    x, binds = given
    if by == -1 and plus != 0:
        return f"{_number(plus)} − {_within(x, binds < 2)}", 1
    if by != 1:
        x, binds = f"{_number(by)} · {_within(x, binds < 2)}", 2
    if plus == 0:
        return x, binds
    return f"{x} {'+' if plus > 0 else '−'} {_number(abs(plus))}", 1


def _number(x: float) -> str:
    return f"{x:.6g}".replace("-", "−")


def _within(text: str, closed: bool) -> str:
    return f"({text})" if closed else text
