"""Mixtures of experts of a decode step: the router's choice, the chosen experts, and what they are added to."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value

from ...kernels import route as routing
from ...ops.calls import Call
from ...program.statements import Var
from .. import patterns
from ..emitter import StepEmitter
from ..patterns import Mixture
from .products import few_rows, opening


def mixture(e: StepEmitter, node: Node) -> Var | None:
    """A mixture by itself."""
    found = patterns.mixture(node.output)
    if isinstance(found, Mixture):
        return mixed(e, found, None)
    e.declined(found or "it is no mixture of the chosen experts")
    return None


def mixed(e: StepEmitter, found: Mixture, stream: Value | Var | None) -> Var:
    """Emit what the experts add to `stream`, if there is one: the choice, then two kernels for the products."""
    node = found.node
    x, up, down = (node.required(name) for name in ("x", "up", "down"))
    chosen = Call("route")
    call = Call("moe_decode", chosen.operands)
    _choose(chosen, found)
    call.give(f"{call.place(x)}.flatten(0, 1)", f"*{chosen}", up, down)
    call.named(**{name: node.operand(name) for name in ("gate", "up_bias", "down_bias", "gate_bias")})
    if stream is not None:
        call.give(f"residual={call.place(stream)}.flatten(0, 1)")
    opening(call, node)
    e.within(*(e[v] for v in (up, down)))
    experts, k = found.route.required("logits").width, found.route.attrs["k"]
    e.chose("route", lambda dtype: routing.refusal(torch.empty(1, experts, dtype=dtype, device="meta"), k))
    e.chose("moe_decode", few_rows, parts="" if stream is None else "addition")
    return call.emit(e, f".view_as({call.place(x)})", name="x", replaces=stream)


def _choose(call: Call, found: Mixture) -> None:
    """The arguments of the router's choice."""
    node, a = found.route, found.route.attrs
    call.give(f"{call.place(node.required('logits'))}.flatten(0, 1)").named(bias=node.operand("bias"))
    call.set("k", a["k"]).set("scoring", a["scoring"], default="softmax")
    call.set("renormalize", a["renormalize"], default=True).set("scale", a["scale"] * found.scale, default=1)
    if a["groups"] > 1:
        for name in ("groups", "top_groups", "group_score"):
            call.set(name, a[name])
