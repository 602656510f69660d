"""Write a step as formulas for people to read, such as ``h' = a · h + (1 − a) · x``."""

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


def write_formulas(step: Step) -> list[str]:
    """Return `step` as formulas, at least one string per new state and output; ops that only move elements are omitted.

    A value with several readers gets its own formula, before those that use it.
    """
    names: dict[Value, str] = {v: name for name, v in step.graph.inputs.items()}
    new = {step.new_state(name): f"{name}{NEW}" for name in step.states}
    outputs = {step.graph.outputs[name]: name for name in step.outputs}
    lines, letters = [], (c for c in "uvwpqrtabcdefgijklnoz" if c not in {*step.graph.inputs, *step.outputs})

    def name_value(v: Value, op: Op) -> str:
        stem = re.sub(r"_\d+$", "", v.name)
        return new.get(v) or outputs.get(v) or (next(letters, v.name) if stem == op.name else v.name)

    for node in step.graph.nodes:
        v, *other_outputs = node.outputs
        is_read_once = len(v.uses) + (v in new) + (v in outputs) < 2
        # An affine of a graph input, such as 1 − x, is repeated instead of named.
        is_short = node.op is ops.affine and node.required_operand("x").producer is None
        if not other_outputs and v not in new and (is_read_once or node.op in _MOVES or is_short):
            continue
        text, _ = _spell_node(node, names)
        names |= {v: name_value(v, node.op) for v in node.outputs}
        lines.append(f"{', '.join(names[v] for v in node.outputs)} = {text}")
    for v, name in outputs.items():
        text, _ = _spell_value(v, names)
        if text != name:
            lines.append(f"{name} = {text}")
    return lines


def _spell_value(value: Value, names: dict[Value, str]) -> tuple[str, int]:
    """Return the text of `value` and the precedence of its outermost operator; `names` has the text of named values."""
    if value in names:
        return names[value], _ATOM
    assert value.producer is not None
    return _spell_node(value.producer, names)


def _spell_node(node: Node, names: dict[Value, str]) -> tuple[str, int]:
    operands = [_spell_value(v, names) for v in node.inputs if v is not None]
    if node.op in _MOVES:
        return operands[0]
    if node.op in _SIGNS:
        sign, binds = _SIGNS[node.op]
        (x, left), (y, right) = operands
        strict = node.op in (ops.sub, ops.div, ops.matmul)
        return f"{_parenthesize(x, left < binds)}{sign}{_parenthesize(y, right < binds + strict)}", binds
    if node.op is ops.neg:
        return f"−{_parenthesize(operands[0][0], operands[0][1] < 2)}", 1
    if node.op is ops.affine:
        return _spell_affine(operands[0], node.attrs["by"], node.attrs["plus"])
    return f"{node.op.name}({', '.join(text for text, _ in operands)})", _ATOM


def _spell_affine(operand: tuple[str, int], by: float, plus: float) -> tuple[str, int]:
    """Return the text and precedence of x · by + plus, where `operand` is (text, precedence) of x."""
    if by == 0:
        return _spell_number(plus), _ATOM
    x, binds = operand
    if by == -1 and plus != 0:
        return f"{_spell_number(plus)} − {_parenthesize(x, binds < 2)}", 1
    if by != 1:
        x, binds = f"{_spell_number(by)} · {_parenthesize(x, binds < 2)}", 2
    if plus == 0:
        return x, binds
    return f"{x} {'+' if plus > 0 else '−'} {_spell_number(abs(plus))}", 1


def _spell_number(x: float) -> str:
    return f"{x:.6g}".replace("-", "−")


def _parenthesize(text: str, needed: bool) -> str:
    return f"({text})" if needed else text
