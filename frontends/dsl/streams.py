"""Beside the residual stream: embeddings for every layer, and further streams (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .attention import Attention
from .blocks import Block
from .build import Layer, fill, module, named, param, provided
from .checks import need, need_activation, need_few, need_kind, need_modules, need_whole
from .ffn import GatedMLP, MoE
from .layers import Norm, RMSNorm, embedding, linear


@module
class PerLayerEmbedding:
    """A vector of `width` for every layer: (embedding of the token · √width + N(x W / √dim)) / √2 (Gemma 3n).

    Parameters: ``table.weight`` [vocab, layers · width], ``projection.weight`` [layers · width, dim], ``norm.weight``.
    Tokens from `vocab` on have the vector of token 0.
    """

    vocab: int
    width: int
    norm: Norm = RMSNorm()

    def __post_init__(self) -> None:
        need_whole(self, "vocab", "width")
        need_modules(self, "norm")

    def __call__(self, x: Value, ids: Value, layers: int) -> list[Value]:
        """x [batch, seq, dim] embedded, ids [batch, seq] → for each of `layers` [batch, seq, width]."""
        shape = (*x.shape[:2], layers, self.width)
        known = ops.cast(ops.less(ids, ops.affine(ids, by=0, plus=self.vocab)), to=ids.type.dtype)
        rows = embedding(ops.mul(ids, known), self.vocab, layers * self.width, "table")
        said = ops.reshape(ops.affine(rows, by=math.sqrt(self.width)), shape=shape)
        projected = ops.affine(linear(x, layers * self.width, "projection"), by=x.width**-0.5)
        both = ops.add(named(self.norm, "norm")(ops.reshape(projected, shape=shape)), said)
        scaled = ops.affine(both, by=math.sqrt(0.5), name="per_layer")
        each = ops.split.emit(scaled, sizes=(1,) * layers, axis=2) if layers > 1 else [scaled]
        return [ops.squeeze(part, axes=(2,)) for part in each]


@module
class PerLayerInput:
    """N(W (act(x W_gate) ⊙ e)) for the layer's embedding e [batch, seq, `width`] (Gemma 3n)."""

    width: int
    activation: str = "gelu_tanh"
    norm: Norm = RMSNorm()

    def __post_init__(self) -> None:
        need_whole(self, "width")
        need_activation(self, self.activation)
        need_modules(self, "norm")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        said = provided("per_layer")
        need(self, said is not None, "the model has no per_layer embedding")
        assert said is not None
        gated = ops.mul(activate(linear(x, self.width, "gate"), self.activation), said, name="gated")
        return named(self.norm, "norm")(linear(gated, x.width, "projection"))


@module
class SplitFeedForward:
    """x + N(N(dense(N(x))) + N(moe(N(x)))): a feed-forward and a mixture of experts side by side, each with norms of
    its own, the router's without weights (Gemma 4).

    Norms: ``dense_norm``, ``dense_post_norm``, ``moe_norm``, ``moe_post_norm``, ``post_norm``; the router reads x
    through ``router_norm``.
    """

    dense: GatedMLP
    moe: MoE
    norm: Norm = RMSNorm()

    def __post_init__(self) -> None:
        need_modules(self, "dense", "moe", "norm")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""

        def normed(name: str, y: Value) -> Value:
            return named(self.norm, name)(y)

        dense = normed("dense_post_norm", self.dense(normed("dense_norm", x)))
        sparse = self.moe(normed("moe_norm", x), normed("router_norm", x))
        both = ops.add(dense, normed("moe_post_norm", sparse), name="both")
        return ops.add(x, normed("post_norm", both), name="residual")


@module
class LayerWithInput:
    """A block, then `ffn` on its own residual terms, then x + per_layer(x); all times ``scalar`` [1] if `scalar`."""

    block: Block
    ffn: Layer | None = None
    per_layer: PerLayerInput | None = None
    scalar: bool = True

    def __post_init__(self) -> None:
        need_modules(self, "block", "ffn", "per_layer")

    @property
    def norm(self) -> Norm:
        """The norm of the block, which a model takes for its last one."""
        return self.block.norm

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        x = self.block(x)
        x = x if self.ffn is None else self.ffn(x)
        if self.per_layer is not None:
            x = ops.add(x, self.per_layer(x), name="per_layer_residual")
        return ops.mul(x, param("scalar", (1,), fill(1.0)), name="layer_scaled") if self.scalar else x


# -- several streams


def _root_mean_square(x: Value, least: float = 0.0) -> Value:
    """√mean(x²) [..., 1], the mean at least `least`."""
    mean = ops.mean(ops.square(x), axes=(len(x.shape) - 1,), keepdims=True)
    return ops.sqrt(mean if least == 0 else ops.clip(mean, low=least))


def _stream(x: Value, i: int) -> Value:
    """Stream `i` [batch, seq, dim] of x [batch, seq, streams, dim]."""
    return ops.squeeze(ops.slice(x, axis=2, start=i, stop=i + 1), axes=(2,))


