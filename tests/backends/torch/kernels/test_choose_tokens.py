"""The choice of tokens against the samplers of the host, which work with numpy, and against plain sums in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.runtime.core.sampler import Sampler, Sampling
from weft.backends.torch.kernels.choose_tokens import TICKETS, choose_tokens, refusal
from weft.ir import ops
from weft.ir.op import Case

from ....sampling import ALL, each
from .oracles import draw

reference = partial(choose_tokens, kernel=False)

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 9},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 3.0, "top_p": 0.97},
    {"temperature": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1e-45, "top_p": 0.9},
    {"temperature": 1e-30, "top_k": 2},
    {"temperature": 1e30, "top_p": 0.5},
]
DRAWS = 3 if ALL else 2  # of each row, one after the other


def tokens(compute: Any, logits: torch.Tensor, numbers: np.ndarray, **way: Any) -> list[list[int]]:
    """The tokens of each row, drawn by its numbers in turn."""
    uniforms = torch.from_numpy(numbers).to(logits.device)
    spent = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    found = [compute(logits, uniforms, spent, **way).tolist() for _ in range(numbers.shape[1])]
    return [[*row] for row in zip(*found, strict=True)]


@pytest.mark.halved
@pytest.mark.parametrize(("vocab", "way"), each(3, ((vocab, way) for vocab in (1, 37, 2500) for way in WAYS)), ids=str)
def test_tokens_are_those_of_the_numpy_samplers(device: torch.device, vocab: int, way: dict[str, Any]) -> None:
    logits = 3 * draw(3, vocab, seed=1, dtype=torch.float32, device=device)
    logits[1] -= 300
    logits[2, vocab // 2 :] = -torch.inf
    logits[2, 0] = 0.5
    samplers = [Sampler(Sampling(**way, seed=5), [], row) for row in range(3)]
    numbers = np.stack([s.draw_uniforms(DRAWS) for s in samplers])
    want = []
    for row, values in enumerate(logits.cpu().numpy()):
        sampler = Sampler(Sampling(**way, seed=5), [], row)
        want.append([sampler(values) for _ in range(DRAWS)])
    for compute in (choose_tokens, reference):
        assert tokens(compute, logits, numbers, **way) == want
    exact = ops.choose_tokens.reference(logits.cpu().double().numpy(), numbers[:, :1], **way)
    assert exact.tolist() == [row[:1] for row in want]


@pytest.mark.parametrize("case", ops.choose_tokens.cases, ids=lambda case: str(case.attrs))
def test_kernel_agrees_with_the_op(device: torch.device, case: Case) -> None:
    logits, *numbers = (torch.from_numpy(a).to(device) for a in case.draw() if a is not None)
    spent = [torch.zeros(len(logits), 1, dtype=torch.int64, device=device) for _ in numbers]
    want = ops.choose_tokens.reference(*case.draw(), **case.attrs)[:, 0].tolist()
    for compute in (choose_tokens, reference):
        assert compute(logits.float(), *numbers, *spent, **case.attrs).tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [5, 2048, 4100])
def test_greedy_tokens_are_written_for_the_next_step(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    """Of equals the first; rows that are not active stay as they are."""
    for compute in (choose_tokens, reference):
        logits = draw(4, 2 * vocab, seed=2, dtype=dtype, device=device)[:, :vocab]
        logits[0, [vocab // 2, vocab - 1]] = 9
        ids, positions = torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]], device=device)[:, :, None].clone()
        active = torch.tensor([True, True, False, True], device=device)[:, None]
        tickets = torch.zeros(4 * TICKETS, dtype=torch.int32, device=device)
        want = logits.float().argmax(-1)
        for _ in range(2):
            assert compute(logits, begun=(ids, positions, active), tickets=tickets).equal(want)
        assert want[0] == vocab // 2 and not tickets.any()
        assert ids[:, 0].tolist() == [want[0], want[1], 3, want[3]]
        assert positions[:, 0].tolist() == [12, 22, 30, 42]


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9}], ids=str)
def test_nan_logits_are_reported(device: torch.device, way: dict[str, Any]) -> None:
    logits = draw(4, 3000, seed=3, dtype=torch.float32, device=device)
    logits[0, 2900], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    ids, positions = torch.full((2, 4, 1), 5, device=device)
    active = torch.ones(4, 1, dtype=torch.bool, device=device)
    for compute in (choose_tokens, reference):
        uniforms, spent = torch.full((4, 2), 0.3, device=device).double(), torch.zeros(4, 1, device=device).long()
        found = compute(logits, uniforms, spent, **way, begun=(ids, positions, active))
        assert found[:3].tolist() == [-1, -2, -3] and found[3] >= 0
        assert ids[:3].tolist() == [[0]] * 3


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 500), (0.1, 100), (0.0005, 1), (0.9995, 1000), (0.7, 700)])
def test_the_first_of_equal_logits_reach_top_p(device: torch.device, top_p: float, kept: int) -> None:
    """The largest number below 1 draws the last token that is kept."""
    numbers = np.full((1, 1), 1 - 2.0**-40)
    for compute in (choose_tokens, reference):
        assert tokens(compute, torch.zeros(1, 1000, device=device), numbers, temperature=1.0, top_p=top_p) == [
            [kept - 1]
        ]
    ids, _ = Sampler(Sampling(temperature=1.0, top_p=top_p), []).filter_candidates(np.zeros(1000, np.float32))
    assert ids.tolist() == [*range(kept)]


def test_top_k_keeps_all_that_tie_with_the_last(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3, 2, 2, 0, 2, -1]], device=device)
    for compute in (choose_tokens, reference):
        found = {
            tokens(compute, logits, np.full((1, 1), u), temperature=5.0, top_k=2)[0][0]
            for u in np.linspace(0, 0.999, 9)
        }
        assert found == {1, 2, 3, 5}


def test_tokens_are_drawn_with_their_probabilities(device: torch.device) -> None:
    """A grid of numbers draws each token as often as its probability says, within one point of the grid."""
    logits, points = 2 * draw(1, 90, seed=4, dtype=torch.float32, device=device), 40
    p = (logits[0].double() / 1.4).softmax(-1).cpu().numpy()
    grid = (np.arange(points) + 0.5) / points
    found = [tokens(choose_tokens, logits, np.full((1, 1), u), temperature=1.4)[0][0] for u in grid]
    assert np.abs(np.bincount(found, minlength=90) - points * p).max() <= 1


def test_no_random_number_is_used_for_a_single_candidate(device: torch.device) -> None:
    logits = torch.zeros(3, 4000, device=device)
    logits[0, 2500], logits[1, 2500], logits[1, 3] = 90, 90, 20
    for way, want in (({}, [0, 1, 1]), ({"top_k": 1}, [0, 0, 1]), ({"min_p": 0.5}, [0, 0, 1])):
        for compute in (choose_tokens, reference):
            uniforms, spent = torch.full((3, 2), 0.2, device=device).double(), torch.zeros(3, 1, device=device).long()
            compute(logits, uniforms, spent, temperature=1.0, **way)
            assert spent[:, 0].tolist() == want


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 5, device=device)
    with pytest.raises(ValueError, match=r"logits \[5\] must be \[batch, vocab\]"):
        choose_tokens(logits[0])
    with pytest.raises(ValueError, match="sampling 2 rows needs 2 rows of uniform numbers and 2 counters"):
        choose_tokens(logits, temperature=1.0)
    assert refusal(logits.double()) == "the kernel computes in f32"
    assert refusal(torch.zeros(1, 1, device=device).expand(1, 2_000_000)) == "more than 1048576 tokens"
