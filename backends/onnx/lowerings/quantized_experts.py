"""Lowerings of experts with quantized weights: ONNX Runtime's QMoE, or DequantizeLinear for the experts in use.

QMoE chooses the experts with the k largest values of one input (router logits) and weights them by another. Both inputs
are `combine` here, whatever the router. (Without the second input, the CPU kernel always divides by the sum of the k
weights.) If fewer than k experts are active, QMoE chooses further ones with a weight of zero.

| codes | activations |
|---|---|
| 4 bits | rounded to 8 bits on a CPU, at accuracy level 4; in f32 at level 0 (--arithmetic f32) |
| 2 bits | rounded by most kernels at every level: for f32 they are widened to 4 |
| 3 bits | as 4 bits, to which they are widened |
| 8 bits | always rounded |
"""

from __future__ import annotations

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.recipes import Concat, Recipe, Reshape
from weft.ir.recipes.blocks import Stored
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout

from ...block_weights import NOT_ASKED, find_stored_layout, is_exact, is_quantized
from ...onnx_runtimes import EXPERT_CODES
from ...target import Backend
from ..lowering import decodes, lowering, multiplies_codes
from ..onnx_emitter import OnnxEmitter
from . import dequantized
from .block_matmul import cast_scales
from .layers import MS
from .moe import emit_grouped, find_activation_refusal, interleave_rows, list_activation_attributes, reshape_like

Out = onnx.Value
GROUPS = {"cpu": (16, 32, 64, 128, 256), "cuda": (32, 64, 128)}


def list_expert_weights(node: Node) -> list[Value]:
    """Return the weights of the experts of the moe node `node`: up, down and, if present, gate."""
    return [v for v in map(node.operand, ("up", "down", "gate")) if v is not None]


def find_refusal(node: Node, target: Backend) -> str | None:
    """Return None, or the reason (str) why QMoE cannot compute `node` on `target`."""
    layouts: list[BlockLayout] = []
    for weight in list_expert_weights(node):
        layout = find_stored_layout(weight)
        # --keep-blocks applies to linear layers only.
        if not isinstance(weight, Param) or not is_quantized(weight) or isinstance(layout, str):
            return NOT_ASKED if isinstance(layout, str) and not layout else "not all weights of the experts have codes"
        layouts.append(layout)
        if layout.floats or layout.has_minimum:
            return f"QMoE does not take {layout}"
        if layout.group not in GROUPS[target.device]:
            return f"QMoE does not take codes in groups of {layout.group}"
        if weight.width % layout.group:
            return f"QMoE takes whole groups, and rows of {weight.width} are not multiples of {layout.group}"
    up, down, *gates = layouts
    if (up.group, up.has_zeros) != (down.group, down.has_zeros) or any(gate != up for gate in gates):
        return f"QMoE takes groups of one size in all weights ({', '.join(sorted({str(each) for each in layouts}))})"
    if target.device == "cuda":
        if node.output.type.dtype != dtypes.f16:
            return f"the CUDA kernel of QMoE is left out in {node.output.type.dtype}"
        if up.has_zeros:
            return "the CUDA kernel of QMoE is not known to take zero points"
    elif any(isinstance(w, Param) and is_exact(w) for w in list_expert_weights(node)) and max(up.bits, down.bits) == 8:
        return "the CPU kernel of QMoE rounds activations to 8 bits where codes have 8"
    return find_activation_refusal(node)


