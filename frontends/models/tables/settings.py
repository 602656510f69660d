"""The flat record of settings into which family tables translate a config, and the function that builds its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.ir.errors import WeftError

from ...dsl import (
    MLP,
    XIELU,
    Attention,
    AudioEncoder,
    Block,
    BlockSparse,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    Gate,
    GatedMLP,
    HeadTransform,
    ImageEncoder,
    LayerNorm,
    LearnedPositions,
    Mask,
    MaskScaling,
    PerLayerEmbedding,
    QKNorm,
    RelativeTable,
    Repeat,
    RMSNorm,
    RoPE,
    SentencePooling,
    Sinusoidal,
    SinusoidalDistances,
    SoundStem,
    T5Bias,
    TaskHead,
    Temperature,
    TransientGlobals,
)
from ...dsl.layers import Norm

# Activations by their names in configs.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a transformer; defaults are those of Llama. A tuple has one value per layer.

    vocab: None if the model reads no tokens. heads: None without attention, or if `mixer` replaces it.
    ffn: inner width of the feed-forward; None without one, or if `moe` replaces it.
    qk_norm: none, head (one weight for all heads), each (a weight per head) or full (over all heads at once).
    shared_layers: number of layers with weights, each of which is repeated (ALBERT); None: all layers have weights.
    embed_dim: width of embeddings that are narrower than `dim`.
    kind: decoder, encoder, encoder-decoder, image-encoder or audio-encoder.
    mixer: a module in place of attention. moe: a `MoE` in place of the feed-forward.
    decoder: settings of the decoder of an encoder-decoder that differ from those of its encoder.
    multipliers: numbers that templates of weights need, by name, such as muP's factors.
    """

    vocab: int | None
    dim: int
    layers: int
    heads: int | tuple[int, ...] | None = None
    ffn: int | tuple[int | None, ...] | None = None
    kv_heads: int | tuple[int, ...] | None = None
    head_dim: int | tuple[int, ...] | None = None
    context: int | None = None
    kind: str = "decoder"
    # blocks
    norm: str = "rms"  # rms, layer
    norm_weight: bool = True
    norm_bias: bool = True
    eps: float = 1e-6
    arrangement: str | tuple[str, ...] = "pre"  # of norms: `ARRANGEMENTS` of frontends/dsl/blocks.py
    residual_scale: float = 1.0  # of each sublayer's output
    weighted_residual: bool = False  # the residual is multiplied by learned weights before a sublayer's output is added
    shared_layers: int | None = None
    block: Any = None  # a module that replaces the entire block
    # attention
    qkv_bias: bool = False
    out_bias: bool | tuple[bool, ...] = False
    qk_norm: str | tuple[str, ...] = "none"
    qk_norm_last: bool = False  # the norm of queries and keys follows RoPE
    qk_norm_weight: bool = True
    temperature: Temperature | tuple[Temperature | None, ...] | None = None
    clip: float | None = None
    rope: RoPE | tuple[RoPE | None, ...] | None = None
    bias: Any = None  # ALiBi, T5Bias
    window: int | tuple[int | None, ...] | None = None
    scale: float | tuple[float | None, ...] | None = None
    softcap: float | None = None
    causal: bool | None = None  # None: True in decoders, False in encoders
    sinks: bool | tuple[bool, ...] = False
    gate: Gate | bool = False
    v_head_dim: int | None = None
    sub_norm: bool = False  # before the last linear layer of both sublayers
    mask: Mask | BlockSparse | tuple[Mask | None, ...] | None = None
    value_conv: int | None = None
    mixer: Any = None
    # feed-forward
    activation: str = "silu"
    gated: bool = True
    ffn_bias: bool = False
    moe: Any = None
    # both ends
    embed_dim: int | None = None
    embed_scale: float = 1.0
    embed_norm: bool = False
    embed_norm_first: bool = False  # before positions are added, in a decoder
    learned_positions: int | None = None
    position_offset: int = 0  # the row of the first position in the learned table
    sinusoids: Sinusoidal | None = None
    stored_sinusoids: bool = False  # the checkpoint stores their table, which may have any values
    position_bias: T5Bias | None = None
    per_layer: PerLayerEmbedding | None = None
    spread: Any = None  # module that copies the embedding into several residual streams
    gather: Any = None  # module that merges the streams after the last layer
    relative: RelativeTable | SinusoidalDistances | TransientGlobals | None = None
    sentence: SentencePooling | None = None
    mask_scaling: MaskScaling | None = None
    token_types: int = 0
    pooler: bool = False
    tie: bool = False
    head_bias: bool = False
    head_transform: HeadTransform | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head: TaskHead | None = None
    stem: SoundStem | None = None  # of audio encoders
    image: int = 0  # side of the image in pixels, for image encoders
    patch: int = 0
    channels: int = 3
    prefix_tokens: int = 1
    registers: int = 0
    patch_bias: bool = True
    final_norm: bool = True
    image_pooler: str = "none"
    projection: int | None = None
    decoder: Mapping[str, Any] = field(default_factory=dict)
    share_embeddings: bool = True
    multipliers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_size(self) -> int:
        """Return the width of an attention head (the first that is not None, if layers differ)."""
        size = self.find_first("head_dim") if isinstance(self.head_dim, tuple) else self.head_dim
        return size or self.dim // self.head_count

    @property
    def head_count(self) -> int:
        """Return the number of attention heads (of the first attention layer, if layers differ); 1 without heads."""
        return (self.find_first("heads") if isinstance(self.heads, tuple) else self.heads) or 1

    @property
    def resolved(self) -> Settings:
        """Return these settings with computed defaults of kv_heads, head_dim and the number of rotated features of
        RoPE. Tuples of equal values are replaced by the value."""

        def resolve_rope(rope: RoPE | None) -> RoPE | None:
            return rope and replace(rope, dim=rope.dim or int(rope.fraction * self.head_size), fraction=1.0)

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        rope = self.rope
        values["rope"] = tuple(map(resolve_rope, rope)) if isinstance(rope, tuple) else resolve_rope(rope)
        collapsed = {name: v[0] for name, v in values.items() if isinstance(v, tuple) and v == v[:1] * len(v)}
        return replace(self, **{**values, **collapsed, "kv_heads": self.groups, "head_dim": self.head_size})

    def expand(self, name: str) -> tuple[Any, ...]:
        """Return the setting `name` of each layer, in order; raise WeftError for a tuple of another length."""
        value = getattr(self, name)
        values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,) * self.layers
        if len(values) != self.layers:
            raise WeftError(f"{name} has {len(values)} values, but needs one for each of {self.layers} layers")
        return values

    def find_first(self, name: str) -> Any:
        """Return the first value of the setting `name` that is not None, in layer order; there must be one."""
        return next(value for value in _to_tuple(getattr(self, name)) if value is not None)

    @property
    def groups(self) -> int:
        """Return the number of key/value heads (of the first attention layer, if layers differ); `heads` by default."""
        count = self.find_first("kv_heads") if isinstance(self.kv_heads, tuple) else self.kv_heads
        return count or self.head_count


