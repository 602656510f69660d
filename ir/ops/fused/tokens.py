"""First and last op of a decode step: embeddings with the cosines and sines of RoPE, and token sampling."""

from __future__ import annotations

import numpy as np

from ...op import OpCall, TensorType, Value, case, ints, normal, require
from ...types import dtypes
from .. import reduce
from ..declaration import composed_op, fused_op
from ..elementwise import affine, mask_fill, minimum
from ..products import embedding
from ..tensor import scatter_rows, slice_, unsqueeze
from .heads import rotary_angles

_IDS, _AT = ints(2, 3, high=11), ints(2, 3, high=7)


@fused_op(
    cases=[
        case(_IDS, normal(11, 4), scale=2.0),
        case(_IDS, normal(11, 4), _AT, normal(9, 4), offset=2),
        case(_IDS, normal(11, 4), _AT, None, normal(2), normal(3), amplitudes=(1.0, 1.2)),
    ]
)
def embed_tokens(
    ids: Value,
    weight: Value,
    positions: Value | None = None,
    table: Value | None = None,
    *frequencies: Value,
    scale: float = 1.0,
    offset: int = 0,
    amplitudes: tuple[float, ...] = (),
) -> tuple[Value, ...]:
    """x = scale · weight[ids] + table[positions + offset], then the outputs of `rotary_angles` for each of
    `frequencies`.

    ids and positions [batch, seq], weight [vocab, dim], table [length, dim] (or absent) → x [batch, seq, dim], then cos
    and sin [batch, seq, pairs] for each operand of `frequencies` [pairs], times the operand's entry in `amplitudes`.
    """
    same = len(frequencies) == len(amplitudes)
    require(same, f"{len(amplitudes)} amplitudes do not fit {len(frequencies)} operands frequencies")
    x = embedding(ids, weight)
    x = x if scale == 1 else x * scale
    if table is not None and positions is not None:
        x = x + embedding(positions if offset == 0 else positions + offset, table)
    results = [x]
    for values, amplitude in zip(frequencies, amplitudes, strict=True):
        assert positions is not None
        results += rotary_angles.emit(positions, values, amplitude=amplitude)
    return tuple(results)


_UNIFORMS = np.array([[0.02], [0.5], [0.98]])


@composed_op(
    cases=[
        case(normal(3, 7)),
        case(normal(3, 7), _UNIFORMS, temperature=0.7),
        case(normal(3, 7), _UNIFORMS, temperature=1.5, top_k=4, top_p=0.8),
        case(normal(3, 7), _UNIFORMS, temperature=1.0, min_p=0.3),
    ]
)
def choose_tokens(
    logits: Value,
    uniforms: Value | None = None,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Value:
    """The next token of each batch row, i64 [batch, 1]: the most likely, or a sampled one if `temperature` > 0.

    logits [batch, vocab]; uniforms [batch, 1] in [0, 1), needed for sampling. Filters are top-k, top-p (Holtzman et al.
    2019, arXiv 1904.09751) and min-p (Nguyen et al. 2024, arXiv 2407.01082), in this order; top_k=0, top_p=1 and
    min_p=0 keep all tokens. The sample is the first remaining token, in the order of ids, at which the cumulative
    renormalized probability exceeds the element of uniforms of that batch row.
    """
    if temperature == 0:
        return reduce.top_k.emit(logits, k=1)[1]
    assert uniforms is not None
    sorted_logits, order = reduce.top_k.emit(logits, k=logits.width)
    remaining = weights = reduce.softmax(sorted_logits * (1 / temperature))
    if 0 < top_k < logits.width:
        remaining = mask_fill(slice_(weights, axis=1, start=top_k - 1, stop=top_k) <= weights, remaining)
    if top_p < 1:
        nucleus = reduce.sum(remaining, axes=(1,), keepdims=True) * top_p
        remaining = mask_fill(reduce.cumsum(remaining, exclusive=True) < nucleus, remaining)
    if min_p > 0:
        remaining = mask_fill(slice_(weights, axis=1, start=0, stop=1) * min_p <= weights, remaining)
    sums = reduce.cumsum(scatter_rows(affine(logits, by=0.0), remaining, order, axis=1))
    total = slice_(sums, axis=1, start=logits.width - 1, stop=logits.width)
    # The product may round up to the total, which no cumulative sum exceeds: clamp to the last token with a weight.
    chosen = minimum(reduce.emit_true_count(sums <= uniforms * total, (1,)), reduce.emit_true_count(sums < total, (1,)))
    return unsqueeze(chosen, axes=(1,))


@choose_tokens.infer
def _(n: OpCall) -> TensorType:
    require(n.logits.rank == 2, f"logits {n.logits} must be [batch, vocab]")
    require(n.temperature >= 0, f"temperature={n.temperature} must not be negative")
    if n.temperature > 0:
        fits = n.uniforms is not None and n.uniforms.shape == (n.logits.shape[0], 1)
        require(fits, "sampling needs uniforms [batch, 1]")
    return TensorType(dtypes.i64, (n.logits.shape[0], 1))
