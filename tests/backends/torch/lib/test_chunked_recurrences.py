"""Chunked recurrences: in one pass, in pieces and token by token, and against the references of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.backends.torch.lib import chunked_recurrences as recurrences
from weft.backends.torch.lib import convolution, state_space
from weft.ir import lookup
from weft.ir.op import Case, Op, case, normal

from .part_calls import TERMS, assert_close, check, drawn, examples, outputs, reference

BATCH, SEQ = 2, 150
Run = Callable[..., tuple[Tensor, Any]]  # operands [batch, seq, ...] and the past -> y, present


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def gates(width: int) -> Tensor:
    return -numbers(BATCH, SEQ, width).exp()


def plain(q: Tensor, k: Tensor, v: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    return recurrences.linear_recurrence(q, k, v, past=past, heads=4, groups=2)


def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    return recurrences.linear_recurrence(q, k, v, g, past=past, heads=4, groups=2)


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    return recurrences.linear_recurrence(q, short(k), v, None, beta.sigmoid(), past, heads=4, groups=2)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    return recurrences.linear_recurrence(q, short(k), v, g, beta.sigmoid(), past, heads=4, groups=2)


def short(k: Tensor) -> Tensor:
    """Normalize the keys of two groups to length 1."""
    return F.normalize(k.unflatten(-1, (2, -1)), dim=-1).flatten(-2)


def normed(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
    q, k = recurrences.elu_plus_one(q), recurrences.elu_plus_one(k)
    return recurrences.causal_linear_attention(q, k, -q, k.cos(), v, past, heads=2)


def mamba(x: Tensor, delta: Tensor, b: Tensor, c: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    return state_space.selective_scan(x, F.softplus(delta), -numbers(6, 3).exp(), b, c, numbers(6), past)


def mamba2(x: Tensor, delta: Tensor, b: Tensor, c: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    a, d = -numbers(4).exp(), numbers(4)
    return state_space.ssd(x, F.softplus(delta), a, b, c, d, past, heads=4, groups=2)


def convolved(x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    weight, bias = numbers(5, 4), numbers(5)
    if x.shape[1] == SEQ:
        return convolution.causal_conv(x, weight, bias), x[:, -3:]
    return convolution.causal_conv_from(past, x, weight, bias)


WIDTHS: dict[str, tuple[Run, tuple[int, ...], int]] = {  # and the width of gates, 0 if there are none
    "plain": (plain, (6, 6, 8), 0),
    "gated": (gated, (6, 6, 8), 4),
    "keyed": (gated, (6, 6, 8), 12),
    "delta": (delta, (6, 6, 8, 4), 0),
    "gated delta": (gated_delta, (6, 6, 8, 4), 4),
    "keyed delta": (gated_delta, (6, 6, 8, 4), 12),
    "normed": (normed, (6, 6, 8), 0),
    "mamba": (mamba, (6, 6, 3, 3), 0),
    "mamba2": (mamba2, (8, 4, 6, 6), 0),
    "convolved": (convolved, (5,), 0),
}


@pytest.mark.parametrize("pieces", [(3, 147), (64, 64, 22), (66, 1, 33, 1, 17, 32), (5, *[1] * 145)], ids=len)
@pytest.mark.parametrize("name", WIDTHS)
def test_sequences_in_pieces_continue_from_the_state(name: str, pieces: tuple[int, ...]) -> None:
    run, widths, gate_width = WIDTHS[name]
    texts = [numbers(BATCH, SEQ, w) for w in widths] + ([gates(gate_width)] if gate_width else [])
    whole, final = run(*texts, None)
    found, state = [], None
    for piece in zip(*(t.split(pieces, 1) for t in texts), strict=True):
        y, state = run(*piece, state)
        found.append(y)
    bound = 64 * torch.finfo(torch.float64).eps * SEQ**0.5
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=bound * float(whole.abs().max()))
    torch.testing.assert_close(state, final, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", [name for name in WIDTHS if name != "convolved"])
def test_first_token_needs_no_state(name: str) -> None:
    """A zero token after it changes nothing before."""
    run, widths, gate_width = WIDTHS[name]
    texts = [numbers(BATCH, 1, w) for w in widths] + ([-numbers(BATCH, 1, gate_width).exp()] if gate_width else [])
    doubled = [F.pad(t, (0, 0, 0, 1)) for t in texts]
    torch.testing.assert_close(run(*texts, None)[0], run(*doubled, None)[0][:, :1], rtol=1e-13, atol=1e-13)


def test_large_mamba_states_run_token_by_token_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks side by side they would not fit into the caches of a CPU."""
    texts = [numbers(BATCH, SEQ, width) for width in WIDTHS["mamba"][1]]
    wanted, state = mamba(*texts, None)
    monkeypatch.setattr(state_space, "MOST_ON_CPUS", 0)
    monkeypatch.delattr(state_space, "scan_chunks")
    torch.testing.assert_close(mamba(*texts, None), (wanted, state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "example", "dtype"), examples("gated_linear_attention", "gated_delta_rule", "linear_attention")
)
def test_cases_agree_with_the_reference(op: Op, example: Case, dtype: torch.dtype) -> None:
    check(op, example, dtype)


@pytest.mark.parametrize(("seq", "gates"), [(200, 4), (50, 12)], ids=["per head", "per key"])
@pytest.mark.parametrize("steep", [0.01, 1.0, 1e4])
def test_gates_of_many_magnitudes_neither_overflow_nor_underflow(
    seq: int, gates: int, steep: float, rng: np.random.Generator
) -> None:
    """Gates that differ by orders of magnitude from token to token: neither overflow nor lost small ones."""
    qkv = normal(2, seq, 6), normal(2, seq, 6), normal(2, seq, 20)
    decay = -np.exp(rng.uniform(-8, 0, (2, seq, gates))) * np.where(rng.random((2, seq, gates)) < 0.2, steep, 0.1)
    check(lookup("gated_linear_attention"), case(*qkv, decay, normal(2, 4, 3, 5), heads=4, groups=2), torch.float32)


def test_states_keep_f32_with_bf16_tokens() -> None:
    """A sum of thousands of terms needs more than 8 bits: the state keeps its own dtype."""
    for name in ("gated_linear_attention", "selective_scan", "ssd"):
        op = lookup(name)
        example = next(c for c in op.cases if len(c.operands) == len(op.operands))
        operands = drawn(example, torch.bfloat16)
        operands[-1] = drawn(example, torch.float32)[-1]
        y, state = outputs(op, example, operands)
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        want = reference(op, operands, **example.attrs)
        assert_close(y, want[0], 1, TERMS)
        assert_close(state, want[1], 0, TERMS)
