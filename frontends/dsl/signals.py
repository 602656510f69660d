"""Encoders of images and audio: patches, or frames computed by convolutions, which layers process as tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.ir import ops
from weft.ir.display import Displayable
from weft.ir.graph import Graph, Value
from weft.ir.ops.activation import activate
from weft.ir.ops.elementwise import mask_fill
from weft.ir.types import TensorType, dtypes, sizes

from .build import Layer, fill, get_leaf_name, module, named, param, provided, providing, scope, trace_as
from .checks import need, need_choice
from .heads import TaskHead
from .layers import LayerNorm, LearnedPositions, Norm, linear
from .models import check_layers, list_layers, provide_positions

POOLERS = ("none", "dense", "first", "attention")
FRAMES_SEEN = ("all", "start", "whole")


@module
class ImageEncoder(Displayable):
    """An encoder of images [batch, channels, `image`, `image`]: patches, positions, layers (Dosovitskiy 2020, ViT).

    The tokens are `prefix_tokens` learned tokens with positions (the class token; DeiT's distillation token), then
    `registers` learned tokens without positions (Darcet 2023), then the patches of `patch` × `patch` pixels. `layers`
    is the number of copies of `block`, or a list of modules. `embed_norm` normalizes the input of the layers (CLIP),
    `final_norm` their output. `head` adds scores for a task.

    `pooler` adds the output pooler_output: dense: tanh(W x₀ + b) of the first token; first: the first token, normalized
    by `pool_norm` if given (CLIP); attention: a learned query attends to all tokens with the attention of
    `pooler_block`, followed by that block's norm and feed-forward (SigLIP). `projection` n adds the output
    image_embeds: pooler_output mapped to n features, or unchanged if n is 0. Parameters: ``patches.weight``
    [dim, channels, patch, patch], with `patch_bias` ``patches.bias``, ``prefix`` [prefix_tokens, dim], ``registers``
    [registers, dim], ``positions.weight`` [prefix_tokens + patches, dim].
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
    projection: int | None = None
    head: TaskHead | None = None

    def __post_init__(self) -> None:
        need(self, self.image % self.patch == 0, f"patch={self.patch} does not divide image={self.image}")
        check_layers(self)
        need_choice(self, "pooler", POOLERS)
        needs = {"attention": self.pooler_block is not None, "none": self.projection is None}
        needs |= dict.fromkeys(("dense", "first"), self.prefix_tokens > 0)
        reasons = {"attention": "needs pooler_block=...", "none": "excludes projection"}
        need(self, needs[self.pooler], f"pooler={self.pooler!r} {reasons.get(self.pooler, 'needs prefix_tokens=1')}")

    @property
    def patches(self) -> int:
        """Return the number of patches."""
        return (self.image // self.patch) ** 2

    def __call__(self, pixel_values: Value) -> dict[str, Value]:
        """Map pixel_values [batch, channels, image, image] to outputs by name: last_hidden_state [batch, tokens, dim];
        with a pooler pooler_output [batch, dim]; with `projection` image_embeds [batch, width]; those of the head."""
        batch, width = pixel_values.shape[0], self.dim
        kernel = param("patches.weight", (width, self.channels, self.patch, self.patch))
        bias = param("patches.bias", (width,), fill(0.0)) if self.patch_bias else None
        x = ops.patch_embedding(pixel_values, kernel, bias, name="patches")
        if self.prefix_tokens:
            prefix = self._repeat_tokens(param("prefix", (self.prefix_tokens, width)), batch)
            x = ops.concat(prefix, x, axis=1, name="with_prefix")
        x = ops.add(x, param("positions.weight", (self.prefix_tokens + self.patches, width)), name="positions_added")
        if self.registers:
            before, after = ops.split.emit(x, sizes=(self.prefix_tokens, self.patches), axis=1)
            between = self._repeat_tokens(param("registers", (self.registers, width)), batch)
            x = ops.concat(before, between, after, axis=1, name="with_registers")
        x = x if self.embed_norm is None else self.embed_norm(x)
        with providing(bidirectional=pixel_values):
            for i, layer in enumerate(list_layers(self)):
                x = named(layer, f"layers.{i}")(x)
            x = x if self.final_norm is None else self.final_norm(x)
            outputs = {"last_hidden_state": x}
            if self.pooler != "none":
                outputs["pooler_output"] = pooled = self._pool(x, batch)
                if (to := self.projection) is not None:
                    outputs["image_embeds"] = linear(pooled, to, "projection") if to else pooled
        return outputs if self.head is None else outputs | self.head(x, pooled=outputs.get("pooler_output"))

    def _repeat_tokens(self, tokens: Value, batch: sizes.Size) -> Value:
        return ops.expand(ops.unsqueeze(tokens, axes=(0,)), shape=(batch, *tokens.shape))

    def _pool(self, x: Value, batch: sizes.Size) -> Value:
        if self.pooler == "attention":
            query = self._repeat_tokens(param("pooler.query", (1, self.dim)), batch)
            block: Any = self.pooler_block
            with scope("pooler"):
                attended = named(block.attn, "attn")(query, x)
                pooled = ops.add(attended, named(block.ffn, "ffn")(named(block.norm, "ffn_norm")(attended)))
            return ops.squeeze(pooled, axes=(1,), name="pooled")
        first = ops.squeeze(ops.slice(x, axis=1, start=0, stop=1), axes=(1,), name="first_token")
        if self.pooler == "dense":
            return ops.tanh(linear(first, self.dim, "pooler", bias=True), name="pooled")
        return first if self.pool_norm is None else self.pool_norm(first)

    def graph(self, seed: int = 0, name: str = "image-encoder") -> Graph:
        """Return the IR graph, with parameters initialized by `seed`: input pixel_values, outputs as in `__call__`.

        Raises:
            WeftError: if settings do not fit; the message names the module and the setting.
        """
        images = TensorType(dtypes.f32, (sizes.sym("batch"), self.channels, self.image, self.image))
        graph = trace_as(self, {"pixel_values": images}, seed, name, "last_hidden_state")
        graph.meta.update(
            kind="image-encoder", model_type=graph.name, context=self.prefix_tokens + self.registers + self.patches
        )
        return graph if self.head is None else self.head.describe(graph)


# -- sound


def conv1d(
    x: Value,
    channels: int,
    kernel: int,
    name: str = "conv",
    *,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    groups: int = 1,
    bias: bool = True,
) -> Value:
    """Convolve x [batch, length, in] to [batch, frames, channels]; `padding` is the number of zeros before and after x.
    Parameters: ``name.weight`` [channels, in/groups, kernel] and, with `bias`, ``name.bias``."""
    weight = param(f"{name}.weight", (channels, x.width // groups, kernel))
    offset = param(f"{name}.bias", (channels,), fill(0.0)) if bias else None
    return ops.conv1d(x, weight, offset, stride=stride, padding=padding, groups=groups, name=name)


@module(leaf=True)
class GroupNorm:
    """The norm (x − μ)/√(σ² + eps) ⊙ weight + bias, with μ and σ of each group of channels over all frames (Wu & He
    2018). `groups` is the number of groups; None means a group per channel."""

    groups: int | None = None
    eps: float = 1e-5

    def __call__(self, x: Value) -> Value:
        """Map x [batch, frames, channels] to a value of the same shape."""
        name, groups = get_leaf_name(), self.groups or x.width
        need(self, x.width % groups == 0, f"groups={groups} does not divide the {x.width} channels")
        grouped = ops.reshape(x, shape=(*x.shape[:2], groups, x.width // groups))
        centred = ops.sub(grouped, ops.mean(grouped, axes=(1, 3), keepdims=True))
        variance = ops.mean(ops.square(centred), axes=(1, 3), keepdims=True)
        normed = ops.mul(centred, ops.rsqrt(ops.affine(variance, plus=self.eps)))
        scaled = ops.mul(ops.reshape(normed, shape=x.shape), param(f"{name}.weight", (x.width,), fill(1.0)))
        return ops.add(scaled, param(f"{name}.bias", (x.width,), fill(0.0)), name=name)


@module
class Convolution:
    """A convolution over time to `channels`, then `norm` (if any) and `activation`; with `norm_last`, the norm is last.

    `padding` is the number of zeros at each end. Parameters: ``conv.weight`` [channels, in, kernel], ``conv.bias``.
    """

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    norm: Norm | GroupNorm | None = None
    activation: str = "gelu"
    norm_last: bool = False

    def __call__(self, x: Value) -> Value:
        """Map x [batch, length, in] to [batch, frames, channels]."""
        pads = (self.padding, self.padding)
        y = conv1d(x, self.channels, self.kernel, stride=self.stride, padding=pads, bias=self.bias)
        if self.norm is None:
            return activate(y, self.activation)
        return self.norm(activate(y, self.activation)) if self.norm_last else activate(self.norm(y), self.activation)


@module(leaf=True)
class PositionalConvolution:
    """Positions by a convolution over frames: x + act(conv(x)), with padding in x set to 0 (Baevski 2020, wav2vec 2.0).

    Parameters: ``weight`` [dim, dim/groups, kernel], ``bias`` [dim].
    """

    kernel: int
    groups: int = 1
    activation: str = "gelu"

    def __call__(self, x: Value) -> Value:
        """Map x [batch, frames, dim] to a value of the same shape."""
        name, before = get_leaf_name(), self.kernel // 2
        need(self, x.width % self.groups == 0, f"groups={self.groups} does not divide the width {x.width}")
        x = _mask_padding(x)
        pads = (before, self.kernel - 1 - before)
        y = conv1d(x, x.width, self.kernel, name, padding=pads, groups=self.groups)
        return ops.add(x, activate(y, self.activation), name=f"{name}_added")


def _mask_padding(x: Value) -> Value:
    """Return x [batch, seq, dim] with zeros at padded tokens; x itself if no ``key_mask`` is provided."""
    mask = provided("key_mask")
    return x if mask is None else mask_fill(ops.unsqueeze(ops.cast(mask, to=dtypes.bool_), axes=(2,)), x)


@module
class ConvolvedBlock:
    """A `block` in parallel to a convolution of its input, N(block(x) + act(conv(x))) (He 2020, DeBERTa-v2).

    For the first layer of an `Encoder`. Padding is set to 0 before the convolution; `kernel` is odd. Parameters: those
    of `block`, without a scope, ``conv.weight`` [dim, dim/groups, kernel], ``conv.bias``, ``conv_norm``.
    """

    block: Layer
    kernel: int
    groups: int = 1
    activation: str = "tanh"
    norm: Norm = LayerNorm()

    def __post_init__(self) -> None:
        need(self, self.kernel % 2 == 1, f"kernel={self.kernel} must be odd: a token is in the middle of the kernel")

    def __call__(self, x: Value) -> Value:
        need(self, x.width % self.groups == 0, f"groups={self.groups} does not divide the width {x.width}")
        y, margin = named(self.block, "")(x), (self.kernel - 1) // 2
        convolved = conv1d(_mask_padding(x), x.width, self.kernel, "conv", padding=(margin, margin), groups=self.groups)
        y = ops.add(y, activate(convolved, self.activation), name="convolved")
        return named(self.norm, "conv_norm")(y)


@module
class SoundStem:
    """The map from audio to frames: `convolutions`, a `norm`, and a linear map to the model's width if `projects`.

    The input is a waveform [batch, samples], or with `bins` a spectrogram [batch, bins, frames]; `length` fixes the
    number of samples or frames. The encoder adds `positions`: learned, or a `PositionalConvolution`. `seen` selects the
    frames that are visible to attention, given a mask of the input's padding: all (no mask is read), start: frames
    whose first sample is not padding (Moonshine), whole: frames without any padding (wav2vec 2.0).
    """

    convolutions: Sequence[Convolution]
    bins: int | None = None
    length: int | None = None
    norm: LayerNorm | None = None
    projects: bool = False
    positions: LearnedPositions | PositionalConvolution | None = None
    seen: str = "all"

    def __post_init__(self) -> None:
        need(self, len(self.convolutions) > 0, "convolutions is empty, but must have at least one Convolution")
        for layer in self.convolutions:
            need(self, isinstance(layer, Convolution), f"{layer!r} in convolutions is not a Convolution")
        need_choice(self, "seen", FRAMES_SEEN)
        padded = any(layer.padding for layer in self.convolutions)
        need(self, self.seen != "whole" or not padded, "seen='whole' needs padding=0 in all convolutions")

    @property
    def stride(self) -> int:
        """Return the distance between adjacent frames, in samples, or in frames of the spectrogram with `bins`."""
        return math.prod(layer.stride for layer in self.convolutions)

    @property
    def receptive_field(self) -> int:
        """Return the receptive field of a frame, in samples, or in frames of the spectrogram with `bins`."""
        size, stride = 1, 1
        for layer in self.convolutions:
            size, stride = size + (layer.kernel - 1) * stride, stride * layer.stride
        return size

    def input_types(self, mask: str) -> dict[str, TensorType]:
        """Return the types of the inputs by name: the audio, and the padding mask `mask` unless `seen` is all."""
        batch = sizes.sym("batch")
        if self.bins is None:
            length = self.length or sizes.sym("samples")
            types = {"input_values": TensorType(dtypes.f32, (batch, length))}
        else:
            length = self.length or sizes.sym("frames")
            types = {"input_features": TensorType(dtypes.f32, (batch, self.bins, length))}
        return types if self.seen == "all" else {**types, mask: TensorType(dtypes.i64, (batch, length))}

    def __call__(self, sound: Value, dim: int) -> Value:
        """Map sound [batch, samples] or [batch, bins, frames] to frames [batch, frames, dim]; add no positions."""
        x = ops.unsqueeze(sound, axes=(2,)) if self.bins is None else ops.transpose(sound, axes=(0, 2, 1))
        for layer in self.convolutions:
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return linear(x, dim, "project", bias=True) if self.projects else x

    def frame_mask(self, mask: Value, x: Value) -> Value:
        """Return the mask i64[batch, frames] (0: masked) of the frames x, given the input's mask [batch, samples]."""
        last = self.receptive_field - 1 if self.seen == "whole" else 0
        return ops.gather(mask, ops.affine(ops.iota(x, axis=1), by=self.stride, plus=last), axis=1, name="frame_mask")


@module
class AudioEncoder(Displayable):
    """An encoder of audio: a `stem` that maps a waveform or spectrogram to frames, then layers (wav2vec 2.0, Whisper).

    `layers` is the number of copies of `block`, or a list of modules. `embed_norm` normalizes their input, after the
    stem's positions, `final_norm` their output. `context` is the largest number of frames, by default the length of
    the stem's learned positions. `head` adds scores for a task.
    """

    stem: SoundStem
    dim: int
    layers: int | Sequence[Layer]
    block: Layer | None = None
    embed_norm: Norm | None = None
    final_norm: Norm | None = None
    context: int | None = None
    head: TaskHead | None = None

    def __post_init__(self) -> None:
        check_layers(self)
        last = self.stem.convolutions[-1].channels
        fits = self.stem.projects or last == self.dim
        need(self, fits, f"the last convolution has {last} channels instead of dim={self.dim}: set projects in stem")

    @property
    def positions(self) -> LearnedPositions | None:
        """Return the stem's learned positions, whose table limits the number of frames; None if it has none."""
        return self.stem.positions if isinstance(self.stem.positions, LearnedPositions) else None

    def __call__(self, sound: Value, mask: Value | None = None) -> dict[str, Value]:
        """Map sound [batch, samples] or [batch, bins, frames] to last_hidden_state [batch, frames, dim] and the head's
        outputs, by name; with a `mask` [batch, samples] (0: right padding) also to frame_mask [batch, frames]."""
        x = self.stem(sound, self.dim)
        seen = None if mask is None else self.stem.frame_mask(mask, x)
        facts = {} if seen is None else {"key_mask": seen}
        with providing(bidirectional=x, **facts), provide_positions(x):
            if self.stem.positions is not None:
                x = named(self.stem.positions, "positions")(x)
            x = x if self.embed_norm is None else self.embed_norm(x)
            for i, layer in enumerate(list_layers(self)):
                x = named(layer, f"layers.{i}")(x)
            x = x if self.final_norm is None else self.final_norm(x)
        scores = {} if self.head is None else self.head(x, mask=seen)
        return {"last_hidden_state": x, **({} if seen is None else {"frame_mask": seen}), **scores}

    def graph(self, seed: int = 0, name: str = "audio-encoder") -> Graph:
        """Return the IR graph, with parameters initialized by `seed`. Inputs: input_values f32[batch, samples], or
        input_features f32[batch, bins, frames]; attention_mask if the stem reads it. Outputs: as in `__call__`.

        Raises:
            WeftError: if settings do not fit; the message names the module and the setting.
        """
        graph = trace_as(self, self.stem.input_types("attention_mask"), seed, name, "last_hidden_state")
        graph.meta.update(kind="audio-encoder", model_type=graph.name, context=get_max_frames(self))
        return graph if self.head is None else self.head.describe(graph)


def get_max_frames(encoder: AudioEncoder) -> int | None:
    """Return the largest number of frames: `context`, else the length of the position table; None without a limit."""
    return encoder.context or (None if encoder.positions is None else encoder.positions.length)
