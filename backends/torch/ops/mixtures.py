"""Mixture of experts: routers, experts and capacity limits."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node

from ..program.emitter import Emitter
from ..program.registry import lowering
from ..program.statements import Operand, Var
from .calls import FunctionCall
from .elementwise import format_number, write_activation

ROUTER_SNIPPETS = {  # routers that are one snippet: (scoring, renormalize, with bias, score of groups)
    ("softmax", True, False, ""): "route_softmax({0}, {k})",
    ("softmax", False, False, ""): "route_switch({0}, {k})",
    ("sigmoid", False, False, ""): "route_sigmoid({0}, {k})",
    ("softmax", False, False, "max"): "route_softmax_groups({0}, {k}, {groups}, {top_groups})",
    ("sigmoid", True, True, "top2"): "route_sigmoid_groups({0}, {1}, {k}, {groups}, {top_groups})",
}


@lowering(ops.route)
def _route(e: Emitter, node: Node) -> Var:
    a, operands = node.attrs, [v for v in node.inputs if v is not None]
    kind = a["scoring"], a["renormalize"], len(operands) == 2, a["group_score"] if a["groups"] > 1 else ""
    times = "" if a["scale"] == 1 else f" * {format_number(e.attr(node, 'scale'))}"
    named = {name: e.attr(node, name) for name in a}
    if kind in ROUTER_SNIPPETS:
        text = ROUTER_SNIPPETS[kind].format("{0}", "{1}", **named)
        return e.emit(text + times, *operands)
    function = "sigmoid()" if a["scoring"] == "sigmoid" else "softmax(-1)"
    scores = e.emit(f"wide({{0}}).{function}", operands[0], name="scores")
    ranks = scores if len(operands) == 1 else e.emit("{0} + {1}", scores, operands[1], name="ranks")
    if a["groups"] > 1:
        best = "best_of_groups" if a["group_score"] == "max" else "best_two_of_groups"
        text = f"mask_groups({{0}}, {best}({{0}}, {named['groups']}), {named['top_groups']})"
        ranks = e.emit(text, ranks, name="ranks", replaces=0 if len(operands) == 2 else None)
    weights = f"keep_top({{0}}, {{1}}, {named['k']})"
    weights = f"renormalize({weights})" if a["renormalize"] else weights
    return e.emit(f"({weights}{times}).to({{2}}.dtype)", scores, ranks, operands[0])


@lowering(ops.moe)
def _moe(e: Emitter, node: Node) -> Var:
    names = [n for stack in ("gate", "up", "down") for n in (stack, f"{stack}_bias") if node.operand(n) is not None]
    active = node.attrs["active"] or node.required_operand("up").shape[0]
    expert = e.add_function("expert", _write_expert(node, names))
    x = node.required_operand("x")
    call = FunctionCall("moe").add(x, node.operand("combine"), str(active), expert, *map(node.operand, names))
    e.scope = _find_expert_scope(node, names)
    return call.emit(e, replaces=x)


def _find_expert_scope(node: Node, names: list[str]) -> str:
    """Return the scope that runs the experts: the inner module with all weights `names`, else that of `node`."""
    home, *rest = {node.required_operand(n).name.rpartition(".")[0] for n in names}
    return node.scope if rest or not home.startswith(f"{node.scope}.") else home


def _write_expert(node: Node, names: list[str]) -> str:
    """Return the source of a function ``{name}`` that computes one expert's MLP with the weights called `names`."""
    limit, shift, act = node.attrs["limit"], node.attrs["shift"], write_activation(node.attrs["activation"])

    def product(x: str, stack: str) -> str:
        bias = f", {stack}_bias" if f"{stack}_bias" in names else ""
        return f"linear({x}, {stack}{bias})"

    lines, gate, up = [], product("x", "gate"), product("x", "up")
    if "gate" not in names:
        lines.append(f"up = {up}")
        activated = act.format("up")
    else:
        if limit is not None:
            gate = f"{gate}.clamp(max={format_number(limit)})"
            up = f"{up}.clamp({format_number(-limit)}, {format_number(limit)})"
        if act.count("{0}") > 1:
            lines.append(f"gate = {gate}")
            gate = "gate"
        up = up if shift == 0 else f"({up} + {format_number(shift)})"
        activated = f"{act.format(gate)} * {up}"
    lines.append(f"return {product(activated, 'down')}")
    doc = '"""Return the output of one expert for x [tokens, dim]; `linear` multiplies by its part of the weights."""'
    parameters = ", ".join(f"{name}: Tensor" for name in ("x", *names))
    head = f"def {{name}}(linear: Callable[..., Tensor], {parameters}) -> Tensor:"
    return "\n    ".join([head, doc, *lines])


@lowering(ops.limit_capacity, ops.expert_choice)
def _limit_tokens(e: Emitter, node: Node) -> Var:
    """Emit the snippet that limits each expert to a capacity in tokens, of all batch rows if `batched`."""
    x, limit, factor = node.required_operand(node.op.operands[0].name), node.attrs["capacity"], node.attrs["factor"]
    rows: Operand = e[x]
    if node.attrs["batched"] and len(x.shape) > 2:
        rows = e.emit("{0}.flatten(0, -2)", x, name=x.name.rpartition(".")[2])
    if limit is None:
        limit = f"expert_capacity({{0}}.shape[-2], {e.size_of(x)}, {format_number(factor)})"
    activated = e.emit(f"{node.op.name}({{0}}, {limit})", rows)
    return activated if rows is e[x] else e.emit("{0}.view_as({1})", activated, x, replaces=0)


@lowering(ops.load_balance_loss)
def _load_balance_loss(e: Emitter, node: Node) -> Var:
    return e.emit("load_balance_loss({0}, {1})", node.required_operand("logits"), node.required_operand("combine"))
