"""Batches: every window once per epoch, other windows with a shift, and the same batches after a resumption."""

from __future__ import annotations

import numpy as np

from weft.backends.torch.training.batches import Windows


def starts(data: Windows, start: int, count: int) -> list[int]:
    return data.draw(start, count).windows[:, 0].tolist()


def test_every_window_occurs_once_per_epoch_in_another_order() -> None:
    data = Windows(np.arange(33, dtype=np.uint16), 9, 4)
    assert len(data) == 7
    first, second = starts(data, 0, 7), starts(data, 7, 7)
    assert sorted(first) == sorted(second) == [0, 4, 8, 12, 16, 20, 24]
    assert first != second
    batch = data.draw(5, 4)  # of two epochs
    assert batch.windows[:, 0].tolist() == [*first[5:], *second[:2]]
    assert batch.indices.tolist() == [n // 4 for n in batch.windows[:, 0].tolist()]
    assert all((row.diff() == 1).all() for row in batch.windows)


def test_batches_depend_only_on_the_seed_and_their_number() -> None:
    data = Windows(np.arange(1000), 17, 16, seed=3, shift=True)
    parts = [n for i in range(0, 150, 15) for n in starts(Windows(np.arange(1000), 17, 16, seed=3, shift=True), i, 15)]
    assert starts(data, 0, 150) == parts
    assert starts(data, 0, 150) != starts(Windows(np.arange(1000), 17, 16, seed=4, shift=True), 0, 150)


def test_a_shift_moves_the_windows_of_each_epoch_within_the_text() -> None:
    data = Windows(np.arange(100), 9, 8, shift=True)
    offsets = {starts(data, epoch * len(data), 1)[0] % 8 for epoch in range(40)}
    assert offsets == set(range(8))
    assert data.draw(0, 40 * len(data)).windows.max() <= 99


def test_special_tokens_replace_the_ends_of_windows() -> None:
    tokens = np.arange(100, 120)
    batch = Windows(tokens, 6, 6, begin=(1, 2), end=(3,)).read(np.array([2, 0]))
    assert batch.windows.tolist() == [[1, 2, 114, 115, 116, 3], [1, 2, 102, 103, 104, 3]]
    assert tokens.tolist() == list(range(100, 120))


def test_windows_are_read_by_number_and_split() -> None:
    data = Windows(np.arange(100), 9, 8, shift=True)
    batch = data.read(np.array([3, 0, 5]))
    assert batch.windows[:, 0].tolist() == [24, 0, 40]
    assert [part.indices.tolist() for part in batch.split(2)] == [[3, 0], [5]]
