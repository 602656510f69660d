"""Mixtures of experts of a decode step: norm, router and choice, the chosen experts, and the residual add."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node

from ...kernels import route as routing
from ...kernels.moe_grouped import LEAST_ROWS
from ...ops.calls import FunctionCall
from ...program.statements import Operand, Var
from ..step_emitter import StepEmitter
from ..step_registry import lowers
from .step_linear import few_rows, opening, unknown


@lowers(ops.norm_route, ops.choose_experts)
def choice(e: StepEmitter, node: Node) -> tuple[Var, ...]:
    """Return placeholders for the chosen experts and their weights; the mixture that reads them emits the call."""
    return e.placeholders(node)


@lowers(ops.mixture, when=unknown)
def mixture(e: StepEmitter, node: Node) -> Var:
    """Emit the choice of experts and their weighted sum, added to the residual stream if the op has one."""
    x, norm, stream = node.required_operand("x"), e.norm_of(node), node.operand("residual")
    up, down = (node.required_operand(name) for name in ("up", "down"))
    route = node.required_operand("chosen").producer
    assert route is not None
    chosen = FunctionCall("route" if route.op is ops.choose_experts else "norm_route")
    call = FunctionCall("moe_decode", chosen.operands)
    weights = _add_routing(e, chosen, route)
    call.give(f"{call.place(x)}.flatten(0, 1)", f"*{chosen}", up, down)
    call.named(**{name: node.operand(name) for name in ("gate", "up_bias", "down_bias", "gate_bias")})
    if stream is not None:
        call.give(f"residual={call.place(stream)}.flatten(0, 1)")
    call.named(norm=norm)
    opening(call, node)
    call.named(tickets=e.tickets(-(-x.width // LEAST_ROWS)))
    e.enter_scope_of(norm, *weights, *(e[v] for v in (up, down)))
    e.record_kernel("moe_decode", few_rows)
    return call.emit(e, f".view_as({call.place(x)})", name="x", replaces=stream)


def _add_routing(e: StepEmitter, call: FunctionCall, route: Node) -> list[Operand | None]:
    """Add the arguments of the router `route` to `call`; return its weight, bias and norm, or [] if it has none."""
    a, weights = route.attrs, list[Operand | None]()
    without_router = route.op is ops.choose_experts
    experts = (route.required_operand("logits") if without_router else route.required_operand("weight")).shape[
        -1 if without_router else 0
    ]
    k = a["k"]

    def refuse(dtype: torch.dtype) -> str | None:
        return routing.refusal(torch.empty(1, experts, dtype=dtype, device="meta"), k)

    if without_router:
        call.give(f"{call.place(route.required_operand('logits'))}.flatten(0, 1)").named(bias=route.operand("bias"))
        e.record_kernel_for(route, "route", refuse)
    else:
        norm = e.norm_of(route)
        weights = [e.weight(route.operand("weight")), e.weight(route.operand("bias")), norm]
        call.give(f"{call.place(route.required_operand('x'))}.flatten(0, 1)", weights[0])
        call.named(bias=weights[1], correction=route.operand("correction"), norm=norm)
        e.record_kernel_for(route, "norm_route", few_rows, refuse)
    call.set("k", k).set("scoring", a["scoring"], default="softmax")
    call.set("renormalize", a["renormalize"], default=True).set("scale", a["scale"], default=1)
    if a["groups"] > 1:
        for name in ("groups", "top_groups", "group_score"):
            call.set(name, a[name])
    if not without_router:
        call.named(tickets=e.tickets(1))
    return weights
