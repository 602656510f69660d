"""Mixtures of experts in a decode step: norm, router, the chosen experts, and the residual add."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node

from ...kernels import route as routing
from ...kernels.moe_grouped import LEAST_ROWS
from ...ops.calls import FunctionCall
from ...program.statements import Operand, Var
from ..step_emitter import StepEmitter, step_lowering
from .step_linear import add_activation, refuse_activation, refuse_gemv


@step_lowering(ops.norm_route, ops.choose_experts)
def defer_routing(e: StepEmitter, node: Node) -> tuple[Var, ...]:
    """Return placeholders for the chosen experts and their weights; the mixture that reads them emits the call."""
    return e.make_placeholders(node)


@step_lowering(ops.mixture, when=refuse_activation)
def emit_mixture(e: StepEmitter, node: Node) -> Var:
    """Emit and return the weighted sum of the chosen experts, added to the residual stream if there is one."""
    x, norm, stream = node.required_operand("x"), e.find_norm(node), node.operand("residual")
    up, down = (node.required_operand(name) for name in ("up", "down"))
    route = node.required_operand("chosen").producer
    assert route is not None
    chosen = FunctionCall("route" if route.op is ops.choose_experts else "norm_route")
    call = FunctionCall("moe_decode", chosen.operands)
    weights = _add_routing(e, chosen, route)
    call.add(f"{call.placeholder(x)}.flatten(0, 1)", f"*{chosen}", up, down)
    call.add_named(**{name: node.operand(name) for name in ("gate", "up_bias", "down_bias", "gate_bias")})
    if stream is not None:
        call.add(f"residual={call.placeholder(stream)}.flatten(0, 1)")
    call.add_named(norm=norm)
    add_activation(call, node)
    call.add_named(tickets=e.emit_tickets(-(-x.width // LEAST_ROWS)))
    e.scope = e.find_scope(norm, *weights, e[up], e[down])
    e.record_kernel("moe_decode", refuse_gemv)
    return call.emit(e, f".view_as({call.placeholder(x)})", name="x", replaces=stream)


def _add_routing(e: StepEmitter, call: FunctionCall, route: Node) -> list[Operand | None]:
    """Add the arguments of `route` to `call`, record its kernel; return its weight, bias and norm, or []."""
    a, weights, has_router = route.attrs, list[Operand | None](), route.op is ops.norm_route
    experts = route.required_operand("weight").shape[0] if has_router else route.required_operand("logits").shape[-1]
    rows = f"{call.placeholder(route.required_operand('x' if has_router else 'logits'))}.flatten(0, 1)"

    def refuse(dtype: torch.dtype) -> str | None:
        return routing.refusal(torch.empty(1, experts, dtype=dtype, device="meta"), a["k"])

    if has_router:
        weights = [e.get_weight(route.operand("weight")), e.get_weight(route.operand("bias")), e.find_norm(route)]
        call.add(rows, weights[0])
        call.add_named(bias=weights[1], correction=route.operand("correction"), norm=weights[2])
        e.record_kernel("norm_route", refuse_gemv, refuse, node=route)
    else:
        call.add(rows).add_named(bias=route.operand("bias"))
        e.record_kernel("route", refuse, node=route)
    call.set("k", a["k"]).set("scoring", a["scoring"], default="softmax")
    call.set("renormalize", a["renormalize"], default=True).set("scale", a["scale"], default=1)
    if a["groups"] > 1:
        for name in ("groups", "top_groups", "group_score"):
            call.set(name, a[name])
    if has_router:
        call.add_named(tickets=e.emit_tickets(1))
    return weights
