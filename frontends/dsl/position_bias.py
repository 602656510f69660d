"""Positions as a bias on the scores of attention."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.recipes import Scale
from weft.ir.recipes.frequencies import AlibiSlopes

from .build import computed, module, param, provided
from .checks import need, need_positive, need_whole
from .layers import is_causal, positions


def _counted(x: Value) -> Value:
    """Positions of the rows of x: [1, seq] where all rows of the batch count alike, else [batch, seq]."""
    row = provided("position_row")
    return positions(x) if row is None else row


@module
class ALiBi:
    """The bias −slope·(i − j) of query position i and key position j (Press 2022), −slope·|i − j| if not causal.

    The slopes are geometric from 2^(−max_bias/heads), times `scale`.
    """

    max_bias: float = 8.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        need_positive(self, "max_bias", "scale")

    def __call__(self, x: Value, heads: int, causal: bool | None = None) -> Value:
        """x [batch, seq, dim] → [batch or 1, heads, seq, seq]."""
        slopes = AlibiSlopes(heads, self.max_bias)
        table = computed("alibi.slopes", (heads,), slopes if self.scale == 1 else Scale(slopes, self.scale))
        at = _counted(x)
        return ops.alibi(table, at, at, symmetric=not is_causal(causal))


@module
class T5Bias:
    """A learned bias per head and bucket of the distance (Raffel 2020): ``weight`` [buckets, heads].

    Half of the buckets are for exact distances, the others grow logarithmically up to `max_distance`; half of all are
    for the future if not causal. As `bias` of `Attention`, every layer has a table of its own; as `position_bias` of
    `Decoder` or `Encoder`, with `heads` said, all layers share one.
    """

    buckets: int = 32
    max_distance: int = 128
    heads: int | None = None

    def __post_init__(self) -> None:
        need_whole(self, "buckets", least=4)
        need_whole(self, "max_distance", "heads")
        reached = self.max_distance > self.buckets // 2
        need(self, reached, f"max_distance={self.max_distance} must exceed half of buckets={self.buckets}")

    def __call__(self, x: Value, heads: int | None = None, causal: bool | None = None) -> Value:
        """x [batch, seq, dim] → [batch or 1, heads, seq, seq]."""
        heads = self.heads or heads
        if heads is None:
            raise WeftError("a bias that all layers share needs heads=")
        table, at = param("weight", (self.buckets, heads)), _counted(x)
        bidirectional = not is_causal(causal)
        return ops.relative_position_bias(table, at, at, bidirectional=bidirectional, max_distance=self.max_distance)
