"""Sampling of the next token of every row on the device of its logits: greedy, or random after filters.

`scan_kernel` finds the largest logit. Without filters it also chooses: the likeliest token, or one drawn from all. With
filters it computes a lower bound on the logits that they keep; then `keep_kernel` gathers the tokens above the bound
and draws one of them. No logits are sorted (see `thresholds`). In both kernels the last program of a row chooses.
Filters are top-k, top-p (Holtzman et al. 2019, arXiv 1904.09751) and min-p (Nguyen et al. 2024, arXiv 2407.01082), in
this order. Of tokens with equal probability at the threshold, top-k keeps all; top-p keeps the lowest ids it needs.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from .shared import operands
from .shared.launch import jit, options, start_next, tl, triton, uses_torch, wait_for_previous
from .shared.thresholds import LOWEST, NEAR, TOKENS, key_to_logit, search_key, token_weights, total_weight
from .shared.tickets import is_last, zero_counters

BLOCK = 2048  # logits of a program
PARTS = 16  # into which it cuts them to find a bound on the k-th largest
CHUNK = 512  # candidates that the last program weighs at a time
TICKETS = 3  # counters of a row
WRONG = (math.nan, math.inf, -math.inf)  # largest logits that the tokens -1, -2, -3 report
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@jit
def uniform(uniforms, spent, row, most, number):
    """Return the next random number of a row: uniforms[row, spent[row]] of [rows, most], the last if all are spent.
    Increment spent[row] if `number`, the number of possible tokens, is above 1."""
    at = tl.load(spent + row)
    if number > 1:
        tl.store(spent + row, at + 1)
    return tl.load(uniforms + row * most + tl.minimum(at, most - 1))


@jit
def store_token(token, largest, row, chosen, ids, positions, active):
    """Store `token` in chosen[row], or -1, -2, -3 if the `largest` logit is NaN, ∞, −∞. If `ids` is not None and
    active[row] is true, also store it in ids[row] (0 instead of -1, -2, -3), and increment positions[row]."""
    finite = tl.abs(largest) < float("inf")
    wrong = tl.where(largest != largest, -1, tl.where(largest > 0, -2, -3))
    tl.store(chosen + row, tl.where(finite, token, wrong).to(tl.int64))
    if ids is not None:  # noqa: SIM102 # a constant
        if tl.load(active + row) != 0:
            tl.store(ids + row, tl.where(finite, token, 0).to(tl.int64))
            tl.store(positions + row, tl.load(positions + row) + 1)


@jit
def lower_bound(parts, number, largest, temperature, whole, vocab, top_k, top_p, min_p, CHUNK: tl.constexpr):
    """Return a lower bound on the logits that the filters keep: that of top-k if `top_k` is above 0 (−∞ if it exceeds
    `number`), else that of top-p and min-p. `parts` [number] are the largest logits of the parts of a row, `largest` is
    the largest of all, and `whole` the total weight of the row."""
    bound = tl.full([], float("-inf"), tl.float32)
    if top_k > 0:
        if top_k <= number:
            edge, _ = search_key(parts, None, number, largest, temperature, LOWEST, 0, 0.0, top_k, False, True, CHUNK)
            bound = key_to_logit(edge)
    else:
        # Tokens with a probability below (1 - top_p) / vocab sum to less than 1 - top_p, so top-p drops all of them.
        rest = tl.maximum((1.0 - top_p) / vocab * whole.to(tl.float32), min_p)
        bound = largest + temperature * (tl.log(tl.minimum(rest, 1.0)) - 0.01) - tl.abs(largest) * 1e-6
    return bound


@jit
def find_crossing(n, weight, aim, end):
    """Return the first of the indices n [k] where the cumulative sum of `weight` [k] exceeds `aim`, but at most the
    last n with a positive weight; the weight at this n; and the cumulative sum including it. `end` is above all n."""
    after = tl.cumsum(weight, axis=0)
    first = tl.min(tl.where(after > aim, n, end), axis=0)
    first = tl.minimum(first, tl.max(tl.where(weight > 0, n, 0), axis=0))
    return (first, tl.sum(tl.where(n == first, weight, 0.0), axis=0), tl.sum(tl.where(n == first, after, 0.0), axis=0))


@jit
def finish_scan(
    logits, uniforms, spent, parts, firsts, tops, sums, numbers, bounds, totals, row, blocks, vocab, most,
    temperature, top_k, top_p, min_p, DRAW: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, PLACES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce the results of all programs of a row; return (token, largest logit). The token is the likeliest; with DRAW
    it is drawn from all tokens. With FILTER it has no meaning: the bound and the total weight of the row are stored,
    and `keep_kernel` chooses."""
    i = tl.arange(0, PLACES)
    at = row * blocks + i
    top = tl.load(tops + at, mask=i < blocks, other=float("-inf"), cache_modifier=".cg")
    largest = tl.max(top, axis=0)
    first = tl.load(firsts + at, mask=i < blocks, other=0, cache_modifier=".cg")
    token = tl.min(tl.where(top == largest, first, vocab), axis=0)
    wrong = tl.max((top != top).to(tl.int32), axis=0)
    largest = tl.where(wrong > 0, float("nan"), largest)
    if DRAW:
        finite = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        share = token_weights(top, finite, temperature)
        weight = tl.load(sums + at, mask=i < blocks, other=0.0, cache_modifier=".cg") * share.to(tl.float64)
        total = tl.sum(weight, axis=0)
        if FILTER:
            parts += row * blocks * PARTS
            bound = lower_bound(parts, blocks * PARTS, finite, temperature, total, vocab, top_k, top_p, min_p, CHUNK)
            tl.store(bounds + row, bound)
            tl.store(totals + row, total)
        else:
            number = tl.load(numbers + at, mask=i < blocks, other=0, cache_modifier=".cg")
            alone = tl.sum(((share >= NEAR) & (i < blocks)).to(tl.int32), axis=0) == 1
            number = tl.where(alone, tl.max(tl.where(top == finite, number, 0), axis=0), 2)
            aim = uniform(uniforms, spent, row, most, number) * total
            block, here, after = find_crossing(i, weight, aim, PLACES)
            n = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + n, mask=n < vocab, other=float("-inf")).to(tl.float32)
            weight_here = tl.where(n < vocab, token_weights(x, finite, temperature), 0.0).to(tl.float64)
            # The weight of a block was summed in f32, here in f64: scale the target by their ratio.
            ratio = tl.sum(weight_here, axis=0).to(tl.float32) / tl.maximum(here.to(tl.float32), 1e-30)
            aim_here = (aim - (after - here)) * ratio
            token, _, _ = find_crossing(n, weight_here, aim_here, vocab)
    return token, largest


