"""Softmax attention and rotary positions."""

from __future__ import annotations

import math

import numpy as np

from .. import sizes
from ..op import Array, Size, TensorType, Trait, Value, case, ints, normal, op, want

PATTERNS = ("dense", "dilated", "strided", "fixed", "chunked")


def allowed(
    query: Array, key: Array, *, causal: bool, window: int | None, pattern: str, stride: int, summary: int
) -> Array:
    """Which query position may see which key position (broadcast), by the attributes of `attention`."""
    distance = query - key
    seen = distance >= 0 if causal else np.ones(distance.shape, bool)
    if window is not None:
        seen &= np.abs(distance) < window
    if pattern == "dilated":
        seen &= distance % stride == 0
    elif pattern == "strided":
        seen &= (np.abs(distance) < stride) | (distance % stride == 0)
    elif pattern == "fixed":
        seen &= (query // stride == key // stride) | (key % stride >= stride - summary)
    elif pattern == "chunked":
        seen &= query // stride == key // stride
    return seen


_QKV = (normal(2, 12, 32), normal(2, 12, 16), normal(2, 12, 16))
_GQA = {"heads": 4, "kv_heads": 2}
_CACHE = (normal(2, 2, 20, 8), normal(2, 2, 20, 8), np.array([[5, 6, 7], [9, 10, 11]]))
_STEP = (normal(2, 3, 32), normal(2, 3, 16), normal(2, 3, 16))


@op(
    outputs="attention present_k present_v",
    cases=[
        case(*_QKV, **_GQA, causal=True),
        case(*_QKV, **_GQA),
        case(normal(2, 12, 32), normal(2, 12, 32), normal(2, 12, 24), heads=4, kv_heads=4, causal=True, scale=0.2),
        case(normal(2, 5, 32), normal(2, 9, 8), normal(2, 9, 8), heads=4, kv_heads=1),
        case(*_QKV, **_GQA, causal=True, window=5, softcap=2.0),
        case(*_QKV, normal(1, 4, 12, 12), **_GQA, causal=True),
        case(*_QKV, None, np.arange(24).reshape(2, 12) % 12 < [[9], [12]], **_GQA),
        case(*_QKV, None, None, normal(4), **_GQA, causal=True),
        *(
            case(*_QKV, **_GQA, causal=True, pattern=p, stride=4, summary=1)
            for p in ("dilated", "strided", "fixed", "chunked")
        ),
        case(*_QKV, **_GQA, causal=True, window=8, pattern="dilated", stride=2),
        case(*_STEP, None, None, None, *_CACHE, **_GQA, causal=True),
        case(*_STEP, None, None, None, *_CACHE, **_GQA, causal=True, window=6, scale=0.3),
        case(*_STEP, None, None, normal(4), *_CACHE, **_GQA, causal=True, window=16, rolling=True),
    ],
)
def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    key_mask: Array | None = None,
    sinks: Array | None = None,
    past_k: Array | None = None,
    past_v: Array | None = None,
    positions: Array | None = None,
    *,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    pattern: str = "dense",
    stride: int = 1,
    summary: int = 1,
    rolling: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """softmax(scale · q kᵀ + bias + mask) v per head (Vaswani 2017; grouped heads: Shazeer 2019, Ainslie 2023).

    q [batch, seq, heads·d], k [batch, keys, kv_heads·d], v [batch, keys, kv_heads·dv] → y [batch, seq, heads·dv]; query
    head h reads KV head ⌊h·kv_heads/heads⌋. `scale` defaults to 1/√d. Scores are softcap·tanh(score/softcap) if
    `softcap` is set, before `bias` (broadcast to [batch, heads, seq, keys]) is added. A key is seen where `key_mask`
    [batch, keys] is not 0 and the attributes allow: `causal` i ≥ j; `window` |i − j| < window; `pattern`: dilated
    (i − j divisible by `stride`), strided (i − j < stride or divisible by it; Child 2019), fixed (the same block of
    `stride`, or the last `summary` of any block; Child 2019), chunked (the same block). `sinks` [heads] adds a key of
    that score with value 0. A row that sees nothing is 0.

    With a cache — `past_k` [batch, kv_heads, capacity, d], `past_v` [batch, kv_heads, capacity, dv], `positions`
    [batch, seq], consecutive in each row — slot j holds the key of position j, those below positions[b, 0] are valid,
    and the keys of this call are written at their positions; present_k, present_v are the updated caches. `rolling`:
    slot j mod capacity instead (window ≤ capacity). `key_mask` and `bias` then index keys by position.
    """
    batch, seq, _ = q.shape
    group = heads // kv_heads
    d = q.shape[-1] // heads
    qh = q.reshape(batch, seq, kv_heads, group, d)
    kh = k.reshape(batch, -1, kv_heads, d).transpose(0, 2, 1, 3)
    vh = v.reshape(batch, kh.shape[2], kv_heads, -1).transpose(0, 2, 1, 3)
    key_at = np.arange(kh.shape[2])[None]
    query_at = np.arange(seq)[None]
    fresh = (kh, vh)
    valid = np.ones((1, kh.shape[2]), bool)
    if past_k is not None and past_v is not None and positions is not None:
        capacity = past_k.shape[2]
        first = positions[:, :1]
        slot = np.arange(capacity)[None]
        past_at = (first - 1) - (first - 1 - slot) % capacity if rolling else slot + 0 * first
        valid = np.concatenate([(past_at >= 0) & (past_at < first), np.ones_like(positions, bool)], 1)
        key_at, query_at = np.concatenate([past_at, positions], 1), positions
        kh, vh = np.concatenate([past_k, kh], 2), np.concatenate([past_v, vh], 2)
    scores = np.einsum("bsngd,bntd->bngst", qh, kh) * (1 / math.sqrt(d) if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores.reshape(batch, heads, seq, -1)
    reach = np.clip(key_at, 0, None)
    if bias is not None:
        if past_k is not None:
            full = np.broadcast_to(bias, (batch, *bias.shape[1:]))
            bias = np.stack([np.take(full[b], reach[b].clip(max=bias.shape[3] - 1), 2) for b in range(batch)])
        scores = scores + bias
    seen = valid[:, None] & allowed(
        query_at[:, :, None],
        key_at[:, None],
        causal=causal,
        window=window,
        pattern=pattern,
        stride=stride,
        summary=summary,
    )
    if key_mask is not None:
        rows = np.broadcast_to(key_mask != 0, (batch, key_mask.shape[1]))
        inside = reach < key_mask.shape[1]
        picked = np.take_along_axis(
            rows, np.broadcast_to(reach.clip(max=key_mask.shape[1] - 1), (batch, reach.shape[1])), 1
        )
        seen = seen & (picked & inside)[:, None]
    scores = np.where(seen[:, None], scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks[None, :, None, None], (batch, heads, seq, 1))
        scores = np.concatenate([scores, sink], -1)
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    weights = np.divide(e, total, out=np.zeros_like(e), where=total > 0)[..., : vh.shape[2]]
    mixed = np.einsum("bngst,bntd->bsngd", weights.reshape(batch, kv_heads, group, seq, -1), vh)
    y: Array = mixed.reshape(batch, seq, -1)
    if past_k is None or past_v is None or positions is None:
        return y
    present = []
    for past, new in zip((past_k, past_v), fresh, strict=True):
        updated = past.copy()
        for b in range(batch):
            slots = positions[b] % past.shape[2] if rolling else positions[b]
            updated[b][:, slots] = new[b]
        present.append(updated)
    return y, present[0], present[1]


@attention.infer
def _(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    bias: TensorType | None = None,
    key_mask: TensorType | None = None,
    sinks: TensorType | None = None,
    past_k: TensorType | None = None,
    past_v: TensorType | None = None,
    positions: TensorType | None = None,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    pattern: str,
    stride: int,
    summary: int,
    rolling: bool,
) -> tuple[TensorType, ...]:
    want(q.rank == k.rank == v.rank == 3, f"q {q}, k {k} and v {v} must be [batch, seq, heads·d]")
    want(heads > 0 and kv_heads > 0 and heads % kv_heads == 0, f"heads={heads} is no multiple of kv_heads={kv_heads}")
    widths = []
    for t, n, what in ((q, heads, "heads"), (k, kv_heads, "kv_heads"), (v, kv_heads, "kv_heads")):
        width = t.shape[2]
        want(isinstance(width, int) and width % n == 0, f"the width of {t} is no multiple of {what}={n}")
        widths.append(sizes.floordiv(width, n))
    want(widths[0] == widths[1], f"q {q} and k {k} have head sizes {widths[0]} and {widths[1]}")
    want(k.shape[:2] == v.shape[:2] and q.shape[0] == k.shape[0], f"q {q}, k {k} and v {v} do not belong together")
    want(pattern in PATTERNS, f"pattern={pattern!r} is none of {', '.join(PATTERNS)}")
    want(stride >= 1 and summary >= 1, f"stride={stride} and summary={summary} must be positive")
    want(window is None or window >= 1, f"window={window} must be positive")
    want(bias is None or bias.rank == 4, f"bias {bias} must have four axes")
    want(key_mask is None or key_mask.rank == 2, f"key_mask {key_mask} must be [batch, keys]")
    want(sinks is None or sinks.shape == (heads,), f"sinks {sinks} must be [{heads}]")
    y = q.with_shape(q.shape[0], q.shape[1], widths[2] * heads)
    cache = (past_k, past_v, positions)
    if past_k is None or past_v is None or positions is None:
        want(all(t is None for t in cache), "past_k, past_v and positions go together")
        return (y,)
    want(q.shape[1] == k.shape[1], f"with a cache q {q} and k {k} must be equally long")
    for past, width, what in ((past_k, widths[1], "past_k"), (past_v, widths[2], "past_v")):
        fits = past.rank == 4 and past.shape[:2] == (q.shape[0], kv_heads) and past.shape[3] == width
        want(fits, f"{what} {past} must be [batch, {kv_heads}, capacity, {width}]")
    want(past_k.shape[2] == past_v.shape[2], f"past_k {past_k} and past_v {past_v} differ in capacity")
    want(positions.shape == q.shape[:2], f"positions {positions} must be [batch, seq]")
    return y, past_k, past_v


@attention.cost
def _(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    bias: TensorType | None = None,
    key_mask: TensorType | None = None,
    sinks: TensorType | None = None,
    past_k: TensorType | None = None,
    past_v: TensorType | None = None,
    positions: TensorType | None = None,
    *,
    heads: int,
    kv_heads: int,
    window: int | None,
    **attrs: object,
) -> Size:
    keys = past_k.shape[2] if past_k is not None else k.shape[1]
    reached = keys if window is None else sizes.minimum(window, keys)
    dims = sizes.floordiv(q.shape[2], heads) + sizes.floordiv(v.shape[2], kv_heads)
    return q.shape[0] * q.shape[1] * reached * heads * (dims * 2 + 5)


def rotate(x: Array, angles: Array, *, heads: int, interleaved: bool, amplitude: float) -> Array:
    """The rotation that `rope` defines; `angles` [batch, seq, pairs]."""
    batch, seq, width = x.shape
    xh = x.reshape(batch, seq, heads, width // heads)
    pairs = angles.shape[-1]
    cos, sin = amplitude * np.cos(angles)[:, :, None], amplitude * np.sin(angles)[:, :, None]
    turned = xh[..., : 2 * pairs]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    pair = [a * cos - b * sin, b * cos + a * sin]
    mixed = np.stack(pair, -1).reshape(turned.shape) if interleaved else np.concatenate(pair, -1)
    return np.concatenate([mixed, xh[..., 2 * pairs :]], -1).reshape(x.shape)


@op(
    traits=[Trait.ROWWISE],
    cases=[
        case(normal(2, 5, 32), ints(2, 5, high=900), normal(4), heads=4),
        case(normal(2, 5, 32), ints(2, 5, high=900), normal(4), heads=4, interleaved=True),
        case(normal(2, 5, 48), ints(2, 5, high=900), normal(4), heads=4, amplitude=1.3),
    ],
)
def rope(
    x: Array,
    positions: Array,
    frequencies: Array,
    *,
    heads: int,
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> Array:
    """Rotary positions (Su 2021): pair k of every head turned by positions·frequencies[k] radians.

    x [batch, seq, heads·d], positions [batch, seq], frequencies [pairs], 2·pairs ≤ d (the rest of each head passes
    through). Pair k is elements (k, k + pairs), or (2k, 2k + 1) if `interleaved`. `amplitude` multiplies the rotated
    part (YaRN's attention temperature).
    """
    angles = positions[:, :, None] * frequencies
    return rotate(x, angles, heads=heads, interleaved=interleaved, amplitude=amplitude)


@rope.infer
def _(
    x: TensorType, positions: TensorType, frequencies: TensorType, *, heads: int, interleaved: bool, amplitude: float
) -> TensorType:
    want(x.rank == 3 and positions.shape == x.shape[:2], f"positions {positions} do not fit x {x}")
    width, pairs = x.shape[2], frequencies.shape[-1]
    want(isinstance(width, int) and width % heads == 0, f"the width of {x} is no multiple of heads={heads}")
    fits = isinstance(width, int) and isinstance(pairs, int) and frequencies.rank == 1 and 2 * pairs <= width // heads
    want(fits, f"frequencies {frequencies} exceed the head size of {x} with heads={heads}")
    return x


@rope.cost
def _(x: TensorType, positions: TensorType, frequencies: TensorType, **attrs: object) -> Size:
    return x.elements * 3


@rope.body
def _(x: Value, positions: Value, frequencies: Value, *, heads: int, interleaved: bool, amplitude: float) -> Value:
    from .elementwise import add, affine, cast, cos, mul, sin, sub
    from .tensor import concat, reshape, slice_, split, unsqueeze

    batch, seq, width = x.shape
    d, pairs = width // heads, frequencies.width
    at = unsqueeze(cast(positions, to=frequencies.type.dtype), axes=(2, 3))
    angles = mul(at, frequencies)  # [batch, seq, 1, pairs]
    c, s = (cast(affine(f(angles), by=amplitude), to=x.type.dtype) for f in (cos, sin))
    xh = reshape(x, shape=(batch, seq, heads, d))
    rest: list[Value] = []
    if 2 * pairs < d:
        xh, *rest = split.emit(xh, sizes=(2 * pairs, d - 2 * pairs))
    if interleaved:
        two = reshape(xh, shape=(batch, seq, heads, pairs, 2))
        a, b = (reshape(slice_(two, axis=4, start=i, stop=i + 1), shape=(batch, seq, heads, pairs)) for i in (0, 1))
    else:
        a, b = split.emit(xh, sizes=(pairs, pairs))
    first, second = sub(mul(a, c), mul(b, s)), add(mul(b, c), mul(a, s))
    if interleaved:
        halves = [unsqueeze(h, axes=(4,)) for h in (first, second)]
        mixed = reshape(concat(*halves, axis=4), shape=(batch, seq, heads, 2 * pairs))
    else:
        mixed = concat(first, second, axis=3)
    return reshape(concat(mixed, *rest, axis=3) if rest else mixed, shape=(batch, seq, width))
