"""Mixtures of experts of a decode step: the router's choice, the chosen experts, and what they are added to."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value

from ...kernels import route as routing
from ...kernels.shared import gemv
from ...ops.elementwise import number
from ...program.statements import Operand, Var
from .. import patterns
from ..emitter import Refusal, StepEmitter, options
from ..patterns import Mixture
from .products import opening


def mixture(e: StepEmitter, node: Node) -> Var | None:
    """A mixture by itself."""
    found = patterns.mixture(node.output)
    if isinstance(found, Mixture):
        return mixed(e, found, None)
    e.declined(found or "it is no mixture of the chosen experts")
    return None


def mixed(e: StepEmitter, found: Mixture, stream: Value | Var | None) -> Var:
    """What the experts add to `stream`, if there is one: the choice, then two kernels for the products."""
    node, operands = found.node, list[Value | Operand]()
    x, up, down = (_given(node, name) for name in ("x", "up", "down"))
    chosen = _chosen(found, operands)
    names = ("gate", "up_bias", "down_bias", "gate_bias")
    first = len(operands)
    operands += [x, up, down]
    text = options(operands, **{name: node.operand(name) for name in names})
    if stream is not None:
        text += f", residual={{{len(operands)}}}.flatten(0, 1)"
        operands.append(stream)
    text += opening(node)
    e.within(*(e[v] for v in (up, down)))
    chooses, multiplies = _refusals(found)
    e.chose("route", chooses)
    e.chose("moe_decode", multiplies, parts="" if stream is None else "addition")
    text = f"moe_decode({{{first}}}.flatten(0, 1), *{chosen}, {{{first + 1}}}, {{{first + 2}}}{text})"
    replaces = None if stream is None else len(operands) - 1
    return e.emit(f"{text}.view_as({{{first}}})", *operands, name="x", replaces=replaces)


def _chosen(found: Mixture, operands: list[Value | Operand]) -> str:
    """The text of the router's choice, whose values join `operands`."""
    logits, a = _given(found.route, "logits"), found.route.attrs
    operands.append(logits)
    text = options(operands, bias=found.route.operand("bias")) + f", k={a['k']}"
    text += "" if a["scoring"] == "softmax" else f", scoring={a['scoring']!r}"
    text += "" if a["renormalize"] else ", renormalize=False"
    scale = a["scale"] * found.scale
    text += "" if scale == 1 else f", scale={number(scale)}"
    if a["groups"] > 1:
        text += f", groups={a['groups']}, top_groups={a['top_groups']}, group_score={a['group_score']!r}"
    return f"route({{0}}.flatten(0, 1){text})"


def _refusals(found: Mixture) -> tuple[Refusal, Refusal]:
    """Of the router's choice, and of the experts."""
    experts = _given(found.route, "logits").width
    up = _given(found.node, "up")

    def chooses(dtype: torch.dtype) -> str | None:
        logits = torch.empty(1, experts, dtype=dtype, device="meta")
        return routing.refusal(logits, found.route.attrs["k"])

    def multiplies(dtype: torch.dtype) -> str | None:
        return gemv.refusal(torch.empty(1, up.width, dtype=dtype, device="meta"))

    return chooses, multiplies


def _given(node: Node, name: str) -> Value:
    value = node.operand(name)
    assert value is not None
    return value
