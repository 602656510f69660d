"""Recurrences of a decode step: one token of a convolution and of a state space, the state changed in place."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node
from weft.passes.recurrences import states

from ..kernels import conv_step, selective_scan, ssd
from ..ops.elementwise import activation
from ..program import Slot, Var
from .emitter import StepEmitter
from .patterns import activation_name

KERNELS = {ops.causal_conv: "conv_step", ops.selective_scan: "selective_step", ops.ssd: "ssd_step"}
BY_TOKEN = ("x", "delta", "b", "c")  # operands with a row for each token


def recurrence(e: StepEmitter, node: Node) -> Var | None:
    """The output of a recurrence whose state is in the cache."""
    if node not in e.cached:
        return None
    if node.op not in KERNELS:
        e.declined("no kernel computes it token by token")
        return None
    if any(node.operand(o) is not None for o, _ in states(node).values()):
        e.declined("its state is an operand")
        return None
    slot = Slot(next(iter(states(node))), "", "")
    named = [(o.name, node.operand(o.name)) for o in node.op.operands if o.name != "past"]
    given = [v for _, v in named if v is not None]
    texts, place = [], 0
    for name, value in named:
        texts.append("None" if value is None else f"{{{place}}}{'[:, 0]' if name in BY_TOKEN else ''}")
        place += value is not None
    state, kernel = f"{{{place}}}.values[0]", KERNELS[node.op]
    text = f"{kernel}({', '.join([*texts, state, state])}{_attributes(node)})[0][:, None]"
    e.chose(kernel, lambda dtype: _refusal(node, dtype), parts="state")
    made = e.emit(text, *given, slot)
    known = node.op is not ops.causal_conv or activation_name(node.attrs["activation"]) is not None
    return made if known else e.emit(activation(node.attrs["activation"]), made, replaces=0)


def _attributes(node: Node) -> str:
    a = node.attrs
    if node.op is ops.ssd:
        return f", heads={a['heads']}, groups={a['groups']}"
    if node.op is ops.causal_conv:
        name = activation_name(a["activation"]) or "identity"
        return "" if name == "silu" else f", activation={name!r}"
    return ""


def _refusal(node: Node, dtype: torch.dtype) -> str | None:
    """Why no kernel computes one token of `node`, its weights in `dtype`."""

    def like(name: str) -> torch.Tensor:
        value = node.operand(name)
        assert value is not None
        sizes = [s if isinstance(s, int) else 1 for s in value.shape]
        return torch.empty(sizes if name not in BY_TOKEN else sizes[::2], dtype=dtype, device="meta")

    if node.op is ops.causal_conv:
        return conv_step.refusal(like("x"))
    if node.op is ops.selective_scan:
        return selective_scan.refusal(like("x"), like("a"))
    return ssd.refusal(like("x"), like("b"), heads=node.attrs["heads"], groups=node.attrs["groups"])
