"""Recurrences with a step function, token by token and many tokens in parallel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.backends.torch.lib import scan as file
from weft.backends.torch.lib.scan import affine_states, by_token, fill_hidden, from_matrices, matrix_steps, scan


def count(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Add x to the state and return it twice as the output."""
    return state + x, 2 * (state + x)


def test_scan_runs_token_by_token_from_the_initial_state() -> None:
    x = torch.tensor([[[1.0], [2.0], [3.0]]])
    y, last = scan(count, (((1,), 10.0),), (x,))
    assert y.flatten().tolist() == [22, 26, 32] and last.flatten().tolist() == [16]
    y, last = scan(count, (((1,), 10.0),), (x,), past=torch.tensor([[0.0]]))
    assert y.flatten().tolist() == [2, 6, 12] and last.flatten().tolist() == [6]


def test_masked_tokens_do_not_change_the_state() -> None:
    x, mask = torch.ones(2, 3, 1), torch.tensor([[1, 1, 0], [0, 1, 1]])
    _, last = scan(count, (((1,), 0.0),), (x,), mask=mask)
    assert last.flatten().tolist() == [2, 2]
    assert fill_hidden(x, mask, -7.0)[..., 0].tolist() == [[1, 1, -7], [-7, 1, 1]]
    assert fill_hidden(x, None, -7.0) is x


def test_scan_computes_in_f32_and_returns_the_dtype_of_tokens() -> None:
    x = torch.full((1, 3, 1), 1 / 256, dtype=torch.bfloat16)
    y, last = scan(count, (((1,), 1.0),), (x,))
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32 and last.item() == 1 + 3 / 256  # bf16 would round it


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_scan_of_several_tokens_at_a_time_carries_the_state_over(size: int) -> None:
    def many(states: tuple[Tensor], tokens: tuple[Tensor], constants: object, mask: object) -> object:
        sums = states[0][:, None] + tokens[0].cumsum(1)
        return (sums[:, -1],), (2 * sums,)

    x = torch.arange(1.0, 8.0).view(1, 7, 1)
    for found, wanted in zip(
        scan(count, (((1,), 1.0),), (x,), many=many, size=size), scan(count, (((1,), 1.0),), (x,)), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("seq", [1, 2, 7, 16])
@pytest.mark.parametrize("present", ["both", "factor", "term"])
def test_affine_states_are_the_recurrence(seq: int, present: str) -> None:
    generator = torch.Generator().manual_seed(seq)
    a, b = (torch.randn(2, seq, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    state = first = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    wanted = []
    for t in range(seq):
        state = (1 if present == "term" else a[:, t]) * state + (0 if present == "factor" else b[:, t])
        wanted.append(state)
    found, last = affine_states(None if present == "term" else a, None if present == "factor" else b, first)
    torch.testing.assert_close(found, torch.stack(wanted, 1))
    torch.testing.assert_close(last, state)


def test_states_before_shifts_by_one_token() -> None:
    first, states = torch.tensor([[0.0]]), torch.tensor([[[1.0], [2.0]]])
    assert file.states_before(first, states).flatten().tolist() == [0, 1]


def test_by_token_flattens_batch_and_sequence() -> None:
    (y,) = by_token(lambda x, w: (x @ w,), (torch.ones(2, 3, 4),), (torch.ones(4, 5),))
    assert y.shape == (2, 3, 5) and torch.all(y == 4)


@pytest.mark.parametrize("seq", [1, 5, 13])
def test_matrix_steps_are_one_by_one(seq: int) -> None:
    """S = M S + x for a state of two columns, M different for every token; a mask skips one."""

    def step(state: Tensor, matrix: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = matrix @ state + x
        return state, state.sum(-1)

    def linear(state: Tensor, matrix: Tensor, x: Tensor) -> tuple[Tensor]:
        return (matrix @ state,)

    generator = torch.Generator().manual_seed(4)
    matrix, x = (torch.randn(2, seq, 3, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    state, mask = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64), torch.ones(2, seq)
    mask[1, 0] = 0
    wanted = file.one_by_one(step, (state,), (matrix, x), (), mask)
    found = matrix_steps(step, (linear,), (((0, 1, 2), True),), (state,), (matrix, x), (), mask)
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("order", "columns"), [((0, 1, 2), False), ((0, 1, 3, 2), True), ((0, 2, 3, 1), True)])
def test_from_matrices_is_the_inverse_of_to_matrices(order: tuple[int, ...], columns: bool) -> None:
    state = torch.arange(2.0 * 3 * 4 * (5 if columns else 1)).view(2, 3, 4, *([5] if columns else []))
    matrices = file.to_matrices(state, order, columns)
    assert matrices.dim() == 4
    assert torch.equal(from_matrices(matrices, order, columns, state), state)


def test_in_chunks_pads_the_last_chunk_with_zeros() -> None:
    assert file.in_chunks(torch.arange(1.0, 6.0).view(1, 5, 1), 2, 3)[..., 0].tolist() == [[1, 2, 3], [4, 5, 0]]
