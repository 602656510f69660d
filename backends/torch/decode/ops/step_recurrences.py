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
from ...ops.custom_recurrences import add_step_function, write_function, write_tuple
from ...ops.elementwise import write_activation
from ...ops.recurrent import emit_features
from ...program.emitter import choose_name
from ...program.statements import CacheSlot, Var
from ..step_emitter import StepEmitter, step_lowering
from .scan_kernel import NoKernel, ScanKernelWriter
from .scan_parts import split_products
from .step_linear import find_kernel_activation

TOKEN_OPERANDS = ("x", "delta", "b", "c")  # operands of a state space with a row for each token


def _is_stateless(e: StepEmitter, node: Node) -> bool:
    """Return whether the cache has no state for `node`; record it as a fallback if the state is an operand."""
    if node in e.cached and has_state(node):
        e.record_fallback("its state is an operand")
    return node not in e.cached or has_state(node)


def _refuse_weights(e: StepEmitter, node: Node) -> str | None:
    weights = "weight", "bias", "b_weight", "c_weight", "a_log"
    return None if e.find_node_scope(node, *weights) == node.scope else "its weights are in other modules"


@step_lowering(ops.scan)
def emit_scan(e: StepEmitter, node: Node) -> tuple[Var, ...] | None:
    """Emit one token of a user-defined recurrence as a call of a kernel generated for it, and return the outputs.
    Return None if no kernel can be generated or the state is not in the cache."""
    if _is_stateless(e, node):
        return None
    full: Step = node.attrs["step"]
    parts = split_products(full)
    step = full if parts is None else parts[1]
    try:
        kernel = ScanKernelWriter(step).write()
    except NoKernel as reason:
        e.record_fallback(str(reason))
        return None
    function = add_step_function(e, step)
    name = f"{function}_kernel"
    e.kernels[name] = kernel.text.replace("{name}", name)
    call = FunctionCall("step_in_place").add(name, function)
    state = f"{call.placeholder(CacheSlot(find_states(node)[0].part, '', ''))}.values"
    values = [call.placeholder(v) for v in node.inputs if v is not None]
    arguments = dict(zip((*full.tokens, *full.constants), values, strict=True))
    arguments |= {part: f"{state}[{i}]" for i, part in enumerate(full.states)}
    tokens, constants = ([arguments[n] for n in part if n in arguments] for part in (step.tokens, step.constants))
    if parts is not None:
        tokens.append(f"*{_write_products(e, full, parts[0], arguments)}")
    call.add(state)
    call.arguments += [write_tuple(part) for part in (tokens, constants) if part]
    outputs = write_tuple([write_tuple([*map(str, shape)]) for shape in kernel.outputs])
    call.arguments += [f"outputs={outputs}", f"count={kernel.count}", f"block={kernel.block}"]
    e.record_kernel(name, lambda dtype: operands.refusal(torch.empty(1, dtype=dtype, device="meta")))
    return e.emit_tuple(str(call), *call.operands, names=tuple(v.name.rpartition(".")[2] for v in node.outputs))


def _write_products(e: StepEmitter, step: Step, products: Graph, arguments: Mapping[str, str]) -> str:
    """Add a function that computes `products`; return the source of its call with `arguments`, input to source."""
    doc = "Return the products by weights in the step of a recurrence, given"
    function = e.add_function("products", write_function(products, [*products.outputs], doc))
    kinds = (step.states, step.tokens, step.constants)
    parts = [write_tuple([arguments[n] for n in kind if n in products.inputs]) for kind in kinds]
    return f"step_products({', '.join([function, *parts])})"


@step_lowering(ops.causal_conv)
def emit_causal_conv(e: StepEmitter, node: Node) -> Var | None:
    """Emit and return one token of a causal convolution over the last inputs; None if its state is not in the cache."""
    if _is_stateless(e, node):
        return None
    call, name = FunctionCall("conv_step"), find_kernel_activation(node.attrs["activation"])
    x = f"{call.placeholder(node.required_operand('x'))}[:, 0]"
    _add_state(call.add(x, *map(node.operand, ("weight", "bias"))), node)
    call.set("activation", name or "identity", default="silu")
    e.record_kernel("conv_step", lambda dtype: operands.refusal(_make_meta_operand(node, "x", dtype)))
    y = call.emit(e, "[0][:, None]")
    return y if name else e.emit(write_activation(node.attrs["activation"]), y, replaces=0)


