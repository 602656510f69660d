"""Encoders of images: patches as a sequence, with tokens before them (Dosovitskiy 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.ir import ops
from weft.ir.display import Displayable
from weft.ir.graph import Graph, Value
from weft.ir.types import TensorType, dtypes, sizes

from .build import Layer, fill, module, named, param, providing, scope, traced
from .checks import need, need_few, need_modules, need_one_of, need_whole
from .layers import Norm, linear

POOLERS = ("none", "dense", "first", "attention")


@module
class ImageEncoder(Displayable):
    """An encoder of images [batch, channels, `image`, `image`]: patches, positions, layers (Dosovitskiy 2020, ViT).

    Before the patches of `patch` × `patch` stand `prefix_tokens` learned tokens (the class token; DeiT's distillation
    token), which have positions, and behind them `registers` that have none (Darcet 2023). `layers` and `block` as in
    `Encoder`. `embed_norm` normalizes what the layers take (CLIP), `final_norm` what they make.

    `pooler` makes a second output: dense, tanh(W x₀ + b) of the first token; first, that token, through `pool_norm` if
    given (CLIP); attention, a learned query that attends to all by the attention of `pooler_block`, whose norm and
    feed-forward follow (SigLIP); none. Parameters: ``patches.weight`` [dim, channels, patch, patch], with `patch_bias`
    ``patches.bias``, ``prefix`` [prefix_tokens, dim], ``registers`` [registers, dim], ``positions.weight``
    [prefix_tokens + patches, dim].
    """

    image: int
    patch: int
    dim: int
    layers: int | Sequence[Layer]
    block: Layer | None = None
    channels: int = 3
    prefix_tokens: int = 1
    registers: int = 0
    patch_bias: bool = True
    embed_norm: Norm | None = None
    final_norm: Norm | None = None
    pooler: str = "none"
    pooler_block: Layer | None = None
    pool_norm: Norm | None = None

    def __post_init__(self) -> None:
        need_whole(self, "image", "patch", "dim", "channels")
        need_whole(self, "prefix_tokens", "registers", least=0)
        need(self, self.image % self.patch == 0, f"patch={self.patch} does not divide image={self.image}")
        if isinstance(self.layers, int):
            need_few(self, "layers")
            need(self, self.block is not None, f"layers={self.layers} needs a block to repeat")
        need_modules(self, "embed_norm", "final_norm", "pool_norm", "pooler_block")
        need_one_of(self, "pooler", POOLERS)
        needs = {
            "attention": self.pooler_block is not None,
            "dense": self.prefix_tokens > 0,
            "first": self.prefix_tokens > 0,
        }
        need(self, needs.get(self.pooler, True), f"pooler={self.pooler!r} needs a prefix token or a pooler_block")

    @property
    def patches(self) -> int:
        """Number of patches."""
        return (self.image // self.patch) ** 2

    def __call__(self, pixel_values: Value) -> dict[str, Value]:
        """pixel_values [batch, channels, image, image] → last_hidden_state [batch, tokens, dim], and with a pooler
        pooler_output [batch, dim]."""
        batch, width = pixel_values.shape[0], self.dim
        kernel = param("patches.weight", (width, self.channels, self.patch, self.patch))
        bias = param("patches.bias", (width,), fill(0.0)) if self.patch_bias else None
        x = ops.patch_embedding(pixel_values, kernel, bias, name="patches")
        if self.prefix_tokens:
            x = ops.concat(
                self._spread(param("prefix", (self.prefix_tokens, width)), batch), x, axis=1, name="with_prefix"
            )
        x = ops.add(x, param("positions.weight", (self.prefix_tokens + self.patches, width)), name="positions_added")
        if self.registers:
            before, after = ops.split.emit(x, sizes=(self.prefix_tokens, self.patches), axis=1)
            x = ops.concat(
                before,
                self._spread(param("registers", (self.registers, width)), batch),
                after,
                axis=1,
                name="with_registers",
            )
        x = x if self.embed_norm is None else self.embed_norm(x)
        with providing(bidirectional=pixel_values):
            stack = [self.block] * self.layers if isinstance(self.layers, int) else list(self.layers)
            for i, layer in enumerate(stack):
                assert layer is not None
                x = named(layer, f"layers.{i}")(x)
            x = x if self.final_norm is None else self.final_norm(x)
            outputs = {"last_hidden_state": x}
            if self.pooler != "none":
                outputs["pooler_output"] = self._pooled(x, batch)
        return outputs

    def _spread(self, tokens: Value, batch: sizes.Size) -> Value:
        """Tokens [n, dim] for every image of the batch."""
        return ops.expand(ops.unsqueeze(tokens, axes=(0,)), shape=(batch, *tokens.shape))

    def _pooled(self, x: Value, batch: sizes.Size) -> Value:
        if self.pooler == "attention":
            query = self._spread(param("pooler.query", (1, self.dim)), batch)
            block: Any = self.pooler_block
            with scope("pooler"):
                attended = named(block.attn, "attn")(query, x)
                made = ops.add(attended, named(block.ffn, "ffn")(named(block.norm, "ffn_norm")(attended)))
            return ops.squeeze(made, axes=(1,), name="pooled")
        first = ops.squeeze(ops.slice(x, axis=1, start=0, stop=1), axes=(1,), name="first_token")
        if self.pooler == "dense":
            return ops.tanh(linear(first, self.dim, "pooler", bias=True), name="pooled")
        return first if self.pool_norm is None else self.pool_norm(first)

    def graph(self, seed: int = 0, name: str = "image-encoder") -> Graph:
        """The IR: input pixel_values f32[batch, channels, image, image], outputs as of a call.

        Raises:
            WeftError: naming the module and the setting that do not fit.
        """
        images = TensorType(dtypes.f32, (sizes.sym("batch"), self.channels, self.image, self.image))
        graph = traced(self, {"pixel_values": images}, seed, name, "last_hidden_state")
        graph.meta.update(
            kind="image-encoder", model_type=graph.name, context=self.prefix_tokens + self.registers + self.patches
        )
        return graph
