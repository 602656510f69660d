"""Alternating updates: several residual streams, of which each layer computes one (Baykal 2023; Gemma 3n)."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value

from .attention import Attention
from .build import fill, module, named, param
from .checks import need, need_few, need_kind, need_modules, need_whole
from .ffn import GatedMLP
from .layers import Norm, RMSNorm, linear
from .per_layer import PerLayerInput


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
