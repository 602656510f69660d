"""Softmax attention with grouped heads and its variants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.elementwise import fill_like
from weft.ir.schema.visible_keys import PATTERNS, VisibleBlocks

from .build import Layer, Renamed, fill, format_module, keep, kept, module, named, param, provided, select_attrs
from .checks import check_fields, need, need_choice
from .layers import LayerNorm, Norm, divide_width, is_causal, linear
from .rotary import RoPE, Temperature

GATES = {"sigmoid": ops.sigmoid, "softplus": ops.softplus}
_MASKED_SCORE = -1e3  # the score of a hidden key, which softmax maps to 0


@module(leaf=True)
class BlockSparse:
    """Block-sparse attention with blocks of `block` tokens (BigBird, Zaheer 2020): a `mask` of `Attention` in encoders.

    The edge blocks are the first `first` and the last `last` blocks; their queries see all keys. All other queries see
    the keys of their block, of `sides` blocks on each side of it, and of the edge blocks, where a key of the first
    blocks counts `first_weight` times. In sequences of at most `dense` tokens, every query sees every key, once.
    """

    block: int
    sides: int = 1
    first: int = 1
    last: int = 1
    first_weight: int = 1
    dense: int = 0

    def __post_init__(self) -> None:
        problem = VisibleBlocks.from_attrs(vars(self)).find_problem()
        need(self, problem is None, problem or "")

    def __call__(self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, scale: float | None = None) -> Value:
        """Map q [batch, seq, heads·d], k and v [batch, seq, kv_heads·d] to [batch, seq, heads·d]; `scale` as in
        `Attention`."""
        if is_causal():
            raise WeftError("block-sparse attention reads later tokens: it belongs in an Encoder")
        attrs = select_attrs(self, ops.block_sparse_attention)
        attrs |= {"heads": heads, "kv_heads": kv_heads, "scale": scale}
        return ops.block_sparse_attention(q, k, v, provided("key_mask"), **attrs)


@module
class LightningIndex:
    """A selection of keys for each query: the `index` of an `MLA` (DeepSeek sparse attention, DeepSeek-V3.2, 2025).

    The `top_k` visible keys with the largest scores Σ_h w_h · max(q_h·k, 0) are selected, as in the op
    `lightning_index`. The scores have no scale, because it would not change the selection. `rope` rotates q and k,
    `norm` normalizes k. Parameters: ``q.weight`` [heads·head_dim, q_rank], applied to the latent of queries (or
    [heads·head_dim, dim], without one), ``k.weight`` [head_dim, dim], ``k_norm``, ``weights.weight`` [heads, dim] (w).
    """

    heads: int
    head_dim: int
    top_k: int
    rope: RoPE | None = None
    norm: Norm = LayerNorm(1e-6)

    def __post_init__(self) -> None:
        if self.rope is not None:
            self.rope.recipe(self.head_dim)

    def __call__(self, x: Value, source: Value) -> Value:
        """Map x [batch, seq, dim], and the input `source` [batch, seq, width] of the query projection, to a bias of
        the scores [batch, 1, seq, seq]: 0 for selected keys, −∞ for all others."""
        q, weights = linear(source, self.heads * self.head_dim, "q"), linear(x, self.heads, "weights")
        k = named(self.norm, "k_norm")(linear(x, self.head_dim, "k"))
        if self.rope is not None:
            q, k = self.rope(q, self.heads, "q_rope"), self.rope(k, 1, "k_rope")
        return ops.lightning_index(q, k, weights, heads=self.heads, top_k=self.top_k, causal=True, name="chosen")


@dataclass(frozen=True, repr=False)
class QKNorm:
    """The norm of queries and keys in an `Attention`: before RoPE, or after RoPE with `after_rope`.

    `over` "head" normalizes each head, with one set of weights for all heads; "each" normalizes each head with separate
    weights; "full" normalizes all heads of a token as one vector.
    """

    norm: Norm
    over: str = "head"
    after_rope: bool = False
    __repr__ = format_module

    def __post_init__(self) -> None:
        check_fields(self)
        need_choice(self, "over", ("head", "each", "full"))


@dataclass(frozen=True, repr=False)
class Gate:
    """A gate of `Attention`: the heads' outputs are multiplied by act(W x) before `sub_norm` and the projection ``o``.

    act is `activation` (sigmoid or softplus). W = ``gate.weight`` has a row per feature, or per head with `by_head`.
    """

    activation: str = "sigmoid"
    by_head: bool = False
    __repr__ = format_module

    def __post_init__(self) -> None:
        need_choice(self, "activation", tuple(GATES))


@dataclass(frozen=True, repr=False)
class Mask:
    """A pattern that masks keys of an `Attention`, in addition to causality and `window` (i: query, j: key position).

    `pattern` states which keys are visible. dense: all; dilated: i − j is divisible by `stride`; strided: |i − j| is
    below `stride` or divisible by it; chunked: i and j are in one block of `stride` positions; fixed: the same, or j is
    one of the last `summary` of its block. Neither pattern nor window masks the first `keep_first` keys (Xiao 2023).
    """

    keep_first: int = 0
    pattern: str = "dense"
    stride: int = 1
    summary: int = 1
    __repr__ = format_module

    def __post_init__(self) -> None:
        check_fields(self)
        need_choice(self, "pattern", PATTERNS)
        fits = self.pattern != "fixed" or self.summary <= self.stride
        need(self, fits, f"summary={self.summary} exceeds stride={self.stride}")


def _merge_qk_norm(norm: Any, old: Mapping[str, Any]) -> Any:
    if norm is None or not any(old.values()):
        return norm
    over = next((over for over in ("full", "each") if old.get(f"qk_norm_{over}")), "head")
    return QKNorm(norm, over, bool(old.get("qk_norm_last")))


def _merge_gate(gate: Any, old: Mapping[str, Any]) -> Gate | bool:
    return Gate(**{name.removeprefix("gate_"): value for name, value in old.items()}) if gate else False


RENAMED: Renamed = {
    "qk_norm": (("qk_norm_full", "qk_norm_each", "qk_norm_last"), _merge_qk_norm),
    "gate": (("gate_activation", "gate_by_head"), _merge_gate),
    "mask": (
        ("keep_first", "pattern", "stride", "summary", "sparse"),
        lambda mask, old: old.get("sparse") or Mask(**{k: v for k, v in old.items() if k != "sparse"}),
    ),
}


@module(renamed=RENAMED)
class Attention:
    """Multi-head, multi-query or grouped-query attention (Vaswani 2017; Shazeer 2019; Ainslie 2023).

    - heads, kv_heads, head_dim: `kv_heads` defaults to `heads`, `head_dim` to dim / heads.
    - v_head_dim, out_dim: widths of a head's values (default `head_dim`) and of the output (default: that of x).
    - rope: rotary positions. temperature: a factor of the queries that grows with their position.
    - bias: a module from (x, heads, causal) to a term of the scores, as `ALiBi`; default: the model's `position_bias`.
    - window: only keys at a distance below `window` are visible. mask: a `Mask`, or without window a `BlockSparse`.
    - causal: None follows the model (a decoder is causal, an encoder by default not).
    - qkv_bias, out_bias: biases of the projections. clip: limit of projected q, k and v to ±clip (OLMo).
    - scale, softcap: factor of the scores (default 1/√head_dim), and their limit softcap · tanh(score / softcap).
    - sinks: a learned extra logit per head in the softmax, without a value (``sinks`` [heads]; gpt-oss).
    - qk_norm: a norm of each head of queries and keys, or a `QKNorm`. v_norm: a norm of each head of values (Gemma 4).
    - sub_norm: a norm before the output projection (Wang 2022, Magneto). gate: a `Gate`, or True for its defaults.
    - keep_kv: name under which keys and values are stored. share_kv: name under which an earlier layer stored the keys
      and values to attend to (Brandon 2024, cross-layer attention; YOCO). Without a window, both share one cache.
    - keys_as_values: the projected keys, before norm and rotation, are the values (Gemma 4).
    - value_conv: the odd number of taps of a convolution of the values over time, with one kernel per head. Its output
      is added to that of the heads; for encoders only (Xiong 2021, Nyströmformer).
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rope: RoPE | None = None
    window: int | None = None
    causal: bool | None = None
    mask: Mask | BlockSparse | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | QKNorm | None = None
    temperature: Temperature | None = None
    clip: float | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: Gate | bool = False
    sub_norm: Norm | None = None
    bias: Layer | None = None
    v_norm: Norm | None = None
    keys_as_values: bool = False
    keep_kv: str | None = None
    share_kv: str | None = None
    out_dim: int | None = None
    v_head_dim: int | None = None
    value_conv: int | None = None

    def __post_init__(self) -> None:
        need(self, self.heads % self.groups == 0, f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        need(self, not self.keys_as_values or self.v_head_dim is None, "keys_as_values needs v_head_dim=None")
        odd = self.value_conv is None or self.value_conv % 2 == 1
        need(self, odd, f"value_conv={self.value_conv} must be odd: a token is in the middle of the kernel")
        need(self, self.value_conv is None or self.groups == self.heads, f"value_conv needs kv_heads={self.heads}")
        conflicts = [name for name in ("window", "softcap", "bias", "causal", "sinks") if getattr(self, name)]
        sparse = isinstance(self.mask, BlockSparse)
        need(self, not sparse or not conflicts, f"mask=BlockSparse does not support {''.join(conflicts[:1])}")
        if self.rope is not None and self.head_dim is not None:
            self.rope.recipe(self.head_dim)

    @property
    def groups(self) -> int:
        """Return the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __call__(self, x: Value, memory: Value | None = None) -> Value:
        """Map x [batch, seq, dim] to [batch, seq, out_dim]; keys and values are projected from `memory` [batch, keys,
        width] if given (cross-attention), else from x."""
        source = x if memory is None else memory
        self_only = (self.bias, self.rope, self.window, self.mask, self.value_conv)
        if memory is not None and any(option is not None for option in self_only):
            raise WeftError("cross-attention does not support bias, rope, window, mask or value_conv: leave them out")
        if provided("routed") is not None and (self.share_kv or self.keep_kv):
            raise WeftError("keep_kv and share_kv need all tokens, but a mixture of depths selects some")
        d = self.head_dim or divide_width(x, self.heads, "heads")
        q, k, v = self._project_qkv(x, source, d)
        if self.keep_kv is not None:
            keep(self.keep_kv, k, v)
        y = self._attend(x, memory, q, k, v)
        if self.value_conv is not None:
            y = ops.add(y, self._convolve(v, self.value_conv), name="with_neighbours")
        if self.gate:
            y = self._apply_gate(y, x, self.gate if isinstance(self.gate, Gate) else Gate())
        if self.sub_norm is not None:
            y = self.sub_norm(y)
        return linear(y, self.out_dim or x.width, "o", self.out_bias)

    def _attend(self, x: Value, memory: Value | None, q: Value, k: Value, v: Value) -> Value:
        """Return the output [batch, seq, heads·v_head_dim] of attention from q to k and v, with masks and bias."""
        if isinstance(self.mask, BlockSparse):
            if provided("position_bias") is not None or provided("chosen") is not None:
                raise WeftError("block-sparse attention does not support a position bias or a choice of keys")
            return self.mask(q, k, v, self.heads, self.groups, self.scale)
        causal = is_causal(self.causal) and memory is None
        mask, scale = provided("key_mask" if memory is None else "memory_mask"), self.scale
        if memory is None and provided("chosen") is not None and self.softcap is None:
            mask, scale = None, 1 / math.sqrt(q.width // self.heads) if scale is None else scale
            q, k = _append_mask_feature(q, k, self.heads, self.groups, _MASKED_SCORE / scale)
        sinks = param("sinks", (self.heads,), fill(0.0)) if self.sinks else None
        attrs = select_attrs(self, ops.attention) | select_attrs(self.mask or Mask(), ops.attention)
        attrs |= {"kv_heads": self.groups, "causal": causal, "scale": scale}
        bias = provided("position_bias") if self.bias is None else self.bias(x, self.heads, causal)
        return ops.attention(*(q, k, v, bias if memory is None else None, mask, sinks), **attrs)

    def _convolve(self, v: Value, taps: int) -> Value:
        """Convolve v [batch, seq, heads·d] over time, with zeros past the sequence ends; padding is not masked."""
        if is_causal(self.causal):
            raise WeftError("value_conv reads later tokens: it belongs in an Encoder")
        kernels = ops.unsqueeze(param("conv.weight", (self.heads, taps)), axes=(1,))
        kernels = ops.expand(kernels, shape=(self.heads, v.width // self.heads, taps))
        weight = ops.reshape(kernels, shape=(v.width, 1, taps), name="kernels")
        return ops.conv1d(v, weight, padding=(taps // 2, taps // 2), groups=v.width, name="convolved")

    def _apply_gate(self, y: Value, x: Value, kind: Gate) -> Value:
        gate = GATES[kind.activation](linear(x, self.heads if kind.by_head else y.width, "gate"))
        if not kind.by_head:
            return ops.mul(y, gate, name="gated")
        split = ops.reshape(y, shape=(*y.shape[:2], self.heads, y.width // self.heads), name="heads_apart")
        return ops.reshape(ops.mul(split, ops.unsqueeze(gate, axes=(3,))), shape=y.shape, name="gated")

    def _project_qkv(self, x: Value, source: Value, d: int) -> tuple[Value, Value, Value]:
        """Return q [batch, seq, heads·d] of x, k [batch, keys, kv_heads·d] and v [batch, keys, kv_heads·v_head_dim] of
        `source`, after norms, rotation and temperature. With `share_kv`, k and v are the stored ones."""
        kv, has_own_kv = self.groups, self.share_kv is None
        projected = {"q": self._project(x, self.heads * d, "q")}
        if has_own_kv:
            projected["k"] = self._project(source, kv * d, "k")
            v = projected["k"] if self.keys_as_values else self._project(source, kv * (self.v_head_dim or d), "v")
            v = v if self.v_norm is None else self._normalize_heads(self.v_norm, v, kv, "v_norm")
        norm = self.qk_norm if isinstance(self.qk_norm, QKNorm | None) else QKNorm(self.qk_norm)
        for step in ("rope", "norm") if norm is not None and norm.after_rope else ("norm", "rope"):
            for name, value in projected.items():
                heads = self.heads if name == "q" else kv
                if step == "rope" and self.rope is not None:
                    projected[name] = self.rope(value, heads, f"{name}_rope")
                elif step == "norm" and norm is not None:
                    projected[name] = self._normalize(norm, value, heads, f"{name}_norm")
        q = projected["q"] if self.temperature is None else self.temperature(projected["q"])
        k, v = (projected["k"], v) if has_own_kv else kept(self.share_kv or "")
        return q, k, v

    def _project(self, x: Value, width: int, name: str) -> Value:
        y = linear(x, width, name, self.qkv_bias)
        return y if self.clip is None else ops.clip(y, low=-self.clip, high=self.clip, name=f"{name}_clipped")

    def _normalize(self, kind: QKNorm, x: Value, heads: int, name: str) -> Value:
        if kind.over == "full":
            return named(kind.norm, name)(x)
        if kind.over == "head":
            return self._normalize_heads(kind.norm, x, heads, name)
        joined = self._normalize_heads(kind.norm.plain(), x, heads, name)
        return ops.mul(joined, param(f"{name}.weight", (x.width,), fill(1.0)), name=f"{name}_scaled")

    def _normalize_heads(self, norm: Norm, x: Value, heads: int, name: str) -> Value:
        """Return x [batch, seq, heads·d] with each head normalized by `norm`; `name` is the scope of its parameters."""
        split = ops.reshape(x, shape=(*x.shape[:2], heads, x.width // heads), name=f"{name}_heads")
        return ops.reshape(named(norm, name)(split), shape=x.shape, name=f"{name}_joined")


def _append_mask_feature(q: Value, k: Value, heads: int, kv_heads: int, mark: float) -> tuple[Value, Value]:
    """Return q [batch, seq, heads·d] and k [batch, seq, kv_heads·d] with one more feature per head, which masks keys.
    It is 1 in queries. In keys it is 0 where the provided ``chosen`` [batch, seq] is true, else `mark`. Thus the key
    cache also records which tokens were chosen."""
    chosen = provided("chosen")
    assert chosen is not None
    by_head = [ops.reshape(x, shape=(*x.shape[:2], n, x.width // n)) for x, n in ((q, heads), (k, kv_heads))]
    ones, zeros = (
        fill_like(ops.slice(x, axis=3, start=0, stop=1), number) for x, number in zip(by_head, (1.0, 0.0), strict=True)
    )
    visible = ops.unsqueeze(chosen, axes=(2, 3), name="seen")
    marks = ones, ops.where(visible, zeros, ops.affine(zeros, plus=mark), name="penalties")
    extended = [ops.concat(x, mark, axis=3) for x, mark in zip(by_head, marks, strict=True)]
    q, k = (ops.reshape(x, shape=(*x.shape[:2], x.shape[2] * x.shape[3])) for x in extended)
    return q, k
