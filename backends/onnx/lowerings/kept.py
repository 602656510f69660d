"""Reports on the weights that an ONNX model keeps in quantized blocks, derived from the lowerings."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param
from weft.ir.recipes.blocks import Kept
from weft.ir.types.block_layouts import BlockLayout

from ...block_weights import find_stored_layout, is_quantized, list_read_params, tally_layouts
from ...options import ARITHMETIC, KEEP_BLOCKS, Options
from ...target import Backend
from ..lowering import multiplies_codes
from . import block_matmul as quantized
from . import dequantized, quantized_experts


def _find_dequantize_reason(weight: Param, node: Node, target: Backend) -> str | None:
    """Return None if `node` reads the codes of `weight`, else the reason (str) why it needs `weight` dequantized."""
    if node.op in (ops.linear, ops.norm_linear, ops.embedding):
        layout = (quantized if multiplies_codes(target) else dequantized).find_layout(weight, target)
        return None if isinstance(layout, BlockLayout) else layout
    if node.op is ops.moe and weight in quantized_experts.list_expert_weights(node):
        find = quantized_experts.find_refusal if multiplies_codes(target) else quantized_experts.find_stack_refusal
        return find(node, target)
    return f"{target.name} has no {node.op.name} by codes"


def list_kept_weights(graph: Graph, target: Backend) -> list[Param]:
    """Return the weights of `graph` that at least one node reads as blocks on `target`."""
    params = list_read_params(graph)
    return [p for p in params if any(_find_dequantize_reason(p, node, target) is None for node in p.users)]


def count_layouts(graph: Graph, target: Backend) -> dict[str, int]:
    """Return a dict from each block layout, as text, to the number of weights of `graph` in it on `target`."""
    layouts = (find_stored_layout(p) for p in list_kept_weights(graph, target))
    return tally_layouts(layout for layout in layouts if isinstance(layout, BlockLayout))


def report_dequantized(graph: Graph, target: Backend) -> list[str]:
    """Return notes for the user, one per reason, on weights that a pass quantized and `target` stores dequantized."""
    kept_weights, weights_by_reason = set(list_kept_weights(graph, target)), dict[str, list[str]]()
    for weight in list_read_params(graph):
        if is_quantized(weight) and weight not in kept_weights:
            reasons = (_find_dequantize_reason(weight, node, target) for node in weight.users)
            reason = next(filter(None, reasons), "it is an output")
            weights_by_reason.setdefault(reason, []).append(weight.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: stored dequantized, not as codes: {reason}"
        for reason, names in weights_by_reason.items()
    ]


def has_rounded_activations(graph: Graph, target: Backend) -> bool:
    """Return whether products round activations to 8 bits, unless --arithmetic f32 is set: on a CPU, if weights that a
    pass quantized stay in blocks that an operator decodes."""
    decodes = target.contrib or dequantized.has_blocks(target)
    return target.device == "cpu" and decodes and any(map(is_quantized, list_kept_weights(graph, target)))


def list_idle_options(graph: Graph, target: Backend, options: Options) -> dict[str, str]:
    """Return option → reason for KEEP_BLOCKS and ARITHMETIC if `options` set them without effect on `graph`."""
    reasons = dict[str, str]()
    if all(map(is_quantized, list_kept_weights(graph, target))):
        refusals = (quantized.find_product_refusal(node, target) for node in graph.nodes if node.op is ops.linear)
        why = next((reason for reason in refusals if reason), "no linear map has blocks of a checkpoint")
        reasons[KEEP_BLOCKS] = f"no weights keep their blocks: {why}"
    rounding = {p.name: p.recipe.item for p in graph.params.values() if isinstance(p.recipe, Kept) and is_quantized(p)}
    if not has_rounded_activations(graph.clone(rounding), target):
        why = "only products with weights that --weights or a pass quantized round activations, and the model has none"
        reasons[ARITHMETIC] = why
    return {name: reason for name, reason in reasons.items() if getattr(options, name, "")}
