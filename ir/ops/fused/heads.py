"""Queries, keys and values of a decode step, as attention takes them; the angles of their rotations."""

from __future__ import annotations

from ...op import Trait, Value, case, ints, normal, want
from ..declaration import fused
from ..elementwise import affine, cast, cos, mul, sin
from ..latent import head_linear
from ..norm import rms_norm
from ..rotary import turned
from ..tensor import concat, reshape, split, unsqueeze
from .products import norm_linear, normed

_ANGLES = normal(2, 3, 2), normal(2, 3, 2)


@fused(
    outputs="cos sin",
    cases=[case(ints(2, 3, high=9), normal(4)), case(ints(2, 3, high=9), normal(2), amplitude=1.3)],
)
def rotary_angles(positions: Value, frequencies: Value, *, amplitude: float = 1.0) -> tuple[Value, Value]:
    """amplitude · cos and sin of positions [batch, seq] · frequencies [pairs] → [batch, seq, pairs] each."""
    angles = mul(unsqueeze(cast(positions, to=frequencies.type.dtype), axes=(2,)), frequencies)
    cosines, sines = (affine(f(angles), by=amplitude) for f in (cos, sin))
    return cosines, sines


def _rotated(x: Value, cosines: Value | None, sines: Value | None, heads: int, interleaved: bool) -> Value:
    if cosines is None or sines is None:
        return x
    angles = unsqueeze(cosines, axes=(2,)), unsqueeze(sines, axes=(2,))
    return turned(x, *angles, heads=heads, interleaved=interleaved)


@fused(
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

    x [batch, seq, in]; weight [(heads + 2·kv_heads)·d, in] and bias with the heads of queries first, then of keys, then
    of values → q [batch, seq, heads·d], k and v [batch, seq, kv_heads·d], which go to the cache of the attention that
    reads them. The norm of x as in `norm_linear`; with `head_norm` q and k are RMS-normed on every head, q_norm and
    k_norm [d] are the weights. cosines and sines [batch, seq, pairs] turn pairs as in `rope`; absent, nothing turns.
    """
    both = norm_linear(x, weight, bias, norm_weight, norm_bias, kind=kind, eps=eps)
    d = both.width // (heads + 2 * kv_heads)
    want(both.width == (heads + 2 * kv_heads) * d, f"weight {weight.type} has no {heads} + 2·{kv_heads} equal heads")
    q, k, v = split.emit(both, sizes=(heads * d, kv_heads * d, kv_heads * d))
    found = []
    for y, gain, count in ((q, q_norm, heads), (k, k_norm, kv_heads)):
        if head_norm:
            apart = reshape(y, shape=(*y.shape[:2], count, d))
            y = reshape(rms_norm(apart, gain, eps=head_eps), shape=y.shape)
        found.append(_rotated(y, cosines, sines, count, interleaved))
    return *found, v


@fused(
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
    """[W_hᵀ q_plain, RoPE(q_rope)] of every head h, and the key [norm(c), RoPE(k_rope)] (DeepSeek-V2, 2024).

    q [batch, seq, heads·(plain + rope)], latent [c, k_rope] [batch, seq, rank + rope], weight [heads·plain, rank],
    which makes keys of latents; the norm is of c, norm_weight [rank]. cosines and sines [batch, seq, rope/2] turn pairs
    as in `rope` → q [batch, seq, heads·(rank + rope)] and k [batch, seq, rank + rope].
    """
    (batch, seq, _), rope, rank = q.shape, 2 * cosines.width, weight.width
    plain = q.width // heads - rope
    first, turns = split.emit(reshape(q, shape=(batch, seq, heads, plain + rope)), sizes=(plain, rope))
    absorbed = head_linear(reshape(first, shape=(batch, seq, heads * plain)), weight, heads=heads, inverse=True)
    turns = _rotated(reshape(turns, shape=(batch, seq, heads * rope)), cosines, sines, heads, interleaved)
    parts = (reshape(y, shape=(batch, seq, heads, width)) for y, width in ((absorbed, rank), (turns, rope)))
    c, k_rope = split.emit(latent, sizes=(rank, rope))
    key = concat(normed(c, norm_weight, None, kind, eps), _rotated(k_rope, cosines, sines, 1, interleaved), axis=2)
    return reshape(concat(*parts, axis=3), shape=(batch, seq, heads * (rank + rope))), key
