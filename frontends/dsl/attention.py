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
from weft.ir.schema.visible_blocks import VisibleBlocks
from weft.ir.schema.visible_keys import PATTERNS

from .build import Layer, Renamed, fill, format_module, keep, kept, module, named, param, provided, select_attrs
from .checks import need, need_choice, need_finite, need_int, need_max, need_modules, need_positive, need_type
from .layers import LayerNorm, Norm, divide_width, is_causal, linear
from .rotary import RoPE, Temperature

GATES = {"sigmoid": ops.sigmoid, "softplus": ops.softplus}
_MASKED_SCORE = -1e3  # the score of a hidden key, which softmax maps to 0


@module(leaf=True)
class BlockSparse:
    """Block-sparse attention with blocks of `block` tokens: the `mask` of an `Attention` in an encoder.

    Visible to a block are itself, `sides` blocks on each side, and the `first` first and `last` last blocks, whose own
    queries see all keys (Child 2019; Zaheer 2020, BigBird). Keys of the first blocks count `first_weight` times, and
    sequences of at most `dense` tokens use dense attention, as in the op `block_sparse_attention`.
    """

    block: int
    sides: int = 1
    first: int = 1
    last: int = 1
    first_weight: int = 1
    dense: int = 0

    def __post_init__(self) -> None:
        need_int(self, "block", "first_weight")
        need_int(self, "sides", "first", "last", "dense", least=0)
        need_max(self, "sides", "first", "last")  # a block gathers the keys of all of them
        problem = VisibleBlocks.from_attrs(vars(self)).find_problem()
        need(self, problem is None, problem or "")

    def __call__(self, q: Value, k: Value, v: Value, heads: int, kv_heads: int, scale: float | None = None) -> Value:
        """Map q [batch, seq, heads·d], k and v [batch, seq, kv_heads·d] to [batch, seq, heads·d]."""
        if is_causal():
            raise WeftError("block-sparse attention sees what follows: it belongs in an Encoder")
        attrs = select_attrs(self, ops.block_sparse_attention)
        attrs |= {"heads": heads, "kv_heads": kv_heads, "scale": scale}
        return ops.block_sparse_attention(q, k, v, provided("key_mask"), **attrs)


