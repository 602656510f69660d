"""Additions to the residual stream: embeddings for every layer, and several streams (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .blocks import Block
from .build import Layer, fill, module, named, param, provided
from .checks import need, need_int
from .layers import Norm, RMSNorm, embedding, linear


@module
class PerLayerEmbedding:
    """An embedding of `width` features for every layer, (E[id] · √width + N(W x / √dim)) / √2 (Gemma 3n).

    E is ``table.weight`` [vocab, layers · width], W ``projection.weight`` [layers · width, dim], N `norm` with
    ``norm.weight`` [width]. Token ids ≥ `vocab` use the embedding of token 0.
    """

    vocab: int
    width: int
    norm: Norm = RMSNorm()

    def __call__(self, x: Value, ids: Value, layers: int) -> list[Value]:
        """Return an embedding [batch, seq, width] per layer, from embeddings x [batch, seq, dim] of the token `ids`."""
        shape = (*x.shape[:2], layers, self.width)
        is_known = ops.cast(ops.less(ids, ops.affine(ids, by=0, plus=self.vocab)), to=ids.type.dtype)
        rows = embedding(ops.mul(ids, is_known), self.vocab, layers * self.width, "table")
        layer_embedding = ops.reshape(ops.affine(rows, by=math.sqrt(self.width)), shape=shape)
        projected = ops.affine(linear(x, layers * self.width, "projection"), by=x.width**-0.5)
        total = ops.add(named(self.norm, "norm")(ops.reshape(projected, shape=shape)), layer_embedding)
        scaled = ops.affine(total, by=math.sqrt(0.5), name="per_layer")
        slices = ops.split.emit(scaled, sizes=(1,) * layers, axis=2) if layers > 1 else [scaled]
        return [ops.squeeze(part, axes=(2,)) for part in slices]


@module
class PerLayerInput:
    """A gated input N(W (act(W_gate x) ⊙ e)), with e the layer's part of the `PerLayerEmbedding` (Gemma 3n).

    Parameters: W_gate ``gate.weight`` [width, dim], W ``projection.weight`` [dim, width], ``norm.weight``.
    """

    width: int
    activation: str = "gelu_tanh"
    norm: Norm = RMSNorm()

    def __call__(self, x: Value) -> Value:
        layer_embedding = provided("per_layer")
        need(self, layer_embedding is not None, "this module needs per_layer=PerLayerEmbedding(...) in the model")
        assert layer_embedding is not None
        gated = ops.mul(activate(linear(x, self.width, "gate"), self.activation), layer_embedding, name="gated")
        return named(self.norm, "norm")(linear(gated, x.width, "projection"))


@module
class SplitFeedForward:
    """A feed-forward and a mixture of experts in parallel, x + N(N(dense(N(x))) + N(moe(N(x)))) (Gemma 4).

    Norms, each with its own weights: ``dense_norm``, ``dense_post_norm``, ``moe_norm``, ``moe_post_norm``,
    ``post_norm``; the router reads x through ``router_norm``.
    """

    dense: Layer
    moe: Layer
    norm: Norm = RMSNorm()

    def __call__(self, x: Value) -> Value:

        def apply_norm(name: str, y: Value) -> Value:
            return named(self.norm, name)(y)

        dense = apply_norm("dense_post_norm", self.dense(apply_norm("dense_norm", x)))
        sparse = self.moe(apply_norm("moe_norm", x), apply_norm("router_norm", x))
        total = ops.add(dense, apply_norm("moe_post_norm", sparse), name="both")
        return ops.add(x, apply_norm("post_norm", total), name="residual")


@module
class LayerWithInput:
    """A `block`, then `ffn` (which adds its own residual), then x + per_layer(x); None leaves out `ffn` or `per_layer`.
    With `scalar`, the result is multiplied by the parameter ``scalar`` [1] (Gemma 4)."""

    block: Block
    ffn: Layer | None = None
    per_layer: PerLayerInput | None = None
    scalar: bool = True

    @property
    def norm(self) -> Norm:
        """Return the norm of the block, which is the default of `final_norm` in a `Decoder`."""
        return self.block.norm

    def __call__(self, x: Value) -> Value:
        x = self.block(x)
        x = x if self.ffn is None else self.ffn(x)
        if self.per_layer is not None:
            x = ops.add(x, self.per_layer(x), name="per_layer_residual")
        return ops.mul(x, param("scalar", (1,), fill(1.0)), name="layer_scaled") if self.scalar else x


# -- several streams


def _compute_rms(x: Value, least: float = 0.0) -> Value:
    """Return √max(mean(x²), least) [..., 1], with the mean over the last axis."""
    mean = ops.mean(ops.square(x), axes=(len(x.shape) - 1,), keepdims=True)
    return ops.sqrt(mean if least == 0 else ops.clip(mean, low=least))


def _slice_stream(x: Value, i: int) -> Value:
    return ops.squeeze(ops.slice(x, axis=2, start=i, stop=i + 1), axes=(2,))


@module
class SpreadStreams:
    """A map from x [batch, seq, dim] to streams [batch, seq, streams, dim] (Gemma 3n).

    Stream 0 is x. Stream i + 1 is W_i x, scaled to the root mean square of x; W_i is ``projections.{i}.weight``.
    """

    streams: int

    def __post_init__(self) -> None:
        need_int(self, "streams", least=2)

    def __call__(self, x: Value) -> Value:
        size, computed = _compute_rms(x), [x]
        for i in range(self.streams - 1):
            y = linear(x, x.width, f"projections.{i}")
            computed.append(ops.div(ops.mul(y, size), _compute_rms(y, 1e-5)))
        return ops.concat(*(ops.unsqueeze(stream, axes=(2,)) for stream in computed), axis=2, name="streams")


@module
class GatherStreams:
    """A map from streams s [batch, seq, streams, dim] to [batch, seq, dim]: the mean of s_0 and all W_i s_{i+1}.

    Each W_i s_{i+1} is scaled to the root mean square of s_0; W_i is ``projections.{i}.weight`` [dim, dim] (Gemma 3n).
    """

    def __call__(self, x: Value) -> Value:
        first, count = _slice_stream(x, 0), x.shape[2]
        assert isinstance(count, int)
        size, total = _compute_rms(first), first
        for i in range(count - 1):
            y = linear(_slice_stream(x, i + 1), x.width, f"projections.{i}")
            total = ops.add(total, ops.div(ops.mul(y, size), _compute_rms(y, 1e-5)))
        return ops.affine(total, by=1 / count, name="gathered")


@module
class AltUpLayer:
    """A layer over streams [batch, seq, streams, dim] (AltUp, Baykal 2023, as in Gemma 3n).

    It predicts each stream as itself plus a mixture of all streams. A block maps stream x = `active` of the predictions
    to y + N(ffn(N(y))), with y = √½ (x + N(attn(n)) + n + N(low(n))), n = N(x), and low a linear map of rank
    `laurel_rank` (LAuReL). The block's change of x is added to each prediction, times a factor per stream that is
    computed from the block's output (``correction``). Last, `per_layer` of stream `active` (times ``output_scale`` with
    `scale_output`) is added to all streams except stream 0.

    Parameters: ``router_norm``, ``router.weight`` [streams, dim], ``prediction.weight`` [streams², streams],
    ``correction.weight`` [streams, streams], ``laurel_left.weight``, ``laurel_right.weight``, ``laurel_norm``, the
    norms of a sandwich `Block`, and with `scale_output` ``output_scale`` [dim].
    """

    attn: Layer
    ffn: Layer
    laurel_rank: int
    per_layer: PerLayerInput | None = None
    norm: Norm = RMSNorm()
    active: int = 0
    scale_output: bool = True

    def __call__(self, x: Value) -> Value:
        """Map x [batch, seq, streams, dim] to a value of the same shape."""
        batch, seq, count, _ = x.shape
        assert isinstance(count, int)
        need(self, self.active < count, f"active={self.active} must be below the number of streams, {count}")
        raw = linear(self._route(_slice_stream(x, self.active), count), count * count, "prediction")
        mixed = ops.matmul(ops.reshape(raw, shape=(batch, seq, count, count)), x)
        predicted = ops.add(mixed, x, name="predicted")
        active_prediction = _slice_stream(predicted, self.active)
        computed = self._apply_block(active_prediction)
        gains = ops.affine(linear(self._route(computed, count), count, "correction"), plus=1.0)
        innovation = ops.unsqueeze(ops.sub(computed, active_prediction, name="innovation"), axes=(2,))
        corrected = ops.add(predicted, ops.mul(innovation, ops.unsqueeze(gains, axes=(3,))), name="corrected")
        if self.per_layer is None:
            return corrected
        first = _slice_stream(corrected, self.active)
        if self.scale_output:
            first = ops.mul(first, param("output_scale", (x.width,), fill(1.0)), name="output_scaled")
        extra = self.per_layer(first)
        head = ops.slice(corrected, axis=2, start=0, stop=1)
        tail = ops.add(ops.slice(corrected, axis=2, start=1, stop=count), ops.unsqueeze(extra, axes=(2,)))
        return ops.concat(head, tail, axis=2, name="with_input")

    def _route(self, x: Value, count: int) -> Value:
        normed = ops.affine(named(self.norm, "router_norm")(x), by=1 / x.width)
        return ops.tanh(linear(normed, count, "router"))

    def _apply_block(self, x: Value) -> Value:
        normed = named(self.norm, "attn_norm")(x)
        low = linear(linear(normed, self.laurel_rank, "laurel_left"), x.width, "laurel_right")
        laurel = ops.add(normed, named(self.norm, "laurel_norm")(low), name="laurel")
        attended = ops.add(x, named(self.norm, "attn_post_norm")(self.attn(normed)), name="attn_residual")
        x = ops.affine(ops.add(attended, laurel), by=math.sqrt(0.5), name="with_laurel")
        y = named(self.norm, "ffn_post_norm")(self.ffn(named(self.norm, "ffn_norm")(x)))
        return ops.add(x, y, name="ffn_residual")
