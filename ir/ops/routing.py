"""Routers: the choice of experts for every token, and their weights.

A router computes `combine` [..., tokens, experts]: the weight of every expert in the token's output, zero where the
expert was not chosen. `moe` applies it. Routers that compare tokens (capacity, expert choice) compare those of axis −2,
or of the whole batch if `batched`.
"""

from __future__ import annotations

import math

import numpy as np

from ..op import Array, OpCall, Size, TensorType, Trait, Value, case, normal, normalize_axis, op, require, require_int
from ..types import dtypes, sizes
from .declaration import composed_op
from .elementwise import affine, cast, equal, fill_like, mask_fill, maximum, sigmoid, softplus
from .reduce import cumsum, mean, softmax, top_k
from .reduce import max as greatest
from .reduce import sum as add_up
from .tensor import iota, one_hot, reshape, swap_last_axes, unsqueeze

_LOGITS = normal(2, 7, 8)
_CLOSED = -1e30  # the logit of an expert that a token may not choose; it becomes -inf in f16


@composed_op(
    traits=[Trait.ROWWISE],
    cases=[
        case(_LOGITS, k=2),
        case(_LOGITS, k=2, renormalize=False),
        case(_LOGITS, k=1, renormalize=False),
        case(_LOGITS, normal(8), k=3, scoring="sigmoid", groups=4, top_groups=2, scale=2.5),
        case(_LOGITS, k=3, groups=4, top_groups=2, group_score="max", renormalize=False, scale=16.0),
        case(normal(5, 6), k=1, scoring="sigmoid", renormalize=False),
    ],
)
def route(
    logits: Value,
    bias: Value | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> Value:
    """Top-k router: scale · scores of the k chosen experts (divided by their sum if `renormalize`), 0 for other
    experts.

    logits [..., experts] → combine [..., experts]. Scores are the softmax of logits (Shazeer 2017; k = 1 without
    `renormalize` is Switch, Fedus 2021) or their sigmoid (`scoring`). The k experts with the largest score + bias
    [experts] are chosen. With `groups` > 1, experts/groups adjacent experts form a group, and only the experts of the
    `top_groups` groups with the largest `group_score` are eligible (max: the largest score + bias of a group; top2: the
    sum of its two largest; DeepSeek-V2 and V3).
    """
    shape, experts = logits.shape, logits.width
    scores = sigmoid(logits) if scoring == "sigmoid" else softmax(logits)
    ranked = scores if bias is None else scores + bias
    if groups > 1:
        members = reshape(ranked, shape=(*shape[:-1], groups, experts // groups))
        best = add_up(top_k.emit(members, k=1 if group_score == "max" else 2)[0], axes=(-1,))
        open_ = fill_like(best, 0.5) < _emit_top_k_mask(best, top_groups, groups, best)
        ranked = reshape(mask_fill(unsqueeze(open_, axes=(len(shape),)), members, -math.inf), shape=shape)
    chosen_scores = scores * _emit_top_k_mask(ranked, k, experts, scores)
    if renormalize:
        chosen_scores = chosen_scores / add_up(chosen_scores, axes=(-1,), keepdims=True)
    return chosen_scores if scale == 1 else chosen_scores * scale


@route.infer
def _(n: OpCall) -> None:
    logits, groups, top_groups = n.logits, n.groups, n.top_groups
    experts = require_int(logits.shape[-1], f"logits {logits} must have a fixed number of experts")
    require(n.scoring in ("softmax", "sigmoid"), f"scoring={n.scoring!r} must be softmax or sigmoid")
    require(n.group_score in ("max", "top2"), f"group_score={n.group_score!r} must be max or top2")
    require(n.bias is None or n.bias == logits.with_shape(experts), f"bias {n.bias} does not fit logits {logits}")
    require(n.scale > 0, f"scale={n.scale} must be positive")
    require(groups >= 1 and experts % groups == 0, f"{experts} experts cannot be split into groups={groups}")
    require(1 <= top_groups <= groups, f"top_groups={top_groups} is not between 1 and groups={groups}")
    fits = groups == 1 or n.group_score == "max" or experts // groups >= 2
    require(fits, "group_score=top2 needs two experts per group")
    open_to = experts // groups * top_groups
    require(1 <= n.k <= open_to, f"k={n.k} is not between 1 and {open_to}, the number of experts in the top groups")


@route.cost
def _routing_cost(n: OpCall) -> Size:
    logits: TensorType = n.logits
    return logits.elements * 8


def _emit_top_k_mask(best: Value, k: int, depth: int, like: Value) -> Value:
    """Emit 1 at the k largest elements along the last axis of `best` [..., depth], else 0, in the dtype of `like`."""
    _, indices = top_k.emit(best, k=k)
    hits = add_up(one_hot(indices, depth=depth), axes=(len(indices.shape) - 1,))
    return cast(hits, to=like.type.dtype)


def _compute_capacity(x: Array, capacity: int | None, factor: float) -> int:
    # The margin 1e-9 keeps a rounding error above an integer share from adding a token.
    tokens, experts = x.shape[-2:]
    return math.ceil(factor * tokens / experts - 1e-9) if capacity is None else capacity


def _check_capacity(x: TensorType, n: OpCall) -> None:
    require(x.rank >= 2 and isinstance(x.shape[-1], int), f"{x} must be [..., tokens, experts]")
    require(n.capacity is None or n.capacity >= 1, f"capacity={n.capacity} must be positive")
    require(n.factor > 0, f"factor={n.factor} must be positive")


def _emit_below_capacity(count: Value, x: Value, n: OpCall) -> Value:
    """Emit `count` < C, C the capacity. For C = ⌈z⌉ it compares with z: an integer is below both or neither."""
    capacity: int | None = n.capacity
    if capacity is not None:
        return count < capacity
    last = greatest(iota(x, axis=len(x.shape) - 2), axes=(0,), keepdims=True)
    share = affine(cast(last, to=dtypes.f32), by=n.factor / x.width, plus=n.factor / x.width - 1e-4)
    return cast(count, to=dtypes.f32) < share


_SPARSE = np.where(np.arange(48).reshape(2, 8, 3) * 7 % 5 < 3, 0.5, 0.0)


def _merge_batch(x: Value, n: OpCall) -> Value:
    """Emit x [..., tokens, experts] with all leading axes merged into the token axis if `batched`, else x itself."""
    return reshape(x, shape=(sizes.multiply_sizes(x.shape[:-1]), x.width)) if n.batched else x


@op(
    traits=[Trait.COMPARES],
    cases=[
        case(_SPARSE, capacity=2),
        case(_SPARSE, factor=1.25),
        case(_SPARSE[0], factor=0.5),
        case(_SPARSE, factor=0.75, batched=True),
    ],
)
def limit_capacity(combine: Array, *, capacity: int | None = None, factor: float = 1.0, batched: bool = False) -> Array:
    """`combine` [..., tokens, experts], with 0 for tokens after the first C that are routed to the same expert. C is
    `capacity`, or ⌈factor · tokens/experts⌉ if that is None (Fedus 2021). If `batched`, all batch rows, in order, count
    as one row: tokens counts theirs, and they share C. If all experts drop a token, only the residual stream passes it
    on."""
    rows = combine.reshape(-1, combine.shape[-1]) if batched else combine
    limit = _compute_capacity(rows, capacity, factor)
    return np.where(np.cumsum(rows != 0, -2) <= limit, rows, 0).reshape(combine.shape)


limit_capacity.infer(lambda n: _check_capacity(n.combine, n))


@limit_capacity.body
def _(n: OpCall) -> Value:
    combine = _merge_batch(n.combine, n)
    is_routed = cast(~equal(combine, 0), to=dtypes.i64)
    before = cumsum(is_routed, axis=len(combine.shape) - 2, exclusive=True)
    limited = mask_fill(_emit_below_capacity(before, combine, n), combine)
    return reshape(limited, shape=n.combine.shape) if n.batched else limited


@op(
    traits=[Trait.COMPARES],
    cases=[
        case(_LOGITS, capacity=2),
        case(_LOGITS, factor=2.0),
        case(normal(9, 4), factor=0.6),
        case(_LOGITS, factor=1.5, batched=True),
    ],
)
def expert_choice(logits: Array, *, capacity: int | None = None, factor: float = 1.0, batched: bool = False) -> Array:
    """Expert choice (Zhou 2022): the scores softmax(logits) over experts, kept for the C tokens with the largest scores
    of each expert, else 0. logits and result [..., tokens, experts]; C is `capacity`, or ⌈factor · tokens/experts⌉ if
    that is None. Of tokens with equal scores the first is chosen. If `batched`, the tokens of all batch rows
    compete."""
    scores = softmax.reference(logits.reshape(-1, logits.shape[-1]) if batched else logits)
    limit = _compute_capacity(scores, capacity, factor)
    # The rank of each token among all tokens of its expert; of equal ones the first count as larger.
    rank = np.argsort(np.argsort(-scores, -2, kind="stable"), -2, kind="stable")
    return np.where(rank < limit, scores, 0).reshape(logits.shape)


expert_choice.infer(lambda n: _check_capacity(n.logits, n))
expert_choice.cost(_routing_cost)


@expert_choice.body
def _(n: OpCall) -> Value:
    logits = _merge_batch(n.logits, n)
    scores, rank = softmax(logits), len(logits.shape)
    swapped = swap_last_axes(scores)  # [..., experts, tokens]
    mine, others = unsqueeze(swapped, axes=(rank,)), unsqueeze(swapped, axes=(rank - 1,))
    token = iota(logits, axis=rank - 2)
    earlier = unsqueeze(token, axes=(0,)) < unsqueeze(token, axes=(1,))  # [token, other token]
    is_ahead = (mine < others) | (equal(mine, others) & earlier)
    better = swap_last_axes(add_up(cast(is_ahead, to=dtypes.i64), axes=(rank,)))
    chosen = mask_fill(_emit_below_capacity(better, logits, n), scores)
    return reshape(chosen, shape=n.logits.shape) if n.batched else chosen


@composed_op(traits=[Trait.COMPARES], cases=[case(normal(2, 6, 3), _SPARSE[:, :6]), case(normal(8, 3), _SPARSE[0])])
def load_balance_loss(logits: Value, combine: Value) -> Value:
    """experts · Σ_j f_j p_j (Fedus 2021), a scalar: f_j is the fraction of all tokens for which `combine` of expert j
    is not 0, p_j the mean of softmax(logits)_j. Both operands [..., tokens, experts]. Models weigh this loss by ≈
    0.01."""
    tokens = tuple(range(len(logits.shape) - 1))
    is_routed = cast(~equal(combine, 0), to=logits.type.dtype)
    product = mean(is_routed, axes=tokens) * mean(softmax(logits), axes=tokens)
    return affine(add_up(product, axes=(0,)), by=logits.width)


@load_balance_loss.infer
def _(n: OpCall) -> TensorType:
    logits: TensorType = n.logits
    require(logits == n.combine, f"logits {logits} and combine {n.combine} differ")
    normalize_axis(-2, logits.rank)
    return logits.with_shape()


load_balance_loss.cost(_routing_cost)


# -- compositions


def emit_noisy_logits(logits: Value, spread: Value, noise: Value) -> Value:
    """Emit logits + noise · softplus(spread), the noisy gate of Shazeer 2017, as logits for `route`. All operands are
    [..., experts]; `spread` is x W_noise, and `noise` is a graph input with standard normal values."""
    return logits + noise * softplus(spread)


def emit_hierarchical_routing(group_logits: Value, logits: Value, *, top_groups: int, k: int) -> Value:
    """Emit combine [..., experts] of two-level routing (Shazeer 2017, appendix B): the weights of the best `top_groups`
    groups by group_logits [..., groups], times weights of the best k experts in each group by logits [..., experts].
    Adjacent experts form a group."""
    groups, shape = group_logits.width, logits.shape
    outer = route(group_logits, k=top_groups)
    inner = route(reshape(logits, shape=(*shape[:-1], groups, logits.width // groups)), k=k)
    return reshape(unsqueeze(outer, axes=(len(shape),)) * inner, shape=shape)


def emit_sparse_mixer(logits: Value, *, jitter: float) -> Value:
    """Emit combine [..., experts] of SparseMixer-v2 at inference: two experts (Liu 2024, arXiv 2409.12136).

    The two experts have the largest logits [..., experts]. The weight of an expert with logit s is its softmax
    probability among the experts whose logit z has s − z ≤ 2 · `jitter` · max(|z|, s); for the second expert the first
    is excluded.
    """
    axis, experts, magnitude = (len(logits.shape) - 1,), logits.width, abs(logits)
    combine: Value | None = None
    open_to = logits
    for _ in range(2):
        best = greatest(open_to, axes=axis, keepdims=True)
        gap = (best - logits) / maximum(magnitude, best)
        near = gap <= 2 * jitter
        hit = _emit_top_k_mask(open_to, 1, experts, logits)
        weight = hit * softmax(mask_fill(near, open_to, number=_CLOSED))
        combine = weight if combine is None else combine + weight
        open_to = mask_fill(hit < 0.5, open_to, number=_CLOSED)
    assert combine is not None
    return combine