_Layer = Any  # the Settings of a single layer, without tuples


def build(s: Settings) -> Decoder | Encoder | EncoderDecoder | ImageEncoder | AudioEncoder:
    """Return the module with the settings `s`; `s.kind` selects its class.

    Raises:
        WeftError: naming the setting whose value is unknown, not positive or does not fit.
    """
    for name in ("vocab", "dim", "layers", "heads", "ffn"):
        if any(value is not None and value < 1 for value in _to_tuple(getattr(s, name))):
            raise WeftError(f"{name}={getattr(s, name)} must be positive")
    if s.kind == "encoder-decoder":
        decoder = _build_decoder(replace(s, **s.decoder), cross=True)
        s = replace(s, head=None)
        return EncoderDecoder(
            _build_encoder(s) if s.stem is None else _build_audio_encoder(s), decoder, s.share_embeddings
        )
    if s.kind == "audio-encoder":
        return _build_audio_encoder(s)
    if s.kind == "image-encoder":
        return _build_image_encoder(s)
    return _build_encoder(s) if s.kind == "encoder" else _build_decoder(s)


def _build_image_encoder(s: Settings) -> ImageEncoder:
    layers, block = _build_layers(s)
    norm = build_norm(s)
    arguments = {
        "layers": layers,
        "block": block,
        "embed_norm": norm if s.embed_norm else None,
        "final_norm": norm if s.final_norm else None,
        "pooler": s.image_pooler,
        "projection": None if s.image_pooler == "none" else s.projection,
        "pool_norm": None if s.final_norm else norm,
        "pooler_block": _build_block(_select_layer(s, 0), norm) if s.image_pooler == "attention" else None,
    }
    return ImageEncoder(**_select_fields(ImageEncoder, s) | arguments)


def _build_audio_encoder(s: Settings) -> AudioEncoder:
    layers, block = _build_layers(s)
    norms = {
        "embed_norm": build_norm(s) if s.embed_norm else None,
        "final_norm": None if s.arrangement == "post" else build_norm(s),
    }
    return AudioEncoder(**_select_fields(AudioEncoder, s) | {"layers": layers, "block": block} | norms)


