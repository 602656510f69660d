"""Split-K attention: splits of keys, and the merge of their partial sums."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.shared import split_keys
from weft.backends.torch.kernels.shared.launch import jit, tl
from weft.backends.torch.kernels.shared.split_keys import block_rows, keys_per_split, merge_constants, merge_splits


@jit
def sizes_kernel(keys, splits, per_split, firsts, rows):
    at = tl.program_id(0)
    tl.store(per_split + at, keys_per_split(tl.load(keys + at), tl.load(splits + at), 32))
    first, number = block_rows(at, 5, 2)
    tl.store(firsts + at, first)
    tl.store(rows + at, number)


@jit
def merge_kernel(partial, state, out, splits, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    row, column = tl.arange(0, 4), tl.arange(0, 8)
    y = merge_splits(partial, state, splits, row, column, ROWS, WIDTH, STEP)
    tl.store(out + row[:, None] * 8 + column[None, :], y)


def test_keys_per_split_are_multiples_of_16_and_at_least_the_least(device: torch.device) -> None:
    keys, splits = torch.tensor([100, 1000, 1000, 10, 0, 0]), torch.tensor([2, 2, 3, 4, 1, 1])
    found = [torch.zeros(6, dtype=torch.int32, device=device) for _ in range(3)]
    sizes_kernel[(6,)](keys.to(device), splits.to(device), *found)
    assert found[0][:4].tolist() == [64, 512, 336, 32]


def test_blocks_of_rows_end_with_their_group(device: torch.device) -> None:
    """Groups of 5 rows in blocks of 2: the last block of a group has one row."""
    ones = torch.ones(6, dtype=torch.int32, device=device)
    found = [torch.zeros(6, dtype=torch.int32, device=device) for _ in range(3)]
    sizes_kernel[(6,)](ones, ones, *found)
    assert found[1].tolist() == [0, 2, 4, 5, 7, 9]
    assert found[2].tolist() == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_merged_splits_are_one_softmax(device: torch.device, step: int) -> None:
    """Five keys in splits of 2, 2 and 1; the second row sees nothing in the last split."""
    rows, width = 3, 6
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(rows, 5, generator=generator)
    scores[1, 4] = -torch.inf
    values = torch.randn(5, width, generator=generator)
    partial, state = [], []
    for s, v in zip(scores.split(2, 1), values.split(2), strict=True):
        m = s.amax(1)
        weights = torch.exp2(s - torch.where(m.isinf(), 0, m)[:, None])
        partial.append(weights @ v)
        state.append(torch.stack((m, weights.sum(1))))
    out = torch.full((4, 8), 7.0, device=device)
    stacked = [torch.stack(part).contiguous().to(device) for part in (partial, state)]
    merge_kernel[(1,)](*stacked, out, 3, ROWS=rows, WIDTH=width, STEP=step)
    wanted = torch.softmax(scores * torch.tensor(2.0).log(), 1) @ values
    torch.testing.assert_close(out[:rows, :width].cpu(), wanted)
    assert not out[rows:].any() and not out[:, width:].any()


def test_merges_take_the_same_number_of_values_at_a_time() -> None:
    for rows, width in ((1, 128), (16, 512), (64, 64)):
        sizes = merge_constants(rows, width)
        assert sizes["MERGE_ROWS"] == rows and sizes["MERGE_COLUMNS"] <= width
        assert rows * sizes["MERGE_COLUMNS"] * sizes["MERGE_STEP"] in (split_keys.MERGED, rows * sizes["MERGE_COLUMNS"])


def test_splits_occupy_the_device_up_to_the_number_of_keys() -> None:
    x = torch.zeros(1)
    assert split_keys.count_splits(x, groups=1, most=100) == split_keys.PROGRAMS * split_keys.INTERPRETED
    assert split_keys.count_splits(x, groups=4, most=100) == 2
    assert split_keys.count_splits(x, groups=5, most=100) == 1  # ten programs would be more than run at once
    assert split_keys.count_splits(x, groups=500, most=100) == 1
    assert split_keys.count_splits(x, groups=1, most=3) == 3


@pytest.mark.parametrize(("groups", "splits"), [(1, 256), (8, 32), (64, 5), (128, 3), (256, 1), (1000, 1)])
def test_programs_are_resident_together_on_an_h200(groups: int, splits: int) -> None:
    """Two for each of 132 multiprocessors, or as many more as there are groups; three of them run at once."""
    assert split_keys.splits_per_group(groups, 132) == splits
    assert groups * splits <= max(3 * 132, groups)