@module
class LightningIndex:
    """A selection of keys for each query: a field `index` of `MLA` (DeepSeek-V3.2, 2025: DeepSeek sparse attention).

    The `top_k` keys with the largest scores Σ_h w_h · max(q_h·k, 0) are selected, as in the op `lightning_index`. The
    scores have no scale, because it would not change the selection. `rope` rotates queries and keys. Parameters:
    ``q.weight`` [heads·head_dim, q_rank or dim], applied to the input of the attention's query projection, ``k.weight``
    [head_dim, dim], ``k_norm``, and ``weights.weight`` [heads, dim] for w.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: RoPE | None = None
    norm: Norm = LayerNorm(1e-6)

    def __post_init__(self) -> None:
        need_int(self, "heads", "head_dim", "top_k")
        need_max(self, "heads")
        need_type(self, "rope", RoPE)
        need_modules(self, "norm")
        if self.rope is not None:
            self.rope.recipe(self.head_dim)

    def __call__(self, x: Value, source: Value) -> Value:
        """Map x [batch, seq, dim] and the queries' `source` [batch, seq, width] to a bias [batch, 1, seq, seq].

        It is −∞ for keys that are not selected.
        """
        q, weights = linear(source, self.heads * self.head_dim, "q"), linear(x, self.heads, "weights")
        k = named(self.norm, "k_norm")(linear(x, self.head_dim, "k"))
        if self.rope is not None:
            q, k = self.rope(q, self.heads, "q_rope"), self.rope(k, 1, "k_rope")
        return ops.lightning_index(q, k, weights, heads=self.heads, top_k=self.top_k, causal=True, name="chosen")


@dataclass(frozen=True, repr=False)
class QKNorm:
    """The norm of queries and keys.

    `norm` normalizes every head with the same weights (`over` "head") or with weights of its own ("each"), or all heads
    of a token together ("full"); before RoPE, or after it with `after_rope`.
    """

    norm: Norm
    over: str = "head"
    after_rope: bool = False
    __repr__ = format_module

    def __post_init__(self) -> None:
        need_modules(self, "norm")
        need_choice(self, "over", ("head", "each", "full"))


@dataclass(frozen=True, repr=False)
class Gate:
    """A gate of attention: its output is multiplied by act(x W) before the output projection, with act `activation`.

    The gate has a value per feature, or one per head with `by_head`.
    """

    activation: str = "sigmoid"
    by_head: bool = False
    __repr__ = format_module

    def __post_init__(self) -> None:
        need_choice(self, "activation", tuple(GATES))


@dataclass(frozen=True, repr=False)
class Mask:
    """The keys that an attention sees besides its window, as the attributes of the op `attention`."""

    keep_first: int = 0
    pattern: str = "dense"
    stride: int = 1
    summary: int = 1
    __repr__ = format_module

    def __post_init__(self) -> None:
        need_int(self, "stride", "summary")
        need_int(self, "keep_first", least=0)
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

    - heads, kv_heads, head_dim: `kv_heads` defaults to `heads`, `head_dim` to width / heads; `v_head_dim` is the width
      of a head's values, by default `head_dim`, and `out_dim` the width of the output, by default that of x.
    - rope, temperature, bias: rotary positions; a factor of the queries that grows with their position; a term of the
      scores (ALiBi, T5Bias, or a module of x, heads and causal), by default the model's `position_bias`.
    - window, causal, mask: at most `window` keys are visible; `causal` None follows the model (a decoder is causal, an
      encoder is not); `mask` is a further pattern, or a `BlockSparse` in encoders.
    - qkv_bias, out_bias: biases of the projections. `clip` limits projected queries, keys and values to ±clip (OLMo).
    - scale, softcap, sinks: `scale` of the scores, by default 1/√head_dim, their cap, and a learned logit per head.
    - qk_norm, v_norm, sub_norm: norms of queries and keys, by a norm per head or a `QKNorm`; of values per head
      (Gemma 4); of the input of the output projection (Wang 2022, Magneto).
    - gate: a `Gate`, or True for its defaults.
    - keep_kv, share_kv: `keep_kv` stores keys and values under a name, `share_kv` attends to those of an earlier layer
      (Brandon 2024, cross-layer attention; YOCO): without a window, both share one cache.
    - keys_as_values: the projected keys, before norm and rotation, are the values (Gemma 4).
    - value_conv: in encoders, adds a convolution of the values over time with that number of taps and one kernel per
      head (Xiong 2021, Nyströmformer).
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
        need_int(self, "heads", "kv_heads", "head_dim", "window", "out_dim", "v_head_dim")
        need_max(self, "heads", "kv_heads")
        need(self, self.heads % self.groups == 0, f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        need_positive(self, "clip", "softcap")
        need_finite(self, "scale")
        need(self, not self.keys_as_values or self.v_head_dim is None, "keys_as_values excludes v_head_dim")
        need_type(self, "rope", RoPE)
        need_type(self, "temperature", Temperature)
        need_type(self, "mask", Mask, BlockSparse)
        need_type(self, "gate", Gate, bool)
        if not isinstance(self.qk_norm, QKNorm):
            need_modules(self, "qk_norm")
        need_modules(self, "sub_norm", "v_norm", "bias")
        need_int(self, "value_conv")
        odd = self.value_conv is None or self.value_conv % 2 == 1
        need(self, odd, f"value_conv={self.value_conv} must be odd: it sees as much on both sides")
        need(self, self.value_conv is None or self.groups == self.heads, "value_conv needs values of every head")
        conflicts = [name for name in ("window", "softcap", "bias", "causal", "sinks") if getattr(self, name)]
        sparse = isinstance(self.mask, BlockSparse)
        need(self, not sparse or not conflicts, f"mask=BlockSparse and {''.join(conflicts[:1])} exclude each other")
        if self.rope is not None and self.head_dim is not None:
            self.rope.recipe(self.head_dim)

    @property
    def groups(self) -> int:
        """Return the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __call__(self, x: Value, memory: Value | None = None) -> Value:
        """Map x [batch, seq, dim] to [batch, seq, out_dim]; keys and values come from `memory` [batch, keys, width], if
        given, else from x."""
        source = x if memory is None else memory
        self_only = (self.bias, self.rope, self.window, self.mask, self.value_conv)
        if memory is not None and any(option is not None for option in self_only):
            raise WeftError("bias, rope, window, mask and value_conv are for self-attention: cross-attention has none")
        if provided("routed") is not None and (self.share_kv or self.keep_kv):
            raise WeftError("keep_kv and share_kv do not work inside mixture of depths, which selects tokens")
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
        """Emit the attention op: map q, k and v [batch, seq or keys, heads·d] to [batch, seq, heads·d]."""
        if isinstance(self.mask, BlockSparse):
            if provided("position_bias") is not None or provided("chosen") is not None:
                raise WeftError("block-sparse attention has no position bias and sees all tokens of its blocks")
            return self.mask(q, k, v, self.heads, self.groups, self.scale)
        causal = is_causal(self.causal) and memory is None
        mask, scale = provided("key_mask" if memory is None else "memory_mask"), self.scale
        if memory is None and provided("chosen") is not None and self.softcap is None:
            mask, scale = None, 1 / math.sqrt(q.width // self.heads) if scale is None else scale
            q, k = _append_mask_feature(q, k, self.heads, self.groups, _MASKED_SCORE / scale)
        sinks = param("sinks", (self.heads,), fill(0.0)) if self.sinks else None
        attrs = select_attrs(self, ops.attention) | select_attrs(self.mask or Mask(), ops.attention)
        attrs |= {"kv_heads": self.groups, "causal": causal, "scale": scale}
        return ops.attention(
            *(q, k, v, self._compute_bias(x, causal) if memory is None else None, mask, sinks), **attrs
        )

    def _convolve(self, v: Value, taps: int) -> Value:
        """Convolve v [batch, seq, heads·d] over time, with zeros past the sequence ends; padding is not masked."""
        if is_causal(self.causal):
            raise WeftError("value_conv sees what follows: it belongs in an Encoder")
        kernels = ops.unsqueeze(param("conv.weight", (self.heads, taps)), axes=(1,))
        kernels = ops.expand(kernels, shape=(self.heads, v.width // self.heads, taps))
        weight = ops.reshape(kernels, shape=(v.width, 1, taps), name="kernels")
        return ops.conv1d(v, weight, padding=(taps // 2, taps // 2), groups=v.width, name="convolved")

    def _apply_gate(self, y: Value, x: Value, kind: Gate) -> Value:
        """Multiply y [batch, seq, heads·d] by the gates computed from x."""
        gate = GATES[kind.activation](linear(x, self.heads if kind.by_head else y.width, "gate"))
        if not kind.by_head:
            return ops.mul(y, gate, name="gated")
        split = ops.reshape(y, shape=(*y.shape[:2], self.heads, y.width // self.heads), name="heads_apart")
        return ops.reshape(ops.mul(split, ops.unsqueeze(gate, axes=(3,))), shape=y.shape, name="gated")

    def _compute_bias(self, x: Value, causal: bool) -> Value | None:
        return provided("position_bias") if self.bias is None else self.bias(x, self.heads, causal)

    def _project_qkv(self, x: Value, source: Value, d: int) -> tuple[Value, Value, Value]:
        """Return queries, keys and values [batch, seq or keys, heads·d], normalized and rotated; keys are made from
        `source`."""
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
    """Return q [batch, seq, heads·d] and k [batch, seq, kv_heads·d] with one more feature per head.

    It is 1 in queries; in keys it is `mark` for tokens that are not in the provided ``chosen`` [batch, seq], else 0. So
    the key cache records the chosen tokens.
    """
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