@jit
def scan_kernel(
    logits, row_stride, uniforms, spent, chosen, ids, positions, active, tickets, parts, firsts, tops, sums, numbers,
    bounds, totals, vocab, most, temperature, top_k, top_p, min_p,
    DRAW: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reduce BLOCK logits of a row; the last program of the row stores its token or, with FILTER, the bound for
    `keep_kernel`. Grid [blocks, rows]."""
    start_next(PDL)
    wait_for_previous(PDL)
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    logits += row * row_stride
    WIDTH: tl.constexpr = BLOCK // PARTS
    n = block * BLOCK + tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + n, mask=n < vocab, other=float("-inf")).to(tl.float32)
    by_part = tl.max(x, axis=1)
    top = tl.max(by_part, axis=0)
    first = tl.min(tl.min(tl.where(x == top, n, vocab), axis=1), axis=0)
    wrong = tl.max(tl.max(tl.where(x != x, 1.0, 0.0), axis=1), axis=0)
    at = row * blocks + block
    tl.store(tops + at, tl.where(wrong > 0, float("nan"), top))
    tl.store(firsts + at, first)
    if DRAW:
        weight = token_weights(x, tl.where(tl.abs(top) < float("inf"), top, 0.0), temperature)
        tl.store(sums + at, tl.sum(tl.sum(weight, axis=1), axis=0).to(tl.float64))
        tl.store(numbers + at, tl.sum(tl.sum(tl.where(weight >= NEAR, 1.0, 0.0), axis=1), axis=0).to(tl.int32))
        if FILTER:
            tl.store(parts + at * PARTS + tl.arange(0, PARTS), by_part)
    if is_last(tickets + row, blocks):
        token, largest = finish_scan(
            logits, uniforms, spent, parts, firsts, tops, sums, numbers, bounds, totals, row, blocks, vocab, most,
            temperature, top_k, top_p, min_p, DRAW, FILTER, BLOCK, PARTS, PLACES, CHUNK,
        )  # fmt: skip
        if FILTER:
            tl.store(tops + row * blocks, largest)  # of all blocks
        else:
            store_token(token, largest, row, chosen, ids, positions, active)


@jit
def finish_keep(
    values, tokens, count, uniforms, spent, largest, whole, row, vocab, most, temperature, top_k, top_p, min_p,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Apply the filters to the `count` gathered candidates of a row, `values` and `tokens`. Draw one of the remaining
    tokens, and return it. `whole` is the total weight of the row."""
    least, last = tl.full([], LOWEST, tl.int64), tl.zeros([], tl.int64) + vocab
    if top_k > 0:
        least, _ = search_key(values, tokens, count, largest, temperature, least, last, 0.0, top_k, False, True, CHUNK)
        whole, _, _ = total_weight(values, tokens, count, largest, temperature, least, last, 0.0, CHUNK)
    if top_p < 1:
        aim = whole * top_p * (1 - 2.0**-23)  # top_p is rounded
        bound, above = search_key(
            values, tokens, count, largest, temperature, least, last, 0.0, aim, False, False, CHUNK
        )
        if bound > -(1 << 32):
            least = bound
            needed = (aim - above) / token_weights(key_to_logit(bound), largest, temperature).to(tl.float64)
            needed = tl.ceil(needed) - 1
            at, _ = search_key(values, tokens, count, largest, temperature, least, last, 0.0, needed, True, True, CHUNK)
            last = -at
    weight, number, end = total_weight(values, tokens, count, largest, temperature, least, last, min_p, CHUNK)
    goal = uniform(uniforms, spent, row, most, number) * weight
    key, _ = search_key(values, tokens, count, largest, temperature, least, last, min_p, goal, True, False, CHUNK)
    return tl.minimum(-key, end)


@jit
def keep_kernel(
    logits, row_stride, uniforms, spent, chosen, ids, positions, active, tickets, values, tokens, tops, bounds, totals,
    vocab, most, rows, temperature, top_k, top_p, min_p,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather the logits of a row at or above its bound; the last program of the row filters them, and draws and stores
    a token. Grid [blocks, rows]."""
    start_next(PDL)
    wait_for_previous(PDL)
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    gathered = tickets + 2 * rows + row  # counts what is gathered of a row
    values += row * vocab
    tokens += row * vocab
    n = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + n, mask=n < vocab, other=float("-inf")).to(tl.float32)
    keep = (x >= tl.load(bounds + row)) & (n < vocab)
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    number = tl.sum(keep.to(tl.int32), axis=0)
    if number > 0:
        place += tl.atomic_add(gathered, number, sem="relaxed", scope="gpu")
        tl.store(values + place, x, mask=keep)
        tl.store(tokens + place, n, mask=keep)
    if is_last(tickets + rows + row, blocks):
        count = tl.load(gathered, cache_modifier=".cg")
        tl.store(gathered, 0)
        largest, total = tl.load(tops + row * blocks), tl.load(totals + row)
        finite = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        token = finish_keep(
            values, tokens, count, uniforms, spent, finite, total, row, vocab, most, temperature, top_k, top_p, min_p,
            CHUNK,
        )  # fmt: skip
        store_token(token, largest, row, chosen, ids, positions, active)


def refusal(logits: torch.Tensor) -> str | None:
    """Return the reason to fall back to torch, in a few words; None if the kernels can run."""
    if logits.shape[-1] > TOKENS:
        return f"more than {TOKENS} tokens"
    return operands.refusal(logits)


def choose_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor | None = None,
    spent: torch.Tensor | None = None,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    begun: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    tickets: torch.Tensor | None = None,
    kernel: bool | None = None,
) -> torch.Tensor:
    """Return the next token of each batch row of `logits` [batch, vocab], i64 [batch]; -1, -2 or -3 for a row whose
    largest logit is NaN, ∞ or −∞.

    At `temperature` 0 this is the likeliest token (the lowest id if several are equal). Otherwise it is drawn from the
    tokens that the filters keep (all by default): the first, by id, whose cumulative probability exceeds uniforms[row,
    spent[row]], with `uniforms` f64 [batch, most] in [0, 1). Then `spent` i64 [batch, 1] is incremented, unless only
    one token is possible. `begun` = (ids i64, positions i64, active bool), each [batch, 1], are the inputs of the next
    decode step. In rows where `active`, they are updated in place: ids to the token (0 if it is negative), positions by
    + 1. `tickets` are counters (see `zero_counters`), TICKETS per row. `kernel` is as in `uses_torch`. Raise ValueError
    if shapes do not fit, or `temperature` > 0 without `uniforms` and `spent`.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits {[*logits.shape]} must be [batch, vocab]")
    batch, vocab = logits.shape
    drawn = temperature > 0
    if drawn and (uniforms is None or spent is None or len(uniforms) != batch or spent.shape != (batch, 1)):
        raise ValueError(f"sampling {batch} rows needs {batch} rows of uniform numbers and {batch} counters")
    top_k, divisor = (top_k if top_k < vocab else 0), min(max(temperature, TINY), HUGE)
    filters = drawn and (top_k > 0 or top_p < 1 or min_p > 0)
    if uses_torch(kernel, refusal, logits):
        return _by_sorting(logits, uniforms, spent, drawn, divisor, top_k, top_p, min_p, begun)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = triton.cdiv(vocab, BLOCK)
    tickets = zero_counters(logits, TICKETS * batch) if tickets is None else tickets
    chosen = torch.empty(batch, dtype=torch.int64, device=logits.device)
    new = partial(torch.empty, device=logits.device)
    parts = new(batch, blocks * PARTS if filters else 1, dtype=torch.float32)
    tops, firsts = new(batch, blocks, dtype=torch.float32), new(batch, blocks, dtype=torch.int32)
    sums, numbers = new(batch, blocks, dtype=torch.float64), new(batch, blocks, dtype=torch.int32)
    bounds, totals = new(batch, dtype=torch.float32), new(batch, dtype=torch.float64)
    most = 1 if uniforms is None else uniforms.shape[1]
    steps = begun or (None, None, None)
    how = (divisor, float(top_k), max(top_p, TINY), min_p)
    scan_kernel[(blocks, batch)](
        logits, logits.stride(0), uniforms, spent, chosen, *steps, tickets, parts, firsts, tops, sums, numbers, bounds,
        totals, vocab, most, *how, DRAW=drawn, FILTER=filters, BLOCK=BLOCK, PARTS=PARTS,
        PLACES=triton.next_power_of_2(blocks), CHUNK=CHUNK, **options(logits),
    )  # fmt: skip
    if filters:
        values, tokens = new(batch, vocab, dtype=torch.float32), new(batch, vocab, dtype=torch.int32)
        keep_kernel[(blocks, batch)](
            logits, logits.stride(0), uniforms, spent, chosen, *steps, tickets, values, tokens, tops, bounds, totals,
            vocab, most, batch, *how, BLOCK=BLOCK, CHUNK=CHUNK, **options(logits),
        )  # fmt: skip
    return chosen


def _by_sorting(
    logits: torch.Tensor,
    uniforms: torch.Tensor | None,
    spent: torch.Tensor | None,
    drawn: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    begun: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Compute `choose_tokens` with torch, by sorting all tokens; `temperature` is above 0 and only used if `drawn`."""
    largest, token = logits.float().max(-1, keepdim=True)
    if drawn:
        assert uniforms is not None and spent is not None
        scores = (logits.float() - largest) / temperature
        falling, order = scores.sort(dim=-1, descending=True, stable=True)
        weight = falling.exp()
        if top_k > 0:
            weight = weight.masked_fill(falling < falling[:, top_k - 1 : top_k], 0)
        if top_p < 1:
            above = weight.cumsum(-1, dtype=torch.float64) - weight
            weight = weight.masked_fill(
                above >= max(top_p, TINY) * weight.sum(-1, keepdim=True, dtype=torch.float64), 0
            )
        weight = weight.masked_fill(weight < min_p, 0)
        near = (weight > 0) & (falling > -80)
        sums = torch.zeros_like(weight).scatter(-1, order, weight).cumsum(-1, dtype=torch.float64)
        aim = uniforms.gather(1, spent.clamp(max=uniforms.shape[1] - 1)) * sums[:, -1:]
        last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # of those that can be drawn: rounding may lead on
        token = torch.minimum(torch.searchsorted(sums, aim, right=True), last)
        spent += near.sum(-1, keepdim=True) > 1
    wrong = torch.where(largest.isnan(), -1, torch.where(largest > 0, -2, -3))
    token = torch.where(largest.isfinite(), token, wrong)
    if begun is not None:
        ids, positions, active = begun
        ids.copy_(torch.where(active, token.clamp(min=0), ids))
        positions.add_(active)
    return token[:, 0]
