"""Scale the input channels of matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, WeftError
from weft.ir.recipes import Full, Map, Source
from weft.ir.recipes.blocks.quantize import round_rows
from weft.ir.recipes.blocks.spans import split_groups
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.types.block_layouts import INTEGER_BITS, BlockLayout, build_integer_layout

from ... import Pass, Trace
from ...analysis.states import has_cache
from ...fitting.calibration import Activations, sample_tokens
from ...fitting.matrices import Matrix, find_matrices
from ..fold.scaling import Edit, absorb_factor, apply_edits, find_other_use, list_reader_edits

# Factors are sizes of activations to the first power, divided by sizes of weights to the second: AWQ and SmoothQuant.
POWERS = ((0.25, 0.0), (0.5, 0.0), (0.75, 0.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25))
GAIN = 0.98  # share of the error without factors that factors have to reach
FARTHEST = 8  # exponent of two
ROWS = 256  # rows of activations in a trial
OUTPUTS = 1024  # rows of a weight, enough to estimate the sizes of its columns


def fit_channel_factors(x: Array, weights: Sequence[Array], layout: BlockLayout) -> Array | None:
    """Return factors s, powers of two f32 [in], for which (x / s) (W · s)ᵀ has the least error, over all `weights` W.
    x is [n, in], W [out, in]; W · s is rounded to `layout` and x / s to 8 bits. Candidates are aᵖ/bᵠ with (p, q) from
    `POWERS`, a and b root mean squares per column of x and of W. Return None if none reduces the error by over 2 %."""
    inputs = _measure_columns(x.astype(np.float64, copy=False))
    weights = [weight.astype(np.float64) for weight in weights]
    outputs = np.sqrt(np.mean([np.square(_measure_columns(weight)) for weight in weights], 0))
    x = x[np.linspace(0, len(x) - 1, min(len(x), ROWS)).astype(int)].astype(np.float64)
    exact = [x @ weight.T for weight in weights]

    def error(factors: Array) -> float:
        rounded = _round_to_8_bits(x / factors, layout.group)
        total = 0.0
        for weight, target in zip(weights, exact, strict=True):
            blocks = round_rows(weight * factors, layout)
            product = rounded @ layout.dequantize(blocks)[:, : weight.shape[1]].T
            total += float(np.square(product - target).mean()) / max(float(np.square(target).mean()), 1e-30)
        return total

    best: Array | None = None
    least = GAIN * error(np.ones(x.shape[1]))
    for by_input, by_weight in POWERS:
        exponents = by_input * np.log2(inputs) - by_weight * np.log2(outputs)
        exponents = np.clip(np.rint(exponents - exponents.mean()), -FARTHEST, FARTHEST)
        factors = np.exp2(exponents)
        if (trial := error(factors)) < least:
            best, least = factors, trial
    return None if best is None else best.astype(np.float32)


def _measure_columns(rows: Array) -> Array:
    """Return the root mean square of every column [width], but at least 2⁻⁸ of the largest, and not 0."""
    sizes = np.sqrt(np.square(rows).mean(0))
    return np.asarray(np.maximum(sizes, max(float(sizes.max()), 1e-30) * 2.0**-FARTHEST))


def _round_to_8_bits(x: Array, group: int) -> Array:
    """Return x [n, width] with every `group` values of a row rounded to −127 … 127 times a scale, as CPU kernels do."""
    groups = split_groups(x, group)
    scales = np.abs(groups).max(-1, keepdims=True) / 127
    scales[scales == 0] = 1
    rounded: Array = np.rint(groups / scales) * scales
    return rounded.reshape(len(x), -1)[:, : x.shape[1]]


LEAST_TOKENS = 128  # below which sizes of activations do not generalize to other texts


class ScaleChannels(Pass):
    """Divide the input channels of linear maps by factors and multiply the columns of their weights by them, to reduce
    the error of quantization.

    W x = (W diag(s)) (diag(s)⁻¹ x), and 1/s goes into the node that computes x: the weight of a norm, or the rows of
    the up projection of a gated feed-forward. Values of a group share a scale (activations as well, if kernels round
    them to 8 bits), so a channel that is larger than its neighbours reduces their precision. Factors move magnitude
    from weights to activations, or back. Candidates are powers of the activations' root mean squares per channel,
    divided by powers of the weights'. They are compared on a text, with weights rounded to `bits` bits in groups of
    `group` and activations to 8 bits. All readers of a value get the same factors, powers of two, so that only the
    exponents of weights change. The text is `calibration`, as for quantize, or the mixture that comes with weft; about
    `tokens` tokens are sampled evenly from it. If the model has no tokenizer, tokens are random, with a warning.

    Condition: the node that computes x is linear in a parameter, such as a norm with a weight (before fold-norm-scale),
    and only linear maps with unshared weights read x. Inputs of a tied head or of experts are not scaled, and neither
    are values for which factors reduce the error by less than 2 %.

    Source: SmoothQuant (Xiao 2022, 2211.10438); AWQ (Lin 2023, 2306.00978).

    Example scale-channels{bits=8}::

        graph example {
          input %input_ids: i64[batch, seq]
          param %embed: f32[11, 32] = normal([11, 32], std=1.0, stream="embed")
          param %norm.weight: f32[32] = map(normal([32], std=2.0, stream="norm"), fn="exp")
          param %up.weight: f32[64, 32] = normal([64, 32], std=0.5, stream="up")
          param %head.weight: f32[11, 64] = normal([11, 64], std=0.5, stream="head")
          %x: f32[batch, seq, 32] = embedding(%input_ids, %embed)
          %norm: f32[batch, seq, 32] = rms_norm(%x, %norm.weight)
          %up: f32[batch, seq, 64] = linear(%norm, %up.weight)
          %act: f32[batch, seq, 64] = relu(%up)
          %logits: f32[batch, seq, 11] = linear(%act, %head.weight)
          output logits = %logits
        }
    """

    name = "scale-channels"
    effect = "exact"
    purpose = "Same function, other weights"
    see = ("quantize", "rotate-residual")
    idempotent: ClassVar[bool] = False  # a second run may gain a little more
    bits: int = 4
    group: int = 32
    calibration: str | None = None
    tokens: int = 1024

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.bits not in INTEGER_BITS or self.group not in (16, 32, 64, 128, 256):
            raise WeftError(
                f"scale-channels: bits={self.bits} must be one of {', '.join(map(str, INTEGER_BITS))}, and "
                f"group={self.group} one of 16, 32, 64, 128, 256"
            )
        if self.tokens < 1:
            raise WeftError(f"scale-channels: tokens={self.tokens} must be positive")
        if has_cache(graph):
            raise WeftError(
                f"scale-channels: graph {graph.name} has caches already, and texts are read from their beginning: run "
                "scale-channels before kv-cache"
            )
        order = {node: i for i, node in enumerate(graph.nodes)}
        sites = list(self._find_sites(graph, order, trace))
        if not sites:
            return
        layout = build_integer_layout(self.bits, self.group, self.bits < 8)
        texts = sample_tokens(graph, self.calibration, self.tokens, LEAST_TOKENS, self.name, "factors", trace)
        # In float64: the last digits, in which processors differ, hardly ever change a factor.
        activations = Activations(graph, texts, dtype=np.float64)
        scalings = list[tuple[Value, Array]]()
        for i, site in enumerate(sites):
            trace.progress(i, len(sites))
            x = np.concatenate([part.reshape(-1, part.shape[-1]) for part in activations(site)])
            weights = [_sample_rows(weight) for node in site.users if isinstance(weight := node.inputs[1], Param)]
            factors = fit_channel_factors(x, weights, layout)
            if factors is not None:
                scalings.append((site, factors))
        for site, factors in scalings:
            _scale_value(site, factors, order)
            trace.record_rewrite(self.name, site.name)
        trace.progress(len(sites), len(sites))

    def _find_sites(self, graph: Graph, order: Mapping[Node, int], trace: Trace) -> Iterator[Value]:
        """Yield the values, read by matrices, whose channels can be scaled; record the rest as refusals in `trace`."""
        all_matrices = find_matrices(graph)
        for node in graph.nodes:
            for value in node.outputs:
                if not (value.type.dtype.is_float and value.shape) or not isinstance(value.shape[-1], int):
                    continue  # ids, which tables are looked up with
                params = (param for reader in value.users for param in reader.inputs if isinstance(param, Param))
                if not any(isinstance(all_matrices.get(param), Matrix) for param in params):
                    continue
                edits = _list_edits(value, Full(1.0, (value.width,)), order)
                if isinstance(edits, str):
                    trace.refuse(self.name, value.name, edits)
                else:
                    yield value


def _sample_rows(weight: Param) -> Array:
    """Return at most `OUTPUTS` evenly spaced rows of `weight`, read block by block. WeftError if one is not finite."""
    count = int(weight.shape[0])
    indices = np.linspace(0, count - 1, min(count, OUTPUTS)).astype(int)
    parts, start = list[Array](), 0
    reader = weight.graph.reader
    for block in weight.recipe.blocks(reader):
        parts.append(block[indices[(indices >= start) & (indices < start + len(block))] - start])
        start += len(block)
    rows = np.concatenate(parts)
    if not np.isfinite(rows).all():
        names = ", ".join(weight.recipe.sources()) or weight.name
        raise WeftError(f"a weight of {names} is not finite: its channels cannot be scaled")
    return rows


def _list_edits(value: Value, factors: Recipe, order: Mapping[Node, int]) -> list[Edit] | str:
    """Return edits that divide `value` by `factors` and multiply weight columns of its readers; or a reason (str)."""
    reader_edits = list_reader_edits(value, factors)
    if isinstance(reader_edits, str):
        return reader_edits
    producer_edits = absorb_factor(value.uses, Map(factors, "reciprocal"), order)
    if isinstance(producer_edits, str):
        return producer_edits
    edits = [*producer_edits, *reader_edits]
    return find_other_use(edits, {(e.node, e.index): e.change for e in edits}) or edits


def _scale_value(value: Value, factors: Array, order: Mapping[Node, int]) -> None:
    """Apply the edits of `_list_edits` with `factors`, which become a new tensor of the graph's reader."""
    reader = value.graph.reader = SpilledTensors.wrap(value.graph.reader)
    key = reader.unique_key(f"{value.name}.factors")
    reader.put(key, factors)
    edits = _list_edits(value, Source(key), order)
    assert not isinstance(edits, str)
    apply_edits(edits)
