"""Projections to queries, keys and values fused with norms and RoPE, and the cosines and sines of RoPE."""

from __future__ import annotations

from ...op import Trait, Value, case, ints, normal, require
from ..declaration import fused_op
from ..elementwise import cast, cos, sin
from ..latent import head_linear
from ..norm import rms_norm
from ..rotary import rotate_pairs
from ..tensor import concat, reshape, split, unsqueeze
from .norm_linear import apply_norm, norm_linear

_ANGLES = normal(2, 3, 2), normal(2, 3, 2)


@fused_op(
    outputs="cos sin", cases=[case(ints(2, 3, high=9), normal(4)), case(ints(2, 3, high=9), normal(2), amplitude=1.3)]
)
def rotary_angles(positions: Value, frequencies: Value, *, amplitude: float = 1.0) -> tuple[Value, Value]:
    """(amplitude · cos θ, amplitude · sin θ) [batch, seq, pairs], θ = positions [batch, seq] · frequencies [pairs]."""
    angles = unsqueeze(cast(positions, to=frequencies.type.dtype), axes=(2,)) * frequencies
    cosines, sines = (f(angles) * amplitude for f in (cos, sin))
    return cosines, sines


def _rotate_heads(x: Value, cosines: Value | None, sines: Value | None, heads: int, interleaved: bool) -> Value:
    if cosines is None or sines is None:
        return x
    angles = unsqueeze(cosines, axes=(2,)), unsqueeze(sines, axes=(2,))
    return rotate_pairs(x, *angles, heads=heads, interleaved=interleaved)


@fused_op(
    outputs="q k v",
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 3, 8), normal(32, 8), None, normal(8), None, None, None, *_ANGLES, heads=4, kv_heads=2),
        case(normal(2, 3, 8), normal(32, 8), normal(32), normal(8), normal(8), heads=4, kv_heads=2, kind="layer"),
        case(
            *(normal(2, 3, 8), normal(24, 8), None, None, None, normal(4), normal(4), *_ANGLES),
            **{"heads": 2, "kv_heads": 2, "kind": "none", "head_norm": True, "head_eps": 1e-2, "interleaved": True},
        ),
    ],
)
def norm_qkv(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    norm_weight: Value | None = None,
    norm_bias: Value | None = None,
    q_norm: Value | None = None,
    k_norm: Value | None = None,
    cosines: Value | None = None,
    sines: Value | None = None,
    *,
    heads: int,
    kv_heads: int,
    kind: str = "rms",
    eps: float = 1e-6,
    head_norm: bool = False,
    head_eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Value, ...]:
    """RoPE(q_norm(q)), RoPE(k_norm(k)) and v, with [q, k, v] = norm(x) Wᵀ + b (Vaswani 2017; RoPE: Su 2021).

    x [batch, seq, in]; weight [(heads + 2·kv_heads)·d, in] and bias [(heads + 2·kv_heads)·d] have the rows of the query
    heads, then the key heads, then the value heads → q [batch, seq, heads·d], k and v [batch, seq, kv_heads·d]. The
    norm of x (`kind`, `eps`, norm_weight, norm_bias) is that of `norm_linear`. With `head_norm` q and k are RMS-normed
    per head, with weights q_norm and k_norm [d] and `head_eps`; without it there is no such norm. cosines and sines
    [batch, seq, pairs] rotate pairs as in `rope` (see `rotary_angles`); without them nothing is rotated.
    """
    qkv = norm_linear(x, weight, bias, norm_weight, norm_bias, kind=kind, eps=eps)
    d = qkv.width // (heads + 2 * kv_heads)
    require(qkv.width == (heads + 2 * kv_heads) * d, f"weight {weight.type} has no {heads} + 2·{kv_heads} equal heads")
    q, k, v = split.emit(qkv, sizes=(heads * d, kv_heads * d, kv_heads * d))
    rotated = []
    for y, gain, count in ((q, q_norm, heads), (k, k_norm, kv_heads)):
        if head_norm:
            by_head = reshape(y, shape=(*y.shape[:2], count, d))
            y = reshape(rms_norm(by_head, gain, eps=head_eps), shape=y.shape)
        rotated.append(_rotate_heads(y, cosines, sines, count, interleaved))
    return *rotated, v


@fused_op(
    outputs="q k",
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 3, 14), normal(2, 3, 9), normal(6, 5), *_ANGLES, normal(5), heads=2),
        case(normal(2, 3, 14), normal(2, 3, 9), normal(6, 5), *_ANGLES, heads=2, kind="none", interleaved=True),
    ],
)
def latent_qk(
    q: Value,
    latent: Value,
    weight: Value,
    cosines: Value,
    sines: Value,
    norm_weight: Value | None = None,
    *,
    heads: int,
    kind: str = "rms",
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Value, Value]:
    """Queries [W_hᵀ q_plain, RoPE(q_rope)] for every head h, and the key [norm(c), RoPE(k_rope)] (DeepSeek-V2, 2024).

    q [batch, seq, heads·(plain + rope)] is [q_plain, q_rope] per head, latent [batch, seq, rank + rope] is [c, k_rope].
    weight [heads·plain, rank] projects latents to keys: W_h is its rows for head h. The norm of c is that of
    `norm_linear` with norm_weight [rank]. cosines and sines [batch, seq, rope/2] rotate pairs as in `rope` → q [batch,
    seq, heads·(rank + rope)] and k [batch, seq, rank + rope].
    """
    (batch, seq, _), rope, rank = q.shape, 2 * cosines.width, weight.width
    plain = q.width // heads - rope
    q_plain, q_rope = split.emit(reshape(q, shape=(batch, seq, heads, plain + rope)), sizes=(plain, rope))
    absorbed = head_linear(reshape(q_plain, shape=(batch, seq, heads * plain)), weight, heads=heads, inverse=True)
    q_rope = _rotate_heads(reshape(q_rope, shape=(batch, seq, heads * rope)), cosines, sines, heads, interleaved)
    parts = (reshape(y, shape=(batch, seq, heads, width)) for y, width in ((absorbed, rank), (q_rope, rope)))
    c, k_rope = split.emit(latent, sizes=(rank, rope))
    key = concat(
        apply_norm(c, norm_weight, None, kind, eps), _rotate_heads(k_rope, cosines, sines, 1, interleaved), axis=2
    )
    return reshape(concat(*parts, axis=3), shape=(batch, seq, heads * (rank + rope))), key
