"""The beginning of a decode step: the embeddings of tokens and positions, with the angles of rotations."""

from __future__ import annotations

from ...op import Value, case, ints, normal, want
from ..declaration import fused
from ..elementwise import add, affine
from ..products import embedding
from .heads import rotary_angles

_IDS, _AT = ints(2, 3, high=11), ints(2, 3, high=7)


@fused(
    cases=[
        case(_IDS, normal(11, 4), scale=2.0),
        case(_IDS, normal(11, 4), _AT, normal(9, 4), offset=2),
        case(_IDS, normal(11, 4), _AT, None, normal(2), normal(3), amplitudes=(1.0, 1.2)),
    ],
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
    """x = scale · weight[ids] + table[positions + offset], then the `rotary_angles` of each of `frequencies`.

    ids and positions [batch, seq], weight [vocab, dim], table [length, dim] → x [batch, seq, dim], and cos and sin
    [batch, seq, pairs] of each.
    """
    want(len(frequencies) == len(amplitudes), "every one of frequencies has an amplitude")
    x = embedding(ids, weight)
    x = x if scale == 1 else affine(x, by=scale)
    if table is not None and positions is not None:
        x = add(x, embedding(positions if offset == 0 else affine(positions, plus=offset), table))
    made = [x]
    for one, amplitude in zip(frequencies, amplitudes, strict=True):
        assert positions is not None
        made += rotary_angles.emit(positions, one, amplitude=amplitude)
    return tuple(made)
