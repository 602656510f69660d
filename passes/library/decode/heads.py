"""Queries, keys and values of a decode step, fused with their norm, products, norms of heads and rotation."""

from __future__ import annotations

import itertools
from typing import Any

from weft.ir import Graph, Param, Value, ops

from ... import Pass, Refusal, Rule, Trace, apply_rules
from ...analysis.states import find_cache_sharers
from ...analysis.tokens.scores import explain_unsupported_scores
from ...edits.pattern import ANY, Pattern, bind_name, capture, either, maybe, value
from .products import LAST_AXIS, NORM, bind_gain, build_product, pack_weights, select

SCORE_ATTRS = "heads", "kv_heads", "window", "keep_first", "scale", "softcap", "pattern", "stride"


def _build_attention(q: Value, k: Value, v: Value | None, **attrs: Any) -> Value:
    """Return a pattern that matches causal attention on the patterns q, k and v, without a mask; `attrs` must match."""
    attrs = capture(*SCORE_ATTRS) | attrs
    return ops.attention(q, k, v, maybe("scores"), None, maybe("sinks"), causal=True, **attrs)


def _rebuild_attention(match: dict[str, Any], q: Value, k: Value, v: Value | None, **attrs: Any) -> Value:
    attrs = select(match, *SCORE_ATTRS) | attrs
    return ops.attention(q, k, v, match.get("scores"), None, match.get("sinks"), causal=True, **attrs)


def _build_rotation(y: Value, name: str) -> Value:
    settings = capture("interleaved", "amplitude")
    return ops.rope(y, value("positions"), value("frequencies"), heads=ANY(f"{name}heads"), **settings)


def _build_head_norm(y: Value, name: str) -> Value:
    by_head = ops.reshape(y, shape=ANY(f"{name}apart"))
    return ops.reshape(ops.rms_norm(by_head, bind_gain(f"{name}norm"), eps=ANY("head_eps")), shape=ANY())


def _build_qkv(is_separate: bool, is_normed: bool, is_rotated: bool) -> Pattern:
    def pattern() -> tuple[Value, ...]:
        if is_separate:
            q, k, v = (build_product(role) for role in ("q_", "k_", "v_"))
        else:
            q, k, v = ops.split.emit(build_product(), sizes=ANY("sizes", length=3), axis=LAST_AXIS)
        for enabled, step in ((is_normed, _build_head_norm), (is_rotated, _build_rotation)):
            q, k = (step(q, "q_"), step(k, "k_")) if enabled else (q, k)
        return _build_attention(q, bind_name("k", k), bind_name("v", v)), k, v

    return Pattern(pattern)


def _fuse_qkv(**match: Any) -> tuple[Value, ...] | Refusal:
    heads, kv_heads = match["heads"], match["kv_heads"]
    if why := explain_unsupported_scores(match.get("scores"), match["pattern"], match["keep_first"], latent=False):
        return Refusal(why)
    readers = {*match["k"].users, *match["v"].users}
    if any(readers != {*find_cache_sharers(reader)} for reader in readers if reader.op is ops.attention):
        return Refusal("its keys or values have other readers besides its cache")
    if (match.get("q_heads", heads), match.get("k_heads", kv_heads)) != (heads, kv_heads):
        return Refusal("its rotations have another number of heads")
    weight_and_bias, sizes = (match.get("weight"), match.get("bias")), match.get("sizes")
    if sizes is None:
        weights, biases = ([match.get(f"{role}_{part}") for role in "qkv"] for part in ("weight", "bias"))
        sizes = tuple(w.shape[0] for w in weights if w is not None)
    d = sizes[0] // heads
    if sizes != (heads * d, kv_heads * d, kv_heads * d):
        return Refusal("heads of queries, keys and values are not equally wide")
    if "head_eps" in match:
        head_shapes = (match[f"{role}apart"][2:] for role in ("q_", "k_"))
        if tuple(head_shapes) != ((heads, d), (kv_heads, d)) or (match["q_norm"] is None) != (match["k_norm"] is None):
            return Refusal("the norms of queries and keys are not both over single heads, with or without weight")
    if match.get("weight") is None:
        pack = pack_weights(weights, biases)
        if isinstance(pack, Refusal):
            return pack
        weight_and_bias = pack
    angles: tuple[Value | None, ...] = (None, None)
    if "positions" in match and match["positions"] is not None:
        angles = ops.rotary_angles.emit(match["positions"], match["frequencies"], amplitude=match["amplitude"])
    norms = select(match, *NORM, "q_norm", "k_norm", "heads", "kv_heads", "interleaved")
    eps = {"head_norm": True, "head_eps": match["head_eps"]} if "head_eps" in match else {}
    q, k, v = ops.norm_qkv.emit(match["x"], *weight_and_bias, cosines=angles[0], sines=angles[1], **norms, **eps)
    return _rebuild_attention(match, q, k, v), k, v


