"""KV caches in fewer bits: keys and values as integer codes, with scales fitted to calibration sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, TensorType, WeftError, ops
from weft.ir.ops.caches import get_code_range
from weft.ir.recipes import Source
from weft.ir.recipes.cache_scales import FittedScales
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.schema.states import CODES
from weft.ir.types import dtypes

from ... import Pass, Trace
from ...analysis.states import find_cache_owner, find_cache_sharers, find_caches
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import rebuild_node
from ...fitting.calibration import sample_tokens
from .cache_scales import FittedCache, Granularity, fit_caches, insert_maps, remove_caches

LEAST_TOKENS = 128  # fewer calibration tokens than that do not predict the range of other sequences


class QuantizeCache(Pass):
    """Keep keys and values of causal self-attentions as integers of `bits` bits, 8 or 4.

    An element of a cache is then scale · code, with the nearest code from −2^{bits−1} to 2^{bits−1} − 1. Attention also
    reads scale · code for new tokens, so that results are independent of the cuts of a sequence into calls. Scales are
    constant f32: one per channel of a KV head (per=channel), one per KV head (per=head), or one for all keys and one
    for all values of a layer (per=tensor). A latent cache counts as one head.

    Scales are fitted to the keys and values that attentions store for calibration sequences, and to the keys rotated to
    positions all over the context. With 8 bits, the largest code represents 1.1 times the largest magnitude. With 4
    bits, the range minimizes the squared errors, weighted by their effect on the outputs for the queries of the
    calibration sequences. `calibration` is a text file or token ids (.npy, .json), by default a mixture of prose, code
    and languages that comes with weft; about `tokens` tokens are sampled evenly from it. If the model has no tokenizer
    and `calibration` is None, random tokens are used.

    With 4 bits, keys k are stored as (k − c) T and multiplied by queries q T⁻ᵀ, where T spreads large channels of keys
    and queries over all channels of a head. Values v are stored as (v − c) R with R orthogonal; Rᵀ and c are applied to
    the outputs. With c, the first token of a sequence, which draws much attention, is exactly representable. These maps
    are exact, inserted between RoPE and attention, and cost four products of head size per token and head. There is
    no c with attention sinks, no c of keys with a soft cap, and no map of latent caches.

    Weights and the rest of the graph are unchanged. Run passes that change heads before.

    Condition: keys and values stay within the range that they have on the calibration sequences; others are clipped.

    Source: Hooper 2024, KVQuant (arXiv 2401.18079): keys by channel; Ashkboos 2024, QuaRot (arXiv 2404.00456): rotated
    keys and values; ONNX Runtime's GroupQueryAttention.

    Example quantize-cache{bits=8}, on the graph of kv-cache.
    """

    name = "quantize-cache"
    effect = "lossy"
    purpose = "Numbers"
    see = ("kv-cache", "quantize")
    tradeoff = "keys and values are rounded when they are written, and multiplied by scales when they are read"
    bits: int = 8
    per: Granularity = "channel"
    calibration: str | None = None
    tokens: int = 8192

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.bits not in CODES:
            widths = " or ".join(map(str, CODES))
            raise WeftError(f"quantize-cache: bits={self.bits} must be {widths}")
        if self.tokens < 1:
            raise WeftError(f"quantize-cache: tokens={self.tokens} must be positive")
        selected = list[list[Node]]()
        for node in graph.nodes:
            if not find_caches(node) or find_cache_owner(node) is not node:
                continue
            if (reason := self._find_obstacle(node)) is None:
                selected.append(find_cache_sharers(node))
            else:
                trace.refuse(self.name, node.output.name, reason)
        if not selected:
            if not trace.refusals:
                raise WeftError(f"quantize-cache: graph {graph.name} has no causal self-attention, hence no cache")
            return
        texts = sample_tokens(graph, self.calibration, self.tokens, LEAST_TOKENS, self.name, "scales", trace)
        fits = list[FittedCache]()
        for fit in fit_caches(graph, selected, texts, self.bits, self.per):
            fits.append(fit)
            trace.progress(len(fits), len(selected))
        for nodes, fit in zip(selected, fits, strict=True):
            first = nodes[0]
            if fit.maps is not None:
                insert_maps(nodes, *fit.maps, partial(_add_param, first))
            operands = {
                name: _add_param(first, name, scale, FittedScales)
                for name, scale in zip(("k_scale", "v_scale"), fit.scales, strict=False)
            }
            for spec in find_caches(first):
                if (past := first.operand(spec.past_operand)) is not None:
                    past.type = past.type.with_dtype(CODES[self.bits])
            for node in nodes:
                trace.record_rewrite(self.name, rebuild_node(node, operands, cache_bits=self.bits).output.name)

    def _find_obstacle(self, node: Node) -> str | None:
        if node.op is not ops.attention:
            return f"{node.op.name} has no scales for its cache"
        if node.attrs["cache_bits"] is not None:
            return f"its cache has codes of {node.attrs['cache_bits']} bits already"
        pasts = (node.operand(spec.past_operand) for spec in find_caches(node))
        if any(past is not None and not {*past.users} <= {*find_cache_sharers(node)} for past in pasts):
            return "another attention also writes its cache"
        widths = {spec.type.shape[3] for spec in find_caches(node)}
        if self.bits == 4 and any(not isinstance(width, int) or width % 2 for width in widths):
            return f"two codes of 4 bits are a byte, and its heads have {min(map(str, widths))} features"
        return None

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs are those of the original with past and present keys and values rounded to codes, and that
        inserted maps alone, without rounding and caches, leave the outputs unchanged."""
        quantized_before = {node.output.name for node in _list_quantized_nodes(before, ())}
        plain, added = before, (param.recipe for name, param in after.params.items() if name not in before.params)
        if maps := [recipe.key for recipe in added if isinstance(recipe, Source)]:  # matrices and shifts
            plain = _dequantize_caches(after, quantized_before)
            for key in maps:  # matrices that have inverses
                equivalence.exact[key] = after.reader.read(key, 0, after.reader.shape(key)[0]).astype(np.float64)
            first, second = (remove_caches(graph)[0] for graph in (before, plain))
            inputs = equivalence.make_inputs(first)
            equivalence.check_close(equivalence.run(first, inputs), equivalence.run(second, inputs), EXACT)
        staged, inputs = equivalence.randomize_weights(after), equivalence.make_inputs(after)
        references, scales, dequantized = dict[str, Callable[..., Any]](), dict[str, Array](), dict(inputs)
        for node in _list_quantized_nodes(staged, quantized_before):
            params = [node.operand(name) for name in ("k_scale", "v_scale")]
            operand_scales = [p.recipe.evaluate(staged.reader) if isinstance(p, Param) else None for p in params]
            references[node.output.name] = _build_reference(operand_scales, get_code_range(node.attrs["cache_bits"]))
            scales |= dict(zip((v.name for v in node.outputs[1:]), _reshape_scales(node, operand_scales), strict=False))
            for spec, scale in zip(find_caches(node), _reshape_scales(node, operand_scales), strict=False):
                if (past := node.operand(spec.past_operand)) is not None:
                    name = next(name for name, v in staged.inputs.items() if v is past)
                    dequantized[name] = inputs[name] * scale
        expected = equivalence.run_as(plain, dequantized, references)
        for name, value in staged.outputs.items():
            if value.name in scales:
                expected[name] = np.round(expected[name] / scales[value.name])
        equivalence.check_close(expected, equivalence.run(after, inputs), EXACT)


