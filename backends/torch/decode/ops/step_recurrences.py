"""Recurrences of a decode step: one token of a convolution, a state space, linear attention or the delta rule, with
the state updated in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.ir import ops
from weft.ir.graph import Graph, Node
from weft.ir.graph.step import Step
from weft.passes.analysis.states import find_states, has_state

from ...kernels import matrix_step
from ...kernels.prefill import mamba2_scan, mamba_scan
from ...kernels.shared import operands
from ...ops.calls import FunctionCall
from ...ops.custom_recurrences import function_text, step_function, tuple_text
from ...ops.elementwise import activation
from ...ops.recurrent import features
from ...program.emitter import local_name
from ...program.statements import CacheSlot, Var
from ..step_emitter import StepEmitter
from ..step_registry import lowers
from .scan_kernel import NoKernel, scan_kernel
from .scan_parts import split_products
from .step_linear import kernel_activation

BY_TOKEN = ("x", "delta", "b", "c")  # operands of a state space with a row for each token


def _is_stateless(e: StepEmitter, node: Node) -> bool:
    """Return whether the state of `node` is not in the cache; if it is an operand instead, record that as a reason."""
    if node in e.cached and has_state(node):
        e.record_fallback("its state is an operand")
    return node not in e.cached or has_state(node)


def _refuse_weights(e: StepEmitter, node: Node) -> str | None:
    """Return None, or the reason (str) why the weights of a recurrence cannot be arguments of its kernel."""
    weights = "weight", "bias", "b_weight", "c_weight", "a_log"
    return None if e.scope_around_all(node, *weights) == node.scope else "its weights stand apart"


@lowers(ops.scan)
def scan(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """Emit one token of a user-defined recurrence as a call of a kernel generated for it; return None if no kernel can
    be generated or the state is not in the cache."""
    if _is_stateless(e, node):
        return None
    full: Step = node.attrs["step"]
    parts = split_products(full)
    step = full if parts is None else parts[1]
    try:
        kernel = scan_kernel(step)
    except NoKernel as reason:
        e.record_fallback(str(reason))
        return None
    function = step_function(e, step)
    name = f"{function}_kernel"
    e.kernels[name] = kernel.text.replace("{name}", name)
    call = FunctionCall("step_in_place").give(name, function)
    state = f"{call.place(CacheSlot(find_states(node)[0].part, '', ''))}.values"
    values = [call.place(v) for v in node.inputs if v is not None]
    arguments = dict(zip((*full.tokens, *full.constants), values, strict=True))
    arguments |= {part: f"{state}[{i}]" for i, part in enumerate(full.states)}
    tokens, constants = ([arguments[n] for n in part if n in arguments] for part in (step.tokens, step.constants))
    if parts is not None:
        tokens.append(f"*{_call_products(e, full, parts[0], arguments)}")
    call.give(state)
    call.arguments += [tuple_text(part) for part in (tokens, constants) if part]
    outputs = tuple_text([tuple_text([*map(str, shape)]) for shape in kernel.outputs])
    call.arguments += [f"outputs={outputs}", f"count={kernel.count}", f"block={kernel.block}"]
    e.record_kernel(name, lambda dtype: operands.refusal(torch.empty(1, dtype=dtype, device="meta")))
    return e.many(str(call), *call.operands, names=tuple(v.name.rpartition(".")[2] for v in node.outputs))


def _call_products(e: StepEmitter, step: Step, products: Graph, arguments: Mapping[str, str]) -> str:
    """Return the text of a call of `products_of` that computes the `products` of `step`, with a function added to the
    program; `arguments` maps inputs of the step to text."""
    doc = "Return the products by weights in the step of a recurrence, given"
    function = e.function("products", function_text(products, [*products.outputs], doc))
    kinds = (step.states, step.tokens, step.constants)
    parts = [tuple_text([arguments[n] for n in kind if n in products.inputs]) for kind in kinds]
    return f"step_products({', '.join([function, *parts])})"


@lowers(ops.causal_conv)
def causal_conv(e: StepEmitter, node: Node) -> Var | None:
    """Emit one token of a causal convolution over the last inputs."""
    if _is_stateless(e, node):
        return None
    call, name = FunctionCall("conv_step"), kernel_activation(node.attrs["activation"])
    call.give(f"{call.place(node.required_operand('x'))}[:, 0]", node.required_operand("weight"), node.operand("bias"))
    _add_state(call, node).set("activation", name or "identity", default="silu")
    e.record_kernel("conv_step", lambda dtype: operands.refusal(_like(node, "x", dtype)))
    y = call.emit(e, "[0][:, None]")
    return y if name else e.emit(activation(node.attrs["activation"]), y, replaces=0)


@lowers(ops.matrix_recurrence, when=_refuse_weights)
def matrix(e: StepEmitter, node: Node) -> Var | None:
    """Emit one token of linear attention or of the delta rule, with the norms, decay and gate around it."""
    if _is_stateless(e, node):
        return None
    call, a = FunctionCall("matrix_step"), node.attrs

    def row(name: str) -> str:
        return f"{call.place(node.required_operand(name))}[:, 0]"

    _add_state(call.give(row("q"), row("k"), row("v")), node)
    call.set("heads", a["heads"]).set("groups", a["groups"], default=1)
    call.arguments += [f"{name}={row(name)}" for name in ("decay", "beta", "gate") if node.operand(name) is not None]
    unit = e.norm("rms", a["unit_eps"]) if a["unit"] else None
    call.named(a_log=e.weight(node.operand("a_log")), bias=e.weight(node.operand("bias")), unit=unit)
    for name in ("q_scale", "k_scale", "beta_scale"):
        call.set(name, a[name], default=1.0)
    _add_norm(e, call, node)
    e.record_kernel("matrix_step", lambda dtype: _matrix_refusal(node, dtype))
    return call.emit(e, "[0][:, None]", name=local_name(node.output))


@lowers(ops.linear_attention)
def linear(e: StepEmitter, node: Node) -> Var | None:
    """Emit one token of linear attention whose sum of keys is a second state."""
    if _is_stateless(e, node):
        return None
    call = FunctionCall("linear_step").give(
        CacheSlot(find_states(node)[0].part, "", ""), *features(e, node), node.required_operand("v")
    )
    e.record_kernel("matrix_step", lambda dtype: _matrix_refusal(node, dtype))
    return call.give(str(node.attrs["heads"])).emit(e)


def _matrix_refusal(node: Node, dtype: torch.dtype) -> str | None:
    """Return None, or the reason (str) why no kernel computes one token of a recurrence with a matrix state."""
    state = [n for n in find_states(node)[0].row_shape if isinstance(n, int)]
    return matrix_step.refusal(torch.empty(1, dtype=dtype, device="meta"), torch.empty(state, device="meta"))


@lowers(ops.gated_selective_scan, ops.gated_ssd, when=_refuse_weights)
def state_space(e: StepEmitter, node: Node) -> Var | None:
    """Emit one token of a state space, with the step size, norms and gate around it."""
    if _is_stateless(e, node):
        return None
    a, mamba2 = node.attrs, node.op is ops.gated_ssd
    call = FunctionCall("ssd_step" if mamba2 else "selective_step")
    for name in ("x", "delta", "a", "b", "c", "d"):
        if name in BY_TOKEN:
            call.give(f"{call.place(node.required_operand(name))}[:, 0]")
        else:
            call.give(node.operand(name))
    _add_state(call, node)
    call.named(weight=None if mamba2 else e.weight(node.operand("weight")), bias=e.weight(node.operand("bias")))
    call.set("softplus", a["softplus"], default=False)
    if not mamba2:
        call.named(norm=e.norm_of(node))
        for name in "bc":
            norm = e.norm("rms", a[f"{name}_eps"], node.operand(f"{name}_weight")) if a[f"{name}_norm"] else None
            call.named(**{f"{name}_norm": norm})
    call.set("log_a", a["log_a"], default=False)
    if mamba2:
        call.set("heads", a["heads"]).set("groups", a["groups"])
    if (gate := node.operand("gate")) is not None:
        call.give(f"gate={call.place(gate)}[:, 0]")
    if mamba2:
        _add_norm(e, call, node)

    def refusal(dtype: torch.dtype) -> str | None:
        x, b = _like(node, "x", dtype), _like(node, "b" if mamba2 else "a", dtype)
        if mamba2:
            return mamba2_scan.refusal(x, b, heads=a["heads"], groups=a["groups"])
        return mamba_scan.refusal(x, b)

    e.record_kernel(call.function, refusal)
    return call.emit(e, "[0][:, None]", name=local_name(node.output))


def _add_norm(e: StepEmitter, call: FunctionCall, node: Node) -> None:
    """Add the keyword arguments of the norm over groups of the result, if the op has one."""
    a = node.attrs
    if a["norm"]:
        norm = e.norm("rms", a["eps"], node.operand("norm_weight"))
        call.named(norm=norm, tickets=e.tickets(a["norm_groups"])).set("norm_groups", a["norm_groups"], default=1)


def _add_state(call: FunctionCall, node: Node) -> FunctionCall:
    """Add the state in the cache to `call` twice, as input and as output, and return `call`."""
    place = f"{call.place(CacheSlot(find_states(node)[0].part, '', ''))}.values[0]"
    return call.give(place, place)


def _like(node: Node, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor of `dtype` with the shape that the operand `name` of `node` has for one token."""
    sizes = [s if isinstance(s, int) else 1 for s in node.required_operand(name).shape]
    return torch.empty(sizes if name not in BY_TOKEN else sizes[::2], dtype=dtype, device="meta")