class FuseQkv(Pass):
    """Compute queries, keys and values of an attention from the residual stream by one op: norm_qkv.

    The op normalizes x, multiplies it by the packed weights, and applies RMSNorm and RoPE to the heads of queries and
    keys. A new op rotary_angles computes the cosines and sines. The cache stores keys and values of norm_qkv. Run
    fuse-norm-linear{fold=false} before.

    Condition: q, k and v are products of the same value after the same norm, by weights of modules with one parent or
    by one weight, and all or none have a bias. Their heads are equally wide; queries and keys are both normed or not,
    and both rotated or not. The attention is causal self-attention without a mask, and its only bias may be ALiBi.

    Source: the kernels of a decode step; RoPE: Su 2021 (2104.09864).

    Example fuse-qkv::

        graph example {
          input %x: f32[batch, seq, 4]
          input %positions: i64[batch, seq]
          param %frequencies: f64[1] = rope_frequencies(2, 10000.0)
          param %g: f32[4] = normal([4], std=0.5, stream="g", mean=1.0)
          param %attn.q.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="q")
          param %attn.k.weight: f32[2, 4] = normal([2, 4], std=0.5, stream="k")
          param %attn.v.weight: f32[2, 4] = normal([2, 4], std=0.5, stream="v")
          %q: f32[batch, seq, 4] = norm_linear(%x, %attn.q.weight, _, %g)
          %k: f32[batch, seq, 2] = norm_linear(%x, %attn.k.weight, _, %g)
          %v: f32[batch, seq, 2] = norm_linear(%x, %attn.v.weight, _, %g)
          %q_rope: f32[batch, seq, 4] = rope(%q, %positions, %frequencies, heads=2)
          %k_rope: f32[batch, seq, 2] = rope(%k, %positions, %frequencies, heads=1)
          %y: f32[batch, seq, 4] = attention(%q_rope, %k_rope, %v, heads=2, kv_heads=1, causal=true)
          output y = %y
        }
    """

    name = "fuse-qkv"
    needs = "fuse-norm-linear{fold=false}"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-norm-linear", "fuse-latent", "fuse-embedding")
    on_fused = True
    tradeoff = "angles become values of their own, which fuse-embedding then makes once for all layers"

    def run(self, graph: Graph, trace: Trace) -> None:
        variants = itertools.product(("apart", "packed"), ("normed heads", "heads"), ("rotated", "as they are"))
        rules = [
            Rule(", ".join(words), _build_qkv(*(w in words for w in ("apart", "normed heads", "rotated"))), _fuse_qkv)
            for words in variants
        ]
        apply_rules(graph, rules, trace)


def _allow_reshape(y: Value) -> Value:
    return either(ops.reshape(y, shape=ANY()), y)


def _build_latent_attention() -> tuple[Value, Value]:
    """Return the patterns (output, key) of attention to latents, with W_UKᵀ applied to the queries."""
    plain, rotary = ops.split.emit(_allow_reshape(value("q")), sizes=ANY("q_sizes", length=2), axis=ANY())
    up = ops.head_linear(_allow_reshape(plain), value("weight"), heads=ANY("heads"), inverse=True)
    q = ops.concat(_allow_reshape(up), _allow_reshape(_build_rotation(_allow_reshape(rotary), "q_")), axis=ANY())
    latent, rotary = ops.split.emit(value("latent"), sizes=ANY("sizes", length=2), axis=LAST_AXIS)
    latent = either(ops.rms_norm(latent, bind_gain("norm_weight"), eps=ANY("eps")), latent)
    k = ops.concat(latent, _build_rotation(rotary, "k_"), axis=LAST_AXIS)
    return _build_attention(_allow_reshape(q), k, None, value_dim=ANY("value_dim")), k


