"""The beginning of a decode step: embeddings of tokens and positions, and rotary angles."""

from __future__ import annotations

import torch

from weft.ir import ops
from weft.ir.graph import Node
from weft.ir.types.block_layouts import BlockLayout

from ...kernels import embed_tokens
from ...ops.calls import FunctionCall
from ...ops.elementwise import format_number
from ...program.block_params import find_layout
from ...program.statements import TOP, Var
from ..step_emitter import StepEmitter, step_lowering


def _refuse_blocks(e: StepEmitter, node: Node) -> str | None:
    tables = node.operand("weight"), node.operand("table")
    return "its table stays in blocks" if any(isinstance(find_layout(t), BlockLayout) for t in tables) else None


@step_lowering(ops.embed_tokens, when=_refuse_blocks)
def emit_embedding(e: StepEmitter, node: Node) -> tuple[Var, ...]:
    """Emit and return embeddings [batch, seq, dim], then cos and sin [batch·seq, pairs] for each frequency table."""
    a = node.attrs
    call = FunctionCall("embed_tokens").add(node.required_operand("ids"), node.required_operand("weight"), e.positions)
    for frequencies, amplitude in zip(node.inputs[4:], a["amplitudes"], strict=True):
        assert frequencies is not None
        call.add(f"({call.placeholder(frequencies)}, {amplitude})")
    call.set("scale", float(a["scale"]), default=1.0).add_named(table=node.operand("table"))
    call.set("offset", a["offset"], default=0)
    e.scope = TOP
    e.record_kernel("embed_tokens", lambda dtype: embed_tokens.refusal(torch.empty(1, 1, dtype=dtype, device="meta")))
    names = ("x", *("cos" if i % 2 == 0 else "sin" for i in range(2 * len(a["amplitudes"]))))
    return e.emit_tuple(f"{call}{'' if a['amplitudes'] else '[0]'}", *call.operands, names=names)


@step_lowering(ops.rotary_angles)
def emit_angles(e: StepEmitter, node: Node) -> tuple[Var, ...]:
    """Emit and return cos and sin [batch·seq, pairs] of the rotary angles, once before the layers."""
    amplitude = node.attrs["amplitude"]
    text = "rotary({0}, {1})" if amplitude == 1 else f"rotary_scaled({{0}}, {{1}}, {format_number(amplitude)})"
    text = f"(table.flatten(0, 2) for table in {text})"
    operands = e[node.required_operand("positions")], e[node.required_operand("frequencies")]
    return e.hoist_tuple((text, *operands), text, *operands, names=("cos", "sin"))