@lowering(ops.moe, targets=multiplies_codes, when=find_refusal, first=True)
def QMoE(e: OnnxEmitter, node: Node) -> Out:
    x, combine = node.required_operand("x"), node.required_operand("combine")
    up, down, gate, up_bias, down_bias, gate_bias = (node.operand(o.name) for o in node.op.operands[2:])
    assert isinstance(up, Param) and isinstance(down, Param)
    first, second = (_CodeForm(e, weight) for weight in (up, down))
    opened = gate if isinstance(gate, Param) else None
    bias = e[up_bias] if opened is None else interleave_rows(e, gate_bias, up_bias, opened, "interleaved.bias")
    fc1, fc2 = (_emit_parts(e, up, opened, first), _emit_parts(e, down, None, second))
    flat = e[combine] if combine.type.rank == 2 else e.op("Reshape", e[combine], e.constant([-1, combine.width]))
    fits = x.type.rank in (2, 3)
    rows = e[x] if fits else e.op("Reshape", e[x], e.constant([-1, x.width]))
    attrs = list_activation_attributes(node) | {"quant_type": "int", "block_size": first.group}
    attrs["expert_weight_bits"] = first.bits
    if second.bits != first.bits:
        attrs["fc2_expert_weight_bits"] = second.bits
    if e.target.device == "cuda":
        attrs["weights_prepacked"] = 0
    elif not is_exact(up):
        attrs["accuracy_level"] = 4
    operands = [rows, flat, fc1[0], fc1[1], bias, fc2[0], fc2[1], e[down_bias], None, None, None, fc1[2], fc2[2], None]
    k = node.attrs["active"] or combine.width
    y = e.op("QMoE", *operands, flat, domain=MS, k=k, normalize_routing_weights=0, **attrs)
    return y if fits else reshape_like(e, y, x)


class _CodeForm:
    """The form in which QMoE reads a quantized weight: `bits` per code, the size of a `group`, whether it `has_zeros`,
    and `names`, the stored parts with codes, scales and zero points. 3-bit codes are widened to 4 bits, and so are
    2-bit codes on CUDA and for exact weights."""

    def __init__(self, e: OnnxEmitter, weight: Param) -> None:
        layout, exact = find_stored_layout(weight), e.target.device == "cuda" or is_exact(weight)
        assert isinstance(layout, BlockLayout)
        wide = layout.bits == 3 or (layout.bits == 2 and exact)
        self.bits, self.group = (4 if wide else layout.bits), layout.group
        self.names = ("codes", "steps", "zeros") if wide else ("packed", "steps", "points")
        self.has_zeros = layout.has_zeros


def _emit_parts(e: OnnxEmitter, weight: Param, gate: Param | None, form: _CodeForm) -> list[Out | None]:
    """Return [codes, scales, zero points or None] of the stack `weight` [experts, out, in] in `form`. If `gate` is
    given, rows of both are interleaved: gate 0, weight 0, gate 1, …"""
    parts: list[Out | None] = []
    for name in form.names:
        if name in ("zeros", "points") and not form.has_zeros:
            parts.append(None)
            continue
        recipe: Recipe = Stored(weight.recipe, name)
        label = f"{weight.name}.{name}"
        if gate is not None:
            experts, hidden, row_size = recipe.shape(e.graph.reader)
            rows = tuple(Reshape(Stored(v.recipe, name), (experts, hidden, 1, row_size)) for v in (gate, weight))
            recipe, label = Reshape(Concat(rows, 2), (experts, 2 * hidden, row_size)), f"{gate.name}.interleaved.{name}"
        parts.append(cast_scales(e, label, recipe, weight) if name == "steps" else e.weight(label, recipe, dtypes.u8))
    return parts


# -- in standard operators


def find_stack_refusal(node: Node, target: Backend) -> str | None:
    """Return None, or the reason (str) why DequantizeLinear cannot decode the expert weights of `node`."""
    if EXPERT_CODES in getattr(target, "lacks", ()):
        return "the runtime computes experts by codes wrongly"
    layouts = [dequantized.find_layout(weight, target) for weight in list_expert_weights(node)]
    if any(isinstance(layout, BlockLayout) and layout.has_minimum for layout in layouts):
        return "DequantizeLinear takes no minima"
    return next((layout for layout in layouts if isinstance(layout, str)), None)


@lowering(ops.moe, targets=decodes, when=find_stack_refusal, first=True)
def DequantizeExperts(e: OnnxEmitter, node: Node) -> Out:
    return emit_grouped(e, node, _multiply_experts)


def _multiply_experts(e: OnnxEmitter, rows: Out, weight: Value, chosen: Out | None) -> Out:
    assert isinstance(weight, Param)
    return e.op("MatMul", rows, e.op("Transpose", dequantized.dequantize_stack(e, weight, chosen), perm=[0, 2, 1]))