@step_lowering(ops.matrix_recurrence, when=_refuse_weights)
def emit_matrix_recurrence(e: StepEmitter, node: Node) -> Var | None:
    """Emit and return one token of linear attention or the delta rule, with the norms, decay and gate around it. Return
    None if the state is not in the cache."""
    if _is_stateless(e, node):
        return None
    call, a = FunctionCall("matrix_step"), node.attrs

    def row(name: str) -> str:
        return f"{call.placeholder(node.required_operand(name))}[:, 0]"

    _add_state(call.add(row("q"), row("k"), row("v")), node)
    call.set("heads", a["heads"]).set("groups", a["groups"], default=1)
    call.arguments += [f"{name}={row(name)}" for name in ("decay", "beta", "gate") if node.operand(name) is not None]
    unit = e.make_norm("rms", a["unit_eps"]) if a["unit"] else None
    call.add_named(a_log=e.get_weight(node.operand("a_log")), bias=e.get_weight(node.operand("bias")), unit=unit)
    for name in ("q_scale", "k_scale", "beta_scale"):
        call.set(name, a[name], default=1.0)
    _add_norm(e, call, node)
    e.record_kernel("matrix_step", lambda dtype: _refuse_matrix(node, dtype))
    return call.emit(e, "[0][:, None]", name=choose_name(node.output))


@step_lowering(ops.linear_attention)
def emit_linear_attention(e: StepEmitter, node: Node) -> Var | None:
    """Emit and return one token of linear attention, with a sum of keys as second state; None if no state is cached."""
    if _is_stateless(e, node):
        return None
    state, v = CacheSlot(find_states(node)[0].part, "", ""), node.required_operand("v")
    e.record_kernel("matrix_step", lambda dtype: _refuse_matrix(node, dtype))
    return FunctionCall("linear_step").add(state, *emit_features(e, node), v, str(node.attrs["heads"])).emit(e)


def _refuse_matrix(node: Node, dtype: torch.dtype) -> str | None:
    state = [n for n in find_states(node)[0].row_shape if isinstance(n, int)]
    return matrix_step.refusal(torch.empty(1, dtype=dtype, device="meta"), torch.empty(state, device="meta"))


@step_lowering(ops.gated_selective_scan, ops.gated_ssd, when=_refuse_weights)
def emit_state_space(e: StepEmitter, node: Node) -> Var | None:
    """Emit one token of a state space with its step size, norms and gate; None if the cache has no state."""
    if _is_stateless(e, node):
        return None
    a, mamba2 = node.attrs, node.op is ops.gated_ssd
    call = FunctionCall("ssd_step" if mamba2 else "selective_step")
    for name in ("x", "delta", "a", "b", "c", "d"):
        if name in TOKEN_OPERANDS:
            call.add(f"{call.placeholder(node.required_operand(name))}[:, 0]")
        else:
            call.add(node.operand(name))
    _add_state(call, node)
    weight = None if mamba2 else e.get_weight(node.operand("weight"))
    call.add_named(weight=weight, bias=e.get_weight(node.operand("bias")))
    call.set("softplus", a["softplus"], default=False)
    if not mamba2:
        call.add_named(norm=e.find_norm(node))
        for name in "bc":
            norm = e.make_norm("rms", a[f"{name}_eps"], node.operand(f"{name}_weight")) if a[f"{name}_norm"] else None
            call.add_named(**{f"{name}_norm": norm})
    call.set("log_a", a["log_a"], default=False)
    if mamba2:
        call.set("heads", a["heads"]).set("groups", a["groups"])
    if (gate := node.operand("gate")) is not None:
        call.add(f"gate={call.placeholder(gate)}[:, 0]")
    if mamba2:
        _add_norm(e, call, node)

    def refusal(dtype: torch.dtype) -> str | None:
        x, b = _make_meta_operand(node, "x", dtype), _make_meta_operand(node, "b" if mamba2 else "a", dtype)
        if mamba2:
            return mamba2_scan.refusal(x, b, heads=a["heads"], groups=a["groups"])
        return mamba_scan.refusal(x, b)

    e.record_kernel(call.function, refusal)
    return call.emit(e, "[0][:, None]", name=choose_name(node.output))


def _add_norm(e: StepEmitter, call: FunctionCall, node: Node) -> None:
    """Add the keyword arguments of the norm over groups of the result to `call`, if `node` has one."""
    a = node.attrs
    if a["norm"]:
        norm = e.make_norm("rms", a["eps"], node.operand("norm_weight"))
        call.add_named(norm=norm, tickets=e.emit_tickets(a["norm_groups"]))
        call.set("norm_groups", a["norm_groups"], default=1)


def _add_state(call: FunctionCall, node: Node) -> FunctionCall:
    """Append the state in the cache to `call` twice, as input and as output, and return `call`."""
    place = f"{call.placeholder(CacheSlot(find_states(node)[0].part, '', ''))}.values[0]"
    return call.add(place, place)


def _make_meta_operand(node: Node, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor of `dtype` with the shape of the operand `name` of `node` for one token."""
    sizes = [s if isinstance(s, int) else 1 for s in node.required_operand(name).shape]
    return torch.empty(sizes if name not in TOKEN_OPERANDS else sizes[::2], dtype=dtype, device="meta")