def _stacked(streams: list[Value]) -> Value:
    return ops.concat(*(ops.unsqueeze(s, axes=(2,)) for s in streams), axis=2, name="streams")


@module
class SpreadStreams:
    """x, and for each further one of `streams` x W as large as x: [batch, seq, dim] → [batch, seq, streams, dim].

    Parameters ``projections.{i}.weight`` [dim, dim].
    """

    streams: int

    def __post_init__(self) -> None:
        need_whole(self, "streams", least=2)
        need_few(self, "streams")

    def __call__(self, x: Value) -> Value:
        size, made = _root_mean_square(x), [x]
        for i in range(self.streams - 1):
            y = linear(x, x.width, f"projections.{i}")
            made.append(ops.div(ops.mul(y, size), _root_mean_square(y, 1e-5)))
        return _stacked(made)


@module
class GatherStreams:
    """The mean of the first stream and of every other one times W, as large as the first: the inverse shapes of
    `SpreadStreams`, with parameters of its own under the same names."""

    def __call__(self, x: Value) -> Value:
        first, count = _stream(x, 0), x.shape[2]
        assert isinstance(count, int)
        size, total = _root_mean_square(first), first
        for i in range(count - 1):
            y = linear(_stream(x, i + 1), x.width, f"projections.{i}")
            total = ops.add(total, ops.div(ops.mul(y, size), _root_mean_square(y, 1e-5)))
        return ops.affine(total, by=1 / count, name="gathered")


@module
class AltUpLayer:
    """A layer over streams [batch, seq, streams, dim]: it predicts all, computes stream `active`, and corrects all.

    What it computes is a sandwich block of `attn` and `ffn` whose attention has a low-rank map of `laurel_rank` beside
    it (LAuReL); `per_layer` is added to all streams but the first. Parameters: ``router_norm``, ``router.weight``
    [streams, dim], ``prediction.weight`` [streams², streams], ``correction.weight`` [streams, streams], with
    `scale_output` ``output_scale`` [dim], ``laurel_left.weight``, ``laurel_right.weight``, ``laurel_norm`` and the
    norms of a sandwich block.
    """

    attn: Attention
    ffn: GatedMLP
    laurel_rank: int
    per_layer: PerLayerInput | None = None
    norm: Norm = RMSNorm()
    active: int = 0
    scale_output: bool = True

    def __post_init__(self) -> None:
        need_whole(self, "laurel_rank")
        need_whole(self, "active", least=0)
        need_modules(self, "attn", "ffn", "per_layer", "norm")
        need_kind(self, "per_layer", PerLayerInput)

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, streams, dim] → the same."""
        batch, seq, count, _ = x.shape
        assert isinstance(count, int)
        need(self, self.active < count, f"active={self.active} is not one of {count} streams")
        raw = linear(self._modalities(_stream(x, self.active), count), count * count, "prediction")
        mixed = ops.matmul(ops.reshape(raw, shape=(batch, seq, count, count)), x)
        predicted = ops.add(mixed, x, name="predicted")
        before = _stream(predicted, self.active)
        made = self._computed(before)
        gains = ops.affine(linear(self._modalities(made, count), count, "correction"), plus=1.0)
        innovation = ops.unsqueeze(ops.sub(made, before, name="innovation"), axes=(2,))
        corrected = ops.add(predicted, ops.mul(innovation, ops.unsqueeze(gains, axes=(3,))), name="corrected")
        if self.per_layer is None:
            return corrected
        first = _stream(corrected, self.active)
        if self.scale_output:
            first = ops.mul(first, param("output_scale", (x.width,), fill(1.0)), name="output_scaled")
        more = self.per_layer(first)
        kept = ops.slice(corrected, axis=2, start=0, stop=1)
        others = ops.add(ops.slice(corrected, axis=2, start=1, stop=count), ops.unsqueeze(more, axes=(2,)))
        return ops.concat(kept, others, axis=2, name="with_input")

    def _modalities(self, x: Value, count: int) -> Value:
        normed = ops.affine(named(self.norm, "router_norm")(x), by=1 / x.width)
        return ops.tanh(linear(normed, count, "router"))

    def _computed(self, x: Value) -> Value:
        normed = named(self.norm, "attn_norm")(x)
        low = linear(linear(normed, self.laurel_rank, "laurel_left"), x.width, "laurel_right")
        beside = ops.add(normed, named(self.norm, "laurel_norm")(low), name="laurel")
        attended = ops.add(x, named(self.norm, "attn_post_norm")(self.attn(normed)), name="attn_residual")
        x = ops.affine(ops.add(attended, beside), by=math.sqrt(0.5), name="with_laurel")
        y = named(self.norm, "ffn_post_norm")(self.ffn(named(self.norm, "ffn_norm")(x)))
        return ops.add(x, y, name="ffn_residual")
