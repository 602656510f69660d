"""Attention whose keys are split between programs, and whose partial sums become one output in the same launch.

Each program stores its sum, not divided yet, with the maximum and the total of its weights, and takes a ticket; the one
with the last ticket merges the partial sums in the order of their splits, so the result does not depend on who came
last. It puts the counter of tickets back to 0, ready for the next launch or replay of a CUDA graph. (Flash-Decoding,
Dao 2023, takes a second launch.)
"""

from __future__ import annotations

import torch

from .launch import jit, tl

MOST = 128  # splits
PROGRAMS = 2  # per multiprocessor at the least: loads of one pass the time of another's arithmetic
INTERPRETED = 3  # multiprocessors of the device that the interpreter plays
MERGED = 4096  # numbers that a program merges at a time: 32 registers of each of 128 threads

_counters: dict[tuple[int, int], torch.Tensor] = {}


@jit
def per_split(keys, splits, LEAST: tl.constexpr):
    """How many of `keys` keys a split takes: LEAST or more, a multiple of 16."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), 16) * 16, LEAST)


@jit
def store_part(partial, state, acc, m, total, split, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store what a split makes of `row` [r] and `column` [c]: acc [r, c], its maximum m [r] and its total [r].

    partial f32 [splits, ROWS, WIDTH] are sums of 2^(score − m) · v; state f32 [splits, 2, ROWS] are m and total.
    """
    there = row < ROWS
    mine = split * ROWS + row
    tl.store(partial + mine[:, None] * WIDTH + column[None, :], acc, there[:, None] & (column < WIDTH)[None, :])
    tl.store(state + mine + split * ROWS, m, there)
    tl.store(state + mine + (split + 1) * ROWS, total, there)


@jit
def is_last(ticket, programs):
    """Whether this is the last of `programs` programs to come here; what all of them stored is then visible to it."""
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(ticket, 0)
    return last


@jit
def merged(partial, state, splits, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """softmax(scores) v, f32 [r, c], of `row` [r] and `column` [c] from what `splits` splits stored, STEP at a time.

    Rows and columns outside of ROWS and WIDTH come out as 0.
    """
    one = row[:, None] * WIDTH + column[None, :]
    real = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    highest = tl.full(row.shape, -float("inf"), tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros(one.shape, tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        known = (split < splits)[:, None] & (row < ROWS)[None, :]
        at = state + split[:, None] * (2 * ROWS) + row[None, :]
        m = tl.load(at, known, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(at + ROWS, known, other=0.0, cache_modifier=".cg")
        here = partial + split[:, None, None] * (ROWS * WIDTH) + one[None]
        part = tl.load(here, (split < splits)[:, None, None] & real[None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(m, 0))
        base = tl.where(row < ROWS, higher, 0.0)  # rows outside have no maximum
        share = tl.exp2(m - base[None, :])
        old = tl.exp2(highest - base)
        total = total * old + tl.sum(part_total * share, 0)
        acc = acc * old[:, None] + tl.sum(part * share[:, :, None], 0)
        highest = higher
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


def merging(rows: int, width: int) -> dict[str, int]:
    """How a program merges `rows` rows of `width` columns (powers of 2): so many columns and splits at a time."""
    columns = min(width, max(32, MERGED // rows // 8))
    return {"MERGE_ROWS": rows, "MERGE_COLUMNS": columns, "MERGE_STEP": max(1, MERGED // (rows * columns))}


def count(x: torch.Tensor, groups: int, most: int) -> int:
    """Into how many parts keys are split, at most `most`, if one part takes `groups` programs on the device of x."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED
    return max(1, min(-(-PROGRAMS * processors // groups), most, MOST))


def tickets(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Counters i32 [groups] at 0 on the device of x, which all launches on a stream share, since they come in turn.

    In a CUDA graph under capture they are new, and each replay first sets them to 0, a kernel more. A model that is
    captured saves that if it keeps `torch.zeros(groups, dtype=torch.int32)` of its own.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros(groups, dtype=torch.int32, device=x.device)
    key = (x.get_device(), torch.cuda.current_stream(x.device).cuda_stream)
    if key not in _counters or len(_counters[key]) < groups:
        _counters[key] = torch.zeros(groups, dtype=torch.int32, device=x.device)
    return _counters[key]
