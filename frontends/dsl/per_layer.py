"""Layers with inputs of their own: an embedding of the token for every layer (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .blocks import Block
from .build import Layer, fill, module, named, param, provided
from .checks import need, need_activation, need_modules, need_whole
from .experts import MoE
from .ffn import GatedMLP
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
