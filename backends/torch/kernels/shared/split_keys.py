"""Split-K attention: merging the partial sums of programs that each attend to a part of the keys.

Each program stores its unnormalized sum with the maximum and the total of its weights (Flash-Decoding, Dao 2023). If
the partial sums are small, each program takes a ticket, and the program with the last ticket merges them in the same
launch and resets the ticket counter to 0 for the next launch or CUDA graph replay. If they are large, such as all heads
of a latent cache, one program would take longer to read them than a second launch costs, so a second kernel merges them
with many programs. Both merge in the order of the splits, so the result does not depend on the order of arrival.
"""

from __future__ import annotations

from typing import Any

import torch

from .launch import jit, options, start_next, tl, wait_for_previous
from .operands import power_of_2
from .tickets import is_last, zero_counters

MOST = 256  # splits
PROGRAMS = 2  # per multiprocessor, where they fit: loads of one pass the time of another's arithmetic
RESIDENT = 3  # programs that a multiprocessor runs at once
INTERPRETED = 3  # multiprocessors of the device that the interpreter plays
INSIDE = 128 * 1024  # bytes of partial sums that one program merges in the time of a launch
MERGED = 8192  # numbers that a program merges at a time: 64 registers of each of 128 threads


@jit
def keys_per_split(keys, splits, LEAST: tl.constexpr):
    """Return the number of keys per split: ⌈keys / splits⌉ rounded up to a multiple of 16, or LEAST if larger."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), 16) * 16, LEAST)


@jit
def block_rows(group, GROUP: tl.constexpr, TAKEN: tl.constexpr):
    """Return the first row of block number `group`, and the number of its rows. Each GROUP consecutive rows are cut
    into blocks of TAKEN rows; the last of these blocks may have fewer."""
    BLOCKS: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    block = group % BLOCKS
    return group // BLOCKS * GROUP + block * TAKEN, tl.minimum(GROUP - block * TAKEN, TAKEN)


@jit
def merge_splits(partial, state, splits, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return softmax(scores) v, f32 [r, c], at rows `row` [r] and columns `column` [c] of a block, from the partial
    sums of its `splits` splits: `partial` [splits, ROWS, WIDTH] and `state` [splits, 2, ROWS]. STEP splits are read at
    a time. Results outside of ROWS and WIDTH are 0."""
    cell = row[:, None] * WIDTH + column[None, :]
    real = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    highest = tl.full(row.shape, -float("inf"), tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros(cell.shape, tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        valid = (split < splits)[:, None] & (row < ROWS)[None, :]
        at = state + split[:, None] * (2 * ROWS) + row[None, :]
        m = tl.load(at, valid, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(at + ROWS, valid, other=0.0, cache_modifier=".cg")
        here = partial + split[:, None, None] * (ROWS * WIDTH) + cell[None]
        part = tl.load(here, (split < splits)[:, None, None] & real[None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(m, 0))
        base = tl.where(row < ROWS, higher, 0.0)  # rows outside have no maximum
        share = tl.exp2(m - base[None, :])
        old = tl.exp2(highest - base)
        total = total * old + tl.sum(part_total * share, 0)
        acc = acc * old[:, None] + tl.sum(part * share[:, :, None], 0)
        highest = higher
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def merge_if_last(
    out, partial, state, ticket, splits, rows,
    TAKEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Take a ticket of a block; with the last of `splits`, merge the block's partial sums into `out` [rows, WIDTH]."""
    if is_last(ticket, splits):
        row = tl.arange(0, ROWS)
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            y = merge_splits(partial, state, splits, row, column, TAKEN, WIDTH, STEP)
            here = out + row[:, None] * WIDTH + column[None, :]
            tl.store(here, y.to(out.dtype.element_ty), (row < rows)[:, None] & (column < WIDTH)[None, :])


@jit
def store_split(
    out, partial, state, tickets, acc, m, total, group, split, splits, used,
    GROUP: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_COLUMNS: tl.constexpr, MERGE_STEP: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of split `split` of block `group`. If it is the block's only split with keys (`used` is
    1), store the output instead. If INSIDE, the last of the block's `used` programs merges the partial sums.

    Each block (see `block_rows`) is TAKEN of the GROUP rows of `out` […, GROUP, WIDTH]. acc [r, c] is the sum of
    2^(score − m) · v, m [r] the maxima, `total` [r] the sums of the weights; r ≥ TAKEN, c ≥ WIDTH. Scratch: partial f32
    [blocks, splits, TAKEN, WIDTH], state f32 [blocks, splits, 2, TAKEN], tickets i32 [blocks]. Tickets are counters if
    INSIDE, else they receive `used`, for `merge_kernel`.
    """
    row, column = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    within = (column < WIDTH)[None, :]
    first, rows = block_rows(group, GROUP, TAKEN)
    out += first.to(tl.int64) * WIDTH
    if not INSIDE:
        tl.store(tickets + group, used, split == 0)
    if used == 1:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        here = out + row[:, None] * WIDTH + column[None, :]
        tl.store(here, y.to(out.dtype.element_ty), (row < rows)[:, None] & within)
    else:
        partial += group.to(tl.int64) * splits * (TAKEN * WIDTH)
        state += group * splits * (2 * TAKEN)
        mine = split * TAKEN + row
        tl.store(partial + mine[:, None] * WIDTH + column[None, :], acc, (row < TAKEN)[:, None] & within)
        tl.store(state + mine + split * TAKEN, m, row < TAKEN)
        tl.store(state + mine + (split + 1) * TAKEN, total, row < TAKEN)
        if INSIDE:
            merge_if_last(
                out, partial, state, tickets + group, used, rows, TAKEN, WIDTH, MERGE_ROWS, MERGE_COLUMNS, MERGE_STEP
            )


@jit
def merge_kernel(
    out, partial, state, used, splits,
    GROUP: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge into `out` the partial sums that `store_split` stored. Grid [TAKEN, ⌈WIDTH / COLUMNS⌉, blocks of rows
    (`block_rows`)]: a program merges one row of a block in COLUMNS columns. It returns at once if the block has one
    split (`used` is 1) or fewer rows."""
    group = tl.program_id(2)
    start_next(PDL)
    wait_for_previous(PDL)
    programs = tl.load(used + group)
    first, rows = block_rows(group, GROUP, TAKEN)
    if (programs == 1) | (tl.program_id(0) >= rows):
        return
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    partial += group.to(tl.int64) * splits * (TAKEN * WIDTH)
    y = merge_splits(partial, state + group * splits * (2 * TAKEN), programs, row, column, TAKEN, WIDTH, STEP)
    here = out + (first + row).to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(here, y.to(out.dtype.element_ty), (column < WIDTH)[None, :])


def merge_constants(rows: int, width: int) -> dict[str, int]:
    """Return MERGE_ROWS, MERGE_COLUMNS and MERGE_STEP of `store_split`, to merge blocks of `rows` rows and `width`
    columns, both powers of 2."""
    columns = min(width, max(32, MERGED // rows // 16))
    return {"MERGE_ROWS": rows, "MERGE_COLUMNS": columns, "MERGE_STEP": max(1, MERGED // (rows * columns))}


def count_splits(x: torch.Tensor, groups: int, most: int) -> int:
    """Return the number of key splits, 1 to `most`, that occupies the device of x. Each split has `groups` programs."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED
    return max(1, min(splits_per_group(groups, processors), most, MOST))


def splits_per_group(groups: int, processors: int) -> int:
    """Return the number of key splits, each of `groups` programs, that gives each of `processors` multiprocessors
    PROGRAMS programs or more. If that exceeds RESIDENT programs per multiprocessor, so that some would wait, take one
    split less, provided that each still has a program. Round down to a multiple of 16 from 16 on: splits are merged 16
    at a time."""
    splits = -(-PROGRAMS * processors // groups)
    if splits > 1 and groups * splits > RESIDENT * processors and groups * (splits - 1) >= processors:
        splits -= 1
    return splits if splits < 16 else splits // 16 * 16


def launch(
    kernel: Any,
    operands: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    out: torch.Tensor,
    groups: int,
    most: int,
    splits: int | None,
    tickets: torch.Tensor | None,
    warps: int = 4,
) -> torch.Tensor:
    """Launch kernel(*operands, out, partial, state, tickets, *numbers), which calls `store_split`, on the grid [splits,
    groups, batch], then `merge_kernel` if the partial sums exceed INSIDE; return `out` [batch, heads, width].
    `constants` include GROUP and TAKEN; `groups` is the number of blocks of a batch row. `splits` None is the number
    that occupies the device, up to `most`. `tickets` None takes shared counters."""
    batch, _, width = out.shape
    rows, blocks = constants["TAKEN"], batch * groups
    splits = splits or count_splits(out, blocks, most)
    inside = splits * rows * width * 4 <= INSIDE
    partial = out.new_empty(blocks * splits * rows * width, dtype=torch.float32)
    state = out.new_empty(blocks * splits * rows * 2, dtype=torch.float32)
    if not inside:
        tickets = out.new_empty(blocks, dtype=torch.int32)
    elif tickets is None:
        tickets = zero_counters(out, blocks)
    constants = {**constants, "INSIDE": inside, "INTERP": not out.is_cuda}
    kernel[splits, groups, batch](*operands, out, partial, state, tickets, *numbers, **constants, **options(out, warps))
    if not inside:
        shape = _merge_shape(constants["GROUP"], rows, width)
        grid = (rows, -(-width // shape["COLUMNS"]), blocks)
        merge_kernel[grid](out, partial, state, tickets, splits, **shape, **options(out))
    return out


def _merge_shape(group: int, taken: int, width: int) -> dict[str, int]:
    columns = min(128, power_of_2(width))
    return {"GROUP": group, "TAKEN": taken, "WIDTH": width, "COLUMNS": columns, "STEP": MERGED // columns}