def _fuse_latent(**match: Any) -> tuple[Value, ...] | Refusal:
    if why := explain_unsupported_scores(match.get("scores"), match["pattern"], match["keep_first"], latent=True):
        return Refusal(why)
    frequencies, rope = match["frequencies"], match["sizes"][1]
    if rope != 2 * frequencies.shape[-1] or match["q_sizes"][1] != rope or not isinstance(match["weight"], Param):
        return Refusal("queries and keys are not completely rotated by the same frequencies")
    angles = ops.rotary_angles.emit(match["positions"], frequencies, amplitude=match["amplitude"])
    norm = {"kind": "rms", **select(match, "norm_weight", "eps")} if "eps" in match else {"kind": "none"}
    attrs = select(match, "heads", "interleaved")
    q, k = ops.latent_qk.emit(match["q"], match["latent"], match["weight"], *angles, **attrs, **norm)
    return _rebuild_attention(match, q, k, None, value_dim=match["value_dim"]), k


class FuseLatent(Pass):
    """Compute queries against latents, and the key that goes to the cache, by one op: latent_qk.

    The op normalizes the latent, applies RoPE to the rotary features of queries and key, and multiplies the other
    features of the queries by W_UKᵀ (the weights from latents to keys, which mla-absorb moves to the queries).

    Condition: one split separates the latent from the rotary features, which all heads share. The attention is causal
    self-attention without a mask, and its only bias may be ALiBi.

    Source: DeepSeek-V2 (2405.04434), section 2.1.

    Example fuse-latent::

        graph example {
          input %q: f32[batch, seq, 8]
          input %kv: f32[batch, seq, 5]
          input %positions: i64[batch, seq]
          param %frequencies: f64[1] = rope_frequencies(2, 10000.0)
          param %k_up.weight: f32[4, 3] = normal([4, 3], std=0.5, stream="k_up")
          %heads: f32[batch, seq, 2, 4] = reshape(%q, shape=[batch, seq, 2, 4])
          %plain: f32[batch, seq, 2, 2], %rotary: f32[batch, seq, 2, 2] = split(%heads, sizes=[2, 2])
          %plain_flat: f32[batch, seq, 4] = reshape(%plain, shape=[batch, seq, 4])
          %rotary_flat: f32[batch, seq, 4] = reshape(%rotary, shape=[batch, seq, 4])
          %up: f32[batch, seq, 6] = head_linear(%plain_flat, %k_up.weight, heads=2, inverse=true)
          %rotated: f32[batch, seq, 4] = rope(%rotary_flat, %positions, %frequencies, heads=2)
          %up_heads: f32[batch, seq, 2, 3] = reshape(%up, shape=[batch, seq, 2, 3])
          %rotated_heads: f32[batch, seq, 2, 2] = reshape(%rotated, shape=[batch, seq, 2, 2])
          %both: f32[batch, seq, 2, 5] = concat(%up_heads, %rotated_heads, axis=3)
          %queries: f32[batch, seq, 10] = reshape(%both, shape=[batch, seq, 10])
          %c: f32[batch, seq, 3], %k_rotary: f32[batch, seq, 2] = split(%kv, sizes=[3, 2])
          %k_rope: f32[batch, seq, 2] = rope(%k_rotary, %positions, %frequencies, heads=1)
          %key: f32[batch, seq, 5] = concat(%c, %k_rope, axis=2)
          %y: f32[batch, seq, 6] = attention(%queries, %key, heads=2, kv_heads=1, causal=true, value_dim=3, scale=0.5)
          output y = %y
        }
    """

    name = "fuse-latent"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("mla-absorb", "fuse-qkv")
    on_fused = True
    tradeoff = "angles become values of their own, which fuse-embedding then makes once for all layers"

    def run(self, graph: Graph, trace: Trace) -> None:
        apply_rules(graph, [Rule(self.name, Pattern(_build_latent_attention), _fuse_latent)], trace)
