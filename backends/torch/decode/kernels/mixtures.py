"""Mixtures of experts of a decode step: norm, router and choice, the chosen experts, and what they are added to."""

from __future__ import annotations

import torch

from weft.ir.graph import Node, Value

from ...kernels import route as routing
from ...kernels.moe_grouped import LEAST_ROWS
from ...ops.calls import Call
from ...program.statements import Operand, Var
from .. import divided, patterns
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
    node, x, norm = found.node, found.source.x, e.norm(found.source.node)
    up, down = (node.required(name) for name in ("up", "down"))
    chosen = Call("route" if found.router is None else "norm_route")
    call = Call("moe_decode", chosen.operands)
    weights = _choose(e, chosen, found)
    group = divided.group(e) if divided.style(e, up) == divided.EXPERTS else None
    choice = str(chosen) if group is None else f"{call.place(group)}.chosen(*{chosen}, {up.shape[0]})"
    call.give(f"{call.place(x)}.flatten(0, 1)", f"*{choice}", up, down)
    call.named(**{name: node.operand(name) for name in ("gate", "up_bias", "down_bias", "gate_bias")})
    if stream is not None and group is None:
        call.give(f"residual={call.place(stream)}.flatten(0, 1)")
    call.named(norm=norm)
    opening(call, node)
    call.named(tickets=e.tickets(-(-x.width // LEAST_ROWS)))
    e.within(norm, *weights, *(e[v] for v in (up, down)))
    _explain(e, found, norm is not None, stream is not None)
    if group is None:
        return call.emit(e, f".view_as({call.place(x)})", name="x", replaces=stream)
    made = call.emit(e, f".view_as({call.place(x)})")
    if stream is None:
        return e.emit("{0}.sum({1})", group, made, replaces=1)
    return e.emit("add_parts({0}, {1}, group={2})", made, stream, group, name="x", replaces=1)


def _explain(e: StepEmitter, found: Mixture, normed: bool, added: bool) -> None:
    experts, k = found.route.required("logits").width, found.route.attrs["k"]

    def refused(dtype: torch.dtype) -> str | None:
        return routing.refusal(torch.empty(1, experts, dtype=dtype, device="meta"), k)

    if found.router is None:
        e.chose("route", refused)
    else:
        e.chose("norm_route", few_rows, refused, parts="norm and router" if found.router.source.node else "router")
    e.chose("moe_decode", few_rows, parts=", ".join(["norm"] * normed + ["addition"] * added))


def _choose(e: StepEmitter, call: Call, found: Mixture) -> list[Operand | None]:
    """Give `call` the arguments of the router's choice; the weights among them."""
    node, a, router = found.route, found.route.attrs, found.router
    weights: list[Operand | None] = []
    if router is None:
        call.give(f"{call.place(node.required('logits'))}.flatten(0, 1)").named(bias=node.operand("bias"))
    else:
        norm = e.norm(router.source.node)
        weights = [e.weight(router.weight), e.weight(router.bias), norm]
        call.give(f"{call.place(router.source.x)}.flatten(0, 1)", weights[0])
        call.named(bias=weights[1], correction=node.operand("bias"), norm=norm)
    call.set("k", a["k"]).set("scoring", a["scoring"], default="softmax")
    call.set("renormalize", a["renormalize"], default=True).set("scale", a["scale"] * found.scale, default=1)
    if a["groups"] > 1:
        for name in ("groups", "top_groups", "group_score"):
            call.set(name, a[name])
    if router is not None:
        call.named(tickets=e.tickets(1))
    return weights