def _build_encoder(s: Settings) -> Encoder:
    return Encoder(**_build_arguments(Encoder, s) | {"final_norm": None if s.arrangement == "post" else build_norm(s)})


def _build_decoder(s: Settings, cross: bool = False) -> Decoder:
    return Decoder(**_build_arguments(Decoder, s, cross) | {"tie_embeddings": s.tie})


def _select_fields(module: type, s: _Layer) -> dict[str, Any]:
    """Return the settings in `s` that are also fields of the dataclass `module`, as arguments for it."""
    return {f.name: getattr(s, f.name) for f in fields(module) if f.name in vars(s)}


def _build_arguments(module: type[Decoder | Encoder], s: Settings, cross: bool = False) -> dict[str, Any]:
    """Return the arguments that `Decoder` and `Encoder` have in common; `cross`: add cross-attention."""
    layers, block = _build_layers(s, cross)
    embed_norm = build_norm(s) if s.embed_norm else None
    arguments = {"layers": layers, "block": block, "positions": _build_positions(s), "embed_norm": embed_norm}
    return _select_fields(module, s) | arguments


def _build_layers(s: Settings, cross: bool = False) -> tuple[Any, Any]:
    """Return the arguments `layers` and `block` of a model; `cross`: add cross-attention to its blocks.
    If all blocks are equal, these are their number and one block; else the list of blocks and None."""
    norm, n_blocks = build_norm(s), s.shared_layers or s.layers
    if s.layers % n_blocks:
        raise WeftError(f"shared_layers={n_blocks} must divide layers={s.layers}")
    blocks: list[Any] = [
        _select_layer(s, i).block or _build_block(_select_layer(s, i), norm, cross) for i in range(n_blocks)
    ]
    if s.shared_layers:
        blocks = [Repeat(block, s.layers // n_blocks) for block in blocks]
    return (n_blocks, blocks[0]) if all(b == blocks[0] for b in blocks) else (blocks, None)


def _build_positions(s: Settings) -> LearnedPositions | Sinusoidal | None:
    if s.sinusoids is not None:
        return LearnedPositions(s.sinusoids.length, s.sinusoids.offset) if s.stored_sinusoids else s.sinusoids
    return LearnedPositions(s.learned_positions, s.position_offset) if s.learned_positions else None


def _build_block(s: _Layer, norm: Norm, cross: bool = False) -> Block:
    # Positions of the source differ from those of the target sequence.
    cross_settings = replace(s, rope=None, bias=None, window=None, temperature=None, mask=None, value_conv=None)
    memory = _build_attention(cross_settings, norm, CrossAttention) if cross else None
    ffn = s.moe or _build_feed_forward(s, norm)
    mixer = s.mixer or _build_attention(s, norm)
    return Block(mixer, ffn, norm, s.arrangement, s.residual_scale, memory, s.weighted_residual)


def _build_attention(s: _Layer, norm: Norm, kind: type[Attention] = Attention) -> Attention | None:
    if s.heads is None:
        return None
    each = norm if s.qk_norm_weight else norm.plain()
    norms: dict[str, Any] = {"sub_norm": norm if s.sub_norm else None}
    norms["qk_norm"] = None if s.qk_norm == "none" else QKNorm(each, s.qk_norm, s.qk_norm_last)
    return kind(**_select_fields(kind, s) | norms)


def _build_feed_forward(s: _Layer, norm: Norm) -> MLP | GatedMLP | None:
    if s.ffn is None:
        return None
    sub_norm = norm if s.sub_norm else None
    if s.activation == "xielu" and not s.gated:
        return MLP(s.ffn, XIELU(), s.ffn_bias, sub_norm)
    if s.activation not in ACTIVATIONS:
        raise WeftError(f"activation {s.activation!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    return (GatedMLP if s.gated else MLP)(s.ffn, ACTIVATIONS[s.activation], s.ffn_bias, sub_norm=sub_norm)


def build_norm(s: Settings) -> Norm:
    """Return the norm of the blocks of a model with the settings `s`: RMSNorm or LayerNorm."""
    if s.norm == "rms":
        return RMSNorm(s.eps, s.norm_weight)
    return LayerNorm(s.eps, s.norm_weight, s.norm_weight and s.norm_bias)


def _select_layer(s: Settings, i: int) -> _Layer:
    return replace(s, **{name: s.expand(name)[i] for name, value in vars(s).items() if isinstance(value, tuple)})


def _to_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
