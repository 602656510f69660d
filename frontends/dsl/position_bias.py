"""Relative positions: biases of scores, tables of distance vectors, and keys of local and global attention."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.elementwise import fill_like, mask_fill
from weft.ir.ops.tensor import emit_indices
from weft.ir.recipes import Scale
from weft.ir.recipes.frequencies import AlibiSlopes
from weft.ir.types import dtypes, sizes

from .build import constant_param, module, param, provided, providing
from .checks import need, need_int, need_positive, need_type
from .layers import LayerNorm, is_causal, positions
from .rotary import RoPE

_NUDGE = 1e-5  # rounding may make the logarithm of the last distance slightly too large


def _find_positions(x: Value) -> Value:
    """Return the positions of the tokens of x: [1, seq] in encoders, whose sequences share them, else [batch, seq]."""
    row = provided("position_row")
    return positions(x) if row is None else row


@module
class ALiBi:
    """The bias −slope·(i − j) of query position i and key position j (Press 2022), −slope·|i − j| if not causal.

    The slope of head h = 1, 2, … is scale · 2^(−max_bias · h/heads) if `heads` is a power of 2, else see `AlibiSlopes`.
    """

    max_bias: float = 8.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        need_positive(self, "scale")

    def __call__(self, x: Value, heads: int, causal: bool | None = None) -> Value:
        """Return the bias [batch or 1, heads, seq, seq] for x [batch, seq, dim]; `causal` None follows the model."""
        slopes = AlibiSlopes(heads, self.max_bias)
        table = constant_param("alibi.slopes", (heads,), slopes if self.scale == 1 else Scale(slopes, self.scale))
        at = _find_positions(x)
        return ops.alibi(table, at, at, symmetric=not is_causal(causal))


@module
class T5Bias:
    """A learned bias per head and bucket of the distance (Raffel 2020): ``weight`` [buckets, heads].

    Half of the buckets are for exact distances, the others for ranges that grow logarithmically up to `max_distance`.
    If not causal, half of all buckets are for later keys. As `bias` of `Attention`, every layer has its own table; as
    `position_bias` of `Decoder` or `Encoder`, which needs `heads`, all layers share one.
    """

    buckets: int = 32
    max_distance: int = 128
    heads: int | None = None

    def __post_init__(self) -> None:
        _check_buckets(self)

    def __call__(self, x: Value, heads: int | None = None, causal: bool | None = None) -> Value:
        """Return the bias [batch or 1, heads, seq, seq] for x [batch, seq, dim]. The field `heads` overrides the
        argument; one of them must be set. `causal` None follows the model."""
        heads = self.heads or heads
        if heads is None:
            raise WeftError("T5Bias needs heads=..., as all layers share it")
        table, at = param("weight", (self.buckets, heads)), _find_positions(x)
        bidirectional = not is_causal(causal)
        return ops.relative_position_bias(table, at, at, bidirectional=bidirectional, max_distance=self.max_distance)


def _check_buckets(bias: T5Bias | TransientGlobals) -> None:
    need_int(bias, "buckets", least=4)
    reached = bias.max_distance > bias.buckets // 2
    need(bias, reached, f"max_distance={bias.max_distance} must exceed half of buckets={bias.buckets}")


@module
class RelativeTable:
    """Learned vectors of relative positions, which all layers share: ``weight`` [2·span, dim], normalized by `norm`.

    Table row span + r, −span ≤ r < span, is for a key r tokens before its query; larger distances use the first or
    last row. With `max_distance`, distances above span/2 share rows on a logarithmic scale up to `max_distance` (He
    2021, arXiv 2006.03654). The `relative` of an `Encoder`, for `DisentangledAttention`.
    """

    span: int
    max_distance: int | None = None
    norm: LayerNorm | None = None

    def __post_init__(self) -> None:
        need_type(self, "norm", LayerNorm)
        exact = self.span // 2
        fits = self.max_distance is None or (exact > 0 and self.max_distance > exact + 1)
        need(self, fits, f"max_distance={self.max_distance} must be at least {exact + 2}, span={self.span} at least 2")

    def __call__(self, x: Value) -> dict[str, Value]:
        """Return ``relative_table`` [2·span, dim], and ``relative_rows`` [1, seq, seq]: its row per query and key."""
        row = provided("position_row")
        if row is None:
            raise WeftError("RelativeTable must be in an Encoder, as its relative=...")
        table = param("weight", (2 * self.span, x.width))
        distances = ops.sub(ops.unsqueeze(row, axes=(2,)), ops.unsqueeze(row, axes=(1,)))
        if self.max_distance is not None:
            distances = self._bucket(distances, self.span // 2, self.max_distance)
        index = ops.clip(ops.affine(distances, plus=self.span), low=0, high=2 * self.span - 1, name="relative_rows")
        return {"relative_table": table if self.norm is None else self.norm(table), "relative_rows": index}

    def _bucket(self, signed_distance: Value, exact: int, farthest: int) -> Value:
        """Return `signed_distance` with magnitudes above `exact` on a log scale, where farthest − 1 is 2·exact − 1."""
        distance = ops.abs(signed_distance)
        ratio = ops.affine(ops.cast(ops.clip(distance, low=exact), to=dtypes.f32), by=1 / exact)
        rate = (exact - 1) / math.log((farthest - 1) / exact)
        steps = ops.neg(ops.floor(ops.affine(ops.log(ratio), by=-rate, plus=_NUDGE)))  # rounded up
        log_distance = ops.affine(ops.cast(steps, to=signed_distance.type.dtype), plus=exact)
        zero = ops.affine(signed_distance, by=0)
        signed = ops.where(ops.less(signed_distance, zero), ops.neg(log_distance), log_distance)
        return ops.where(ops.less(distance, ops.affine(zero, plus=exact + 1)), signed_distance, signed)


@module
class SinusoidalDistances:
    """Vectors of relative positions that are sines and cosines of the distance (Dai 2019, Transformer-XL).

    The first half of a vector of width d is sin(distance/10000^(2i/d)), the second half the cosines; `clamp` limits
    distances to ±clamp. With `segments` the encoder has the input token_type_ids, and `TransformerXLAttention`
    distinguishes keys of the same and of other segments (Yang 2019, XLNet). The `relative` of an `Encoder`.
    """

    clamp: int | None = None
    segments: bool = False

    def __call__(self, x: Value) -> dict[str, Value]:
        """Return ``relative_table`` [2·seq, dim], rows for the distances 0, 1, …, seq − 1, 0, −1, …, 1 − seq, and
        ``relative_rows`` [1, seq, seq], the row of each query and key. A distance is query position − key position."""
        row = provided("position_row")
        if row is None or x.width % 2:
            raise WeftError(f"SinusoidalDistances must be in an Encoder of even width; the width is {x.width}")
        half = ops.slice(ops.slice(x, axis=0, start=0, stop=1), axis=2, start=0, stop=x.width // 2)
        ones = ops.concat(fill_like(half, 0.0), fill_like(half, 1.0), axis=2, name="unturned")
        with providing(positions=row):
            past = RoPE()(ones, 1, "behind")  # (−sin, cos)
        sines, cosines = ops.split.emit(past, sizes=(x.width // 2, x.width // 2), axis=2, name=("sines", "cosines"))
        ahead = ops.concat(ops.neg(sines), cosines, axis=2, name="ahead")
        table = ops.squeeze(ops.concat(ahead, past, axis=1), axes=(0,), name="relative_table")
        distances = ops.sub(ops.unsqueeze(row, axes=(2,)), ops.unsqueeze(row, axes=(1,)))
        if self.clamp is not None:
            distances = ops.clip(distances, low=-self.clamp, high=self.clamp)
        length = ops.affine(ops.max(ops.iota(x, axis=1), axes=(0,), keepdims=True), plus=1, name="length")
        forward = ops.less_equal(fill_like(distances, 0), distances)
        return {
            "relative_table": table,
            "relative_rows": ops.where(forward, distances, ops.sub(length, distances), name="relative_rows"),
        }


@module
class TransientGlobals:
    """The visible keys of `TransientGlobalAttention` and their biases (Guo 2021, LongT5, arXiv 2112.07916).

    A token sees the tokens less than `window` away, and a global token for every complete block of `block` tokens in
    the sequence; tokens after the last complete block belong to that block. Tokens have a bias by distance in tokens,
    global tokens by distance in blocks, as in `T5Bias`. All layers share ``local.weight`` and ``blocks.weight``
    [buckets, heads]. The `relative` of an `Encoder`.
    """

    heads: int
    window: int
    block: int
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        _check_buckets(self)

    def __call__(self, x: Value) -> dict[str, Value]:
        """Return the values that `TransientGlobalAttention` reads, by name, for x [batch, seq, dim].

        A run is `window` consecutive queries. Its keys are the 3 · window tokens around it, then all global tokens.

        - ``global_members`` [batch, globals, seq]: 1 if a token belongs to a block, else 0
        - ``run_queries`` [runs · window], ``run_keys`` [runs, keys]: i is token i, and seq + j is global token j
        - ``run_mask`` [batch · runs, keys], false for masked keys; ``run_bias`` [batch · runs, heads, window, keys]
        """
        row, mask = provided("position_row"), provided("key_mask")
        if row is None or mask is None:
            raise WeftError("TransientGlobals sums over complete sequences: it must be in an Encoder")
        (batch, seq, _), window = x.shape, self.window
        runs, blocks = sizes.floordiv(seq + window - 1, window), sizes.maximum(1, sizes.floordiv(seq, self.block))
        shown, last = ops.cast(mask, to=dtypes.bool_, name="shown"), ops.max(row, axes=(1,), name="last_position")
        at, numbers = self._index_blocks(row, shown), emit_indices(x, blocks, "blocks")
        exists = ops.less_equal(ops.unsqueeze(numbers, axes=(0,)), ops.max(at, axes=(1,), keepdims=True))
        members = ops.equal(ops.unsqueeze(at, axes=(1,)), ops.unsqueeze(numbers, axes=(0, 2)))
        first = ops.affine(emit_indices(x, runs, "runs"), by=window, name="run_starts")
        near = ops.affine(emit_indices(x, 3 * window, "offsets"), plus=-window, name="near_offsets")
        tokens = ops.add(ops.unsqueeze(first, axes=(1,)), ops.unsqueeze(near, axes=(0,)), name="near_tokens")
        inside = ops.logical_and(ops.less_equal(fill_like(tokens, 0), tokens), ops.less_equal(tokens, last))
        tokens = ops.clip(ops.minimum(tokens, last), low=0, name="near_tokens")
        visible = ops.logical_and(
            ops.gather(shown, tokens, axis=1), ops.unsqueeze(inside, axes=(0,)), name="near_shown"
        )
        exists = ops.expand(ops.unsqueeze(exists, axes=(1,)), shape=(batch, runs, blocks), name="globals_shown")
        global_indices = ops.unsqueeze(ops.affine(ops.add(numbers, last), plus=1), axes=(0,))
        global_indices = ops.expand(global_indices, shape=(runs, blocks), name="globals_behind")
        queries = ops.minimum(emit_indices(x, runs * window), last, name="run_queries")
        query_blocks = ops.gather(at, queries, axis=1, name="run_blocks")
        keys = ops.concat(visible, exists, axis=2, name="run_shown")
        # In the dtype of x, even if the PyTorch module is cast later.
        ones = fill_like(ops.transpose(ops.slice(x, axis=2, start=0, stop=1), axes=(0, 2, 1)), 1.0)
        return {
            "global_members": ops.where(members, ones, fill_like(ones, 0.0), name="global_members"),
            "run_queries": queries,
            "run_keys": ops.concat(tokens, global_indices, axis=1, name="run_keys"),
            "run_mask": ops.reshape(keys, shape=(batch * runs, keys.shape[2]), name="run_mask"),
            "run_bias": self._compute_bias(x, near, ops.reshape(query_blocks, shape=(batch * runs, window)), numbers),
        }

    def _index_blocks(self, row: Value, shown: Value) -> Value:
        """Return the index [batch, seq] of the block of each token, from the positions `row` [1, seq]. It is −1 for
        padding, where `shown` [batch, seq] is false, and for all tokens of a sequence without a complete block."""
        width = fill_like(row, self.block)
        ends_block = ops.logical_and(ops.equal(ops.mod(row, width), fill_like(row, self.block - 1)), shown)
        complete_blocks = ops.sum(ops.cast(ends_block, to=dtypes.i64), axes=(1,), keepdims=True, name="whole_blocks")
        block_index = mask_fill(shown, ops.floordiv(row, width), -1)
        return ops.minimum(block_index, ops.affine(complete_blocks, plus=-1), name="token_blocks")

    def _compute_bias(self, x: Value, near: Value, query_blocks: Value, blocks: Value) -> Value:
        """Return the bias [batch · runs, heads, window, keys] of the scores in each run; −∞ outside the window.
        Keys are tokens at offsets `near` [3 · window] from the start of a run, then the global tokens of `blocks`
        [globals]; `query_blocks` [batch · runs, window] are the block indices of the queries."""
        rows, window = query_blocks.shape
        queries, keys = ops.unsqueeze(emit_indices(x, window), axes=(0,)), ops.unsqueeze(near, axes=(0,))
        tables = [param(f"{name}.weight", (self.buckets, self.heads)) for name in ("local", "blocks")]
        local = ops.relative_position_bias(tables[0], queries, keys, max_distance=self.max_distance, name="local_bias")
        distance = ops.abs(ops.sub(ops.unsqueeze(keys, axes=(1,)), ops.unsqueeze(queries, axes=(2,))))
        within = ops.unsqueeze(ops.less(distance, fill_like(distance, window)), axes=(1,), name="within_window")
        local = ops.expand(mask_fill(within, local, -math.inf), shape=(rows, *local.shape[1:]))
        block_row = ops.unsqueeze(blocks, axes=(0,))
        block_bias = ops.relative_position_bias(
            tables[1], query_blocks, block_row, max_distance=self.max_distance, name="block_bias"
        )
        return ops.concat(local, block_bias, axis=3, name="run_bias")
