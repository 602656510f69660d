"""Attention to content and to relative positions, kept apart."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.positions import picked
from weft.ir.types import dtypes

from .build import module, param, provided
from .checks import need, need_few, need_kind, need_whole
from .layers import LayerNorm, is_causal, last_axis, linear

_NUDGE = 1e-5  # the logarithm of the last distance may come out a rounding error too large


@module
class RelativeTable:
    """Learned vectors of relative positions, which all layers share: ``weight`` [2·span, dim], normalized by `norm`.

    Row span + r is that of a key r tokens before its query, −span ≤ r < span. With `max_distance` distances above
    span/2 share rows, on a logarithmic scale up to it (He 2021, arXiv 2006.03654). A field `relative` of `Encoder`.
    """

    span: int
    max_distance: int | None = None
    norm: LayerNorm | None = None

    def __post_init__(self) -> None:
        need_whole(self, "span", "max_distance")
        need_kind(self, "norm", LayerNorm)
        exact = self.span // 2
        fits = self.max_distance is None or (exact > 0 and self.max_distance > exact + 1)
        need(self, fits, f"max_distance={self.max_distance} must exceed half of span={self.span}, at least 2, by 2")

    def __call__(self, x: Value) -> dict[str, Value]:
        """x [batch, seq, dim] → ``relative_table`` [2·span, dim] and ``relative_rows`` [1, seq, seq]."""
        row = provided("position_row")
        if row is None:
            raise WeftError("a table of relative positions belongs into an Encoder")
        table = param("weight", (2 * self.span, x.width))
        apart = ops.sub(ops.unsqueeze(row, axes=(2,)), ops.unsqueeze(row, axes=(1,)))
        if self.max_distance is not None:
            apart = self._bucket(apart, self.span // 2, self.max_distance)
        index = ops.clip(ops.affine(apart, plus=self.span), low=0, high=2 * self.span - 1, name="relative_rows")
        return {"relative_table": table if self.norm is None else self.norm(table), "relative_rows": index}

    def _bucket(self, apart: Value, exact: int, farthest: int) -> Value:
        """Signed distances, those above `exact` on a logarithmic scale."""
        distance = ops.abs(apart)
        ratio = ops.affine(ops.cast(ops.clip(distance, low=exact), to=dtypes.f32), by=1 / exact)
        rate = (exact - 1) / math.log((farthest - 1) / exact)
        steps = ops.neg(ops.floor(ops.affine(ops.log(ratio), by=-rate, plus=_NUDGE)))  # rounded up
        far = ops.affine(ops.cast(steps, to=apart.type.dtype), plus=exact)
        zero = ops.affine(apart, by=0)
        signed = ops.where(ops.less(apart, zero), ops.neg(far), far)
        return ops.where(ops.less(distance, ops.affine(zero, plus=exact + 1)), apart, signed)


@module
class DisentangledAttention:
    """Attention with scores of content to content, content to position and position to content (He 2020, DeBERTa).

    score_ij = (q_i·k_j + q_i·K_r + k_j·Q_r) / √(d · terms), r the row of i − j in the `RelativeTable` of the encoder,
    K and Q maps of its vectors. `to_position` is the term with K, `from_position` that with Q. Parameters: ``q``,
    ``k``, ``v`` and ``o``, and for K and Q ``pos_k`` and ``pos_q``, or ``k`` and ``q`` again if `shared`. Keys and K
    have biases with `key_bias`, the others always. Not causal.
    """

    heads: int
    to_position: bool = True
    from_position: bool = True
    shared: bool = False
    key_bias: bool = True

    def __post_init__(self) -> None:
        need_whole(self, "heads")
        need_few(self, "heads")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        if is_causal():
            raise WeftError("disentangled attention is not causal: it belongs into an Encoder")
        d = last_axis(x, self.heads, "heads")
        q, v = linear(x, x.width, "q", True), linear(x, x.width, "v", True)
        k = linear(x, x.width, "k", self.key_bias)
        scale = (d * (1 + self.to_position + self.from_position)) ** -0.5
        y = ops.attention(
            *(q, k, v, self._bias(q, k, scale), provided("key_mask")),
            heads=self.heads,
            kv_heads=self.heads,
            scale=scale,
        )
        return linear(y, x.width, "o", True)

    def _bias(self, q: Value, k: Value, scale: float) -> Value | None:
        """The scores with positions [batch, heads, seq, seq]."""
        if not (self.to_position or self.from_position):
            return None
        table, index = provided("relative_table"), provided("relative_rows")
        if table is None or index is None:
            raise WeftError(
                "there are no relative positions to attend to: give the Encoder relative=RelativeTable(...)"
            )
        width, terms = q.width, []
        if self.to_position:
            scores = self._scores(q, linear(table, width, "k" if self.shared else "pos_k", self.key_bias))
            terms.append(picked(scores, index))
        if self.from_position:
            scores = self._scores(k, linear(table, width, "q" if self.shared else "pos_q", True))
            terms.append(ops.transpose(picked(scores, ops.transpose(index, axes=(0, 2, 1))), axes=(0, 1, 3, 2)))
        return ops.affine(ops.add(*terms) if len(terms) == 2 else terms[0], by=scale, name="position_scores")

    def _scores(self, x: Value, vectors: Value) -> Value:
        """x [batch, seq, width] times vectors [rows, width], head by head: [batch, heads, seq, rows]."""
        (batch, seq, _), rows, d = x.shape, vectors.shape[0], x.width // self.heads
        by_head = ops.transpose(ops.reshape(x, shape=(batch, seq, self.heads, d)), axes=(0, 2, 1, 3))
        return ops.matmul(by_head, ops.transpose(ops.reshape(vectors, shape=(rows, self.heads, d)), axes=(1, 2, 0)))
