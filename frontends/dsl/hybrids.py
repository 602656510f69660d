"""Mixers of hybrid models other than state spaces: short convolutions, lightning attention, and blocks around them."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.recipes import Literal

from .build import Layer, fill, module, named, param, provided, uniform
from .checks import need, need_int
from .layers import Norm, RMSNorm, divide_width, linear


@module
class ShortConv:
    """A causal convolution over `conv` tokens between two gates: W_out (C ⊙ conv(B ⊙ u)) (LFM2, Liquid AI 2025).

    B, C and u are projected from x by ``in.weight`` [3·dim, dim], in this order. Further parameters: ``conv.weight``
    [dim, conv], W_out ``out.weight`` [dim, dim]; `bias` adds ``in.bias``, ``conv.bias`` and ``out.bias``.
    """

    conv: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)

    def __call__(self, x: Value) -> Value:
        dim = x.width
        parts = ops.split.emit(linear(x, 3 * dim, "in", self.bias), sizes=(dim, dim, dim), name=("b", "c", "u"))
        before, after, u = parts
        y = causal_conv(ops.mul(before, u, name="gated"), self.conv, self.bias)
        return linear(ops.mul(after, y, name="mixed"), dim, "out", self.bias)


@module
class ParallelHybrid:
    """The sum attention(x) + ssm(x) of attention and a recurrence in one layer (Falcon-H1, 2025; Hymba, Dong 2024)."""

    attention: Layer
    ssm: Layer

    def __call__(self, x: Value) -> Value:
        ssm, attention = self.ssm(x), self.attention(x)
        if ssm.type != attention.type:
            raise WeftError(f"ssm returns {ssm.type} and attention {attention.type}, but both must return {x.type}")
        return ops.add(ssm, attention, name="mixed")


@module
class MemoryBlock:
    """A recurrent layer that also reads the output of a transformer block over x and the embeddings (Zamba2, 2024).

    The result is x + mamba(N(x + W ffn(N(attn(N([x, e])))))), with e the input of the model's first layer; without
    `attn` and `ffn` it is x + mamba(N(x)). `attn` maps 2·dim to dim features (``Attention(..., out_dim=dim)``). The
    norms are ``norm`` (before mamba), ``attn_norm`` and ``ffn_norm``; W is ``link.weight`` [dim, dim].
    """

    mamba: Layer
    attn: Layer | None = None
    ffn: Layer | None = None
    norm: Norm = RMSNorm()

    def __post_init__(self) -> None:
        need(self, (self.attn is None) == (self.ffn is None), "attn and ffn need each other: give both or none")

    def __call__(self, x: Value) -> Value:
        mixer_input = x
        if self.attn is not None and self.ffn is not None:
            embedded = provided("embedded")
            if embedded is None:
                raise WeftError("MemoryBlock: attn reads the model's embeddings, so the block must be in a Decoder")
            y = self.attn(named(self.norm, "attn_norm")(ops.concat(x, embedded, axis=2, name="beside")))
            y = self.ffn(named(self.norm, "ffn_norm")(y))
            mixer_input = ops.add(x, linear(y, x.width, "link"), name="fed")
        return ops.add(x, self.mamba(named(self.norm, "norm")(mixer_input)), name="mamba_residual")


@module
class LightningAttention:
    """Linear attention with a fixed decay per head (TransNormerLLM, Qin 2023; Lightning Attention, 2024; MiniMax-01).

    q, k and v are projected by ``q.weight``, ``k.weight``, ``v.weight`` [heads·head_dim, dim], then `activation` is
    applied. The log decay per token of head h = 0, 1, … is −2^(−8(h + 1)/heads) · `decay`, in the parameter ``slopes``.
    The output is normalized by `norm` over all heads together, multiplied by σ(W x), W = ``gate.weight``
    [heads·head_dim, dim], and projected by ``out.weight``. `head_dim` defaults to dim / heads.
    """

    heads: int
    head_dim: int | None = None
    decay: float = 1.0
    activation: str = "silu"
    norm: Norm = RMSNorm()

    def __call__(self, x: Value) -> Value:
        heads = self.heads
        width = heads * (self.head_dim or divide_width(x, heads, "heads"))
        q, k, v = (activate(linear(x, width, name), self.activation) for name in "qkv")
        slopes = Literal(tuple(-self.decay * 2.0 ** (-8 * (h + 1) / heads) for h in range(heads)), (heads,))
        decay = ops.expand(param("slopes", (heads,), lambda *_: slopes), shape=(*x.shape[:2], heads), name="decay")
        y = named(self.norm, "norm")(ops.gated_linear_attention(q, k, v, decay, heads=heads, groups=heads))
        gate = ops.sigmoid(linear(x, width, "gate"))
        return linear(ops.mul(y, gate, name="gated"), x.width, "out")


@module
class NormedResidual:
    """A block whose residual is the normalized input: x ← α n + β f(n), n = N(x), for `attn`, then `ffn` (MiniMax-01).

    Norms are called ``attn_norm`` and ``ffn_norm``; `attn_scales` and `ffn_scales` are (α, β).
    """

    attn: Layer
    ffn: Layer
    norm: Norm = RMSNorm()
    attn_scales: tuple[float, float] = (1.0, 1.0)
    ffn_scales: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("attn_scales", "ffn_scales"):
            scales = getattr(self, name)
            fits = isinstance(scales, tuple) and len(scales) == 2 and all(isinstance(s, int | float) for s in scales)
            need(self, fits, f"{name}={scales!r} must be two numbers")

    def __call__(self, x: Value) -> Value:
        for name, f, scales in (("attn", self.attn, self.attn_scales), ("ffn", self.ffn, self.ffn_scales)):
            normed = named(self.norm, f"{name}_norm")(x)
            y = f(normed)
            parts = (v if s == 1 else ops.affine(v, by=float(s)) for v, s in zip((normed, y), scales, strict=True))
            x = ops.add(*parts, name=f"{name}_residual")
        return x


def causal_conv(u: Value, width: int, with_bias: bool, activation: str = "identity") -> Value:
    """Return `activation` of the causal depthwise convolution over `width` tokens of u, in its shape [batch, seq,
    channels]. Parameters: ``conv.weight`` [channels, width] and, if `with_bias`, ``conv.bias`` [channels]."""
    bias = param("conv.bias", (u.width,), fill(0.0)) if with_bias else None
    weight = param("conv.weight", (u.width, width), uniform(width**-0.5))
    return ops.causal_conv(u, weight, bias, activation=activation, name="conv")