def _dequantize_caches(graph: Graph, unchanged: Collection[str]) -> Graph:
    """Return a copy of `graph` with unquantized caches, except for attentions whose output name is in `unchanged`."""
    copy = graph.clone()
    for node in _list_quantized_nodes(copy, unchanged):
        for spec in find_caches(node):
            if (past := node.operand(spec.past_operand)) is not None:
                past.type = past.type.with_dtype(node.required_operand("k").type.dtype)
        rebuild_node(node, {"k_scale": None, "v_scale": None}, cache_bits=None)
    return copy


def _add_param(node: Node, name: str, array: Array, scales: type[FittedScales] | None = None) -> Param:
    """Add a parameter `name` in the scope of `node`, whose elements `array` go to the graph's reader; return it.
    Without `scales`, it has the dtype of the output of `node`. With `scales`, it is f32 and has this recipe class."""
    graph = node.graph
    reader = graph.reader = SpilledTensors.wrap(graph.reader)
    full_name = f"{node.scope}.{name}" if node.scope else name
    key = reader.unique_key(full_name)
    reader.put(key, array)
    source, dtype = Source(key), dtypes.f32 if scales else node.output.type.dtype
    return graph.add_param(full_name, TensorType(dtype, array.shape), scales(source) if scales else source)


def _list_quantized_nodes(graph: Graph, excluded: Collection[str]) -> list[Node]:
    return [n for n in graph.nodes if n.attrs.get("cache_bits") is not None and n.output.name not in excluded]


def _reshape_scales(node: Node, scales: list[Array | None]) -> list[Array]:
    """Reshape `scales` to broadcast with a cache [batch, kv_heads, slots, width]; leave out scales that are None."""
    shape = 1, node.attrs["kv_heads"], 1, -1
    return [scale if scale.size == 1 else scale.reshape(shape) for scale in scales if scale is not None]


def _build_reference(scales: list[Array | None], code_bounds: tuple[int, int]) -> Callable[..., Any]:
    """Return the reference of attention on keys and values rounded by `scales` (of keys, of values; None: unrounded).
    `code_bounds` are the least and the largest code."""

    def attend(q: Array, *operands: Array | None, **attrs: Any) -> Any:
        rounded = [
            x if x is None or scale is None else np.round(x / scale).clip(*code_bounds) * scale
            for x, scale in zip(operands[:2], scales, strict=False)
        ]
        return ops.attention.reference(q, *rounded, *operands[2:], **attrs)

    return attend
