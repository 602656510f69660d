"""Lowering of attention to ONNX Runtime's GroupQueryAttention: cache, RoPE and packed projections in one kernel."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as onnx

from weft.ir import ops
from weft.ir.graph import Node, Param, Value
from weft.ir.types import dtypes
from weft.ir.types.sizes import Size
from weft.passes.analysis.rotary import match_ropes
from weft.passes.analysis.states import find_caches

from ...target import Backend
from ..lowering import contrib, lowering
from ..onnx_emitter import OnnxEmitter, emit_once
from .attention_mask import appends, count_keys, emit_additive_mask, expand_bias, is_length_mask
from .layers import MS, emit_rope_tables

Out = onnx.Value


def _find_absorbable_ropes(node: Node) -> tuple[Node, Node] | None:
    """Return (the RoPE node of q, that of k) of the attention `node` if the kernel can absorb both, else None."""
    ropes = match_ropes(node)
    if isinstance(ropes, str) or appends(node):  # it would rotate by slot, and padding takes slots
        return None
    q, frequencies = ropes[0], ropes[0].operand("frequencies")
    # The kernel needs tables with a multiple of 8 columns. With partial rotation and a head size that is not a multiple
    # of 16, it fails only at run time.
    if not isinstance(frequencies, Param) or frequencies.width % 8 or q.output.width // q.attrs["heads"] % 16:
        return None
    return ropes


def _absorb_producers(node: Node) -> tuple[Value, Value | None, Value | None, Node | None]:
    """Return (query, key, value, absorbed RoPE or None); key and value are None if the query packs all three."""
    q, k, v, rope = node.required_operand("q"), node.required_operand("k"), node.operand("v"), None
    if (ropes := _find_absorbable_ropes(node)) is not None:
        rope, (q, k) = ropes[0], (r.required_operand("x") for r in ropes)
    packed = q.producer
    if packed is not None and packed.op is ops.split and packed.outputs == (q, k, v):
        return packed.required_operand("x"), None, None, rope
    return q, k, v, rope


def _find_refusal(node: Node, target: Backend) -> str | None:
    a, q, k, v = node.attrs, node.required_operand("q"), node.required_operand("k"), node.operand("v")
    if v is None:
        return "the kernel needs separate keys and values, but this attention caches latents"
    head = k.width // a["kv_heads"]
    past, mask, bias = (node.operand(n) for n in ("past_k", "key_mask", "bias"))
    if not a["causal"] or past is None:
        return "only causal attention with a cache"
    # The kernel receives only the length of each row, so it can only mask padding on the right.
    if not appends(node) and (mask is None or not is_length_mask(mask)):
        return "the kernel needs the input attention_mask for the lengths of rows"
    if appends(node) and all(isinstance(n, int) and n > 1 for n in q.shape[:2]):
        return "the kernel continues several sequences by one token each, not by more"
    if a["pattern"] != "dense":
        return f"pattern {a['pattern']}"
    if a["keep_first"]:
        return f"the first {a['keep_first']} keys stay visible"
    if v.width != k.width or head % 8:
        return f"head sizes {head} and {v.width // a['kv_heads']}: must be equal and a multiple of 8"
    # ONNX Runtime would silently run an f32 node on the CPU, with copies of the caches around it.
    if target.device == "cuda" and q.type.dtype.name not in ("f16", "bf16"):
        return f"the CUDA kernel computes in f16 and bf16, not {q.type.dtype}"
    if a["cache_bits"] is not None and (reason := _find_codes_refusal(node, head, target)):
        return reason
    return None if bias is None or mask is None else _find_bias_refusal(node, bias, mask, target)


def _find_codes_refusal(node: Node, head: int, target: Backend) -> str | None:
    """Return None, or why (str) the kernel cannot quantize the cache of `node` with heads of width `head`."""
    k, v = node.required_operand("k_scale"), node.required_operand("v_scale")
    if k.shape != v.shape:
        return "the kernel takes scales of channels for keys and values, or one for each, not both"
    bits = node.attrs["cache_bits"]
    if node.attrs["rolling"] and head % (128 // bits):
        return f"a rolling cache of {bits} bits needs head sizes of multiples of {128 // bits}, not {head}"
    if target.device == "cuda" and node.operand("bias") is not None:
        return "the CUDA kernel takes a bias or a quantized cache, not both"
    return None


def _find_bias_refusal(node: Node, bias: Value, mask: Value, target: Backend) -> str | None:
    if appends(node):  # it is part of the mask
        return None
    if node.attrs["rolling"]:
        return "a bias by position does not fit the slots of a rolling cache"
    if bias.shape[3] != mask.shape[1]:
        return f"a bias over {bias.shape[3]} keys, not over all that the mask covers"
    if target.device == "cuda" and node.operand("sinks") is not None:
        return "the CUDA kernel takes a bias or sinks, not both"
    return None


def _list_reads(node: Node, target: Backend) -> Iterable[Value]:
    extra = (node.operand(n) for n in ("key_mask", "bias", "sinks", "past_k", "past_v"))
    return [v for v in (*_absorb_producers(node)[:3], *extra) if v is not None]


@emit_once
def _emit_lengths(e: OnnxEmitter, mask: Value) -> tuple[Out, Out]:
    """Return two int32 operands of the kernel: seqlens_k [batch], the number of ones in each row of `mask` [batch,
    total] minus one; and total_sequence_length, the scalar `total` in host memory."""
    int32 = int(onnx.DataType.INT32)
    valid = e.op("ReduceSum", e[mask], e.constant([1]), keepdims=0, hint="valid")
    last = e.op("Cast", e.op("Sub", valid, e.constant([1])), to=int32, hint="seqlens_k")
    # From the shape, not from the values: the kernel reads it on the host, which must not wait for the GPU.
    size = e.op("Squeeze", e.op("Shape", e[mask], start=1, end=2), e.constant([0]))
    return last, e.op("Cast", size, to=int32, hint="total_length")


@emit_once
def _emit_full_lengths(e: OnnxEmitter, rows: Size, keys: Size) -> tuple[Out, Out]:
    """Return the operands of `_emit_lengths` for `rows` that all have `keys` keys."""
    total = e.op("Cast", e.op("Squeeze", e.size(keys), e.constant([0])), to=int(onnx.DataType.INT32))
    last = e.op("Sub", total, e.constant(1, dtypes.i32.numpy))
    return e.op("Expand", last, e.size(rows)), total


# Tried before the standard Attention operator, which accepts the same nodes.
@lowering(ops.attention, targets=contrib, when=_find_refusal, reads=_list_reads, first=True)
def GroupQueryAttention(e: OnnxEmitter, node: Node) -> list[Out]:
    # The kernel has its own rolling cache: it shifts old keys out instead of writing at position mod capacity. Then all
    # rows of a call must be equally long.
    a, (query, key, value, rope) = node.attrs, _absorb_producers(node)
    mask, bias = node.operand("key_mask"), node.operand("bias")
    cos, sin = (None, None) if rope is None else emit_rope_tables(e, rope, query)
    if appends(node):
        last, total = _emit_full_lengths(e, node.output.shape[0], count_keys(node))
        # A row of −∞ only, of a token of padding, would give NaN.
        hidden = e.scalar(-1e4 if (dtype := node.output.type.dtype).bits < 32 else -1e30, dtype)
        added: Out | None = emit_additive_mask(e, node, hidden, include_causal=True)
    else:
        assert mask is not None
        last, total = _emit_lengths(e, mask)
        added = None if bias is None else expand_bias(e, bias, node.output.shape[1], mask.shape[1])
    bits, scale = a["cache_bits"], node.operand("k_scale")
    kind = None if scale is None else "PER_TENSOR" if scale.shape == (1,) else "PER_CHANNEL"
    past_k, past_v, sinks, v_scale = (node.operand(n) for n in ("past_k", "past_v", "sinks", "v_scale"))
    results = e.many(
        "GroupQueryAttention",
        *(e[v] for v in (query, key, value, past_k, past_v)),
        *(last, total, cos, sin, None),
        added,
        *(e[v] for v in (sinks, scale, v_scale)),
        domain=MS,
        outputs=3,
        num_heads=a["heads"],
        kv_num_heads=a["kv_heads"],
        scale=a["scale"],
        softcap=a["softcap"],
        local_window_size=-1 if a["window"] is None or appends(node) else a["window"],
        sliding_window_cache=1 if a["rolling"] else None,
        kv_cache_bit_width=bits,
        k_quant_type=kind,
        v_quant_type=kind,
        do_rotary=int(rope is not None),
        rotary_interleaved=int(rope is not None and rope.attrs["interleaved"]),
    )
    _add_repeated_outputs(e, node, results[1:])
    return results


def _add_repeated_outputs(e: OnnxEmitter, node: Node, results: list[Out]) -> None:
    """Declare each of `results`, the caches that the kernel of `node` writes, as an additional graph output if the
    graph's output of this cache comes from another attention. The kernel cannot skip the write; the runtime binds both
    outputs to the same memory, so no copy is made."""
    for spec, out in zip(find_caches(node), results, strict=True):
        past = node.required_operand(spec.past_operand)
        output = node.outputs[node.op.result_names(node.inputs, node.attrs).index(spec.present_output)]
        if output.is_output:
            continue
        writers = (n.outputs[n.op.result_names(n.inputs, n.attrs).index(spec.present_output)] for n in past.users)
        name = next(name for value in writers for name in e.graph.outputs.names_of(value))
        repeats = sum(key.startswith(f"{name}.") for key in e.repeated_outputs) + 1
        e.repeated_outputs[f"{name}.{repeats}"] = out, output
