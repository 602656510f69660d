"""The training loop of distillation: a student learns its teacher's distributions over the next token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .student import Student

MAX_LOGITS = 1 << 26  # limit of tokens × vocabulary in one forward pass
TOKENS_AT_ONCE = 256  # tokens whose divergence is computed at once, which limits the memory
WARM_UP = 0.05  # share of the training in which the step size rises
EVALUATIONS = 5  # on the held-back windows, during the training

Progress = Callable[[str, int, int], None]


class _Divergence(torch.autograd.Function):
    """Σ KL(p ‖ q) over logits [tokens, vocab]: p of the teacher, q of the student, which alone has a gradient."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        total = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), TOKENS_AT_ONCE):
            here = slice(start, start + TOKENS_AT_ONCE)
            log_p, log_q = teacher[here].float().log_softmax(-1), student[here].float().log_softmax(-1)
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum()
            gradient[here] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None


_divergence: Callable[[Tensor, Tensor], Tensor] = _Divergence.apply  # torch gives it no types


def sum_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return Σ KL(teacher ‖ student) in nats, summed over all tokens, for logits [batch, seq, vocab]."""
    return _divergence(student.flatten(0, 1), teacher.flatten(0, 1))


@dataclass(frozen=True)
class Outcome:
    """Mean KL divergence from the teacher on held-back windows, in nats per token, before and after `steps` steps."""

    before: float
    after: float
    steps: int

    @property
    def improved(self) -> bool:
        """Return whether the divergence became smaller; False for NaN."""
        return self.after < self.before


def distill(
    student: Student,
    teacher: nn.Module,
    windows: Tensor,
    held_back: Tensor,
    *,
    steps: int,
    batch: int,
    rate: float,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
    bf16: bool = False,
) -> Outcome:
    """Train `student` in place to match `teacher` on `windows` [n, context]; return the divergence before and after.

    held_back: windows [n, context]. The first of them, as many as fit into one forward pass, choose the best state,
    which the student has at the end (scales rounded). batch: windows per step. rate: step size of Adam relative to the
    root mean square of each parameter; it warms up, then decays to 0 along a cosine at `steps` or `seconds`, whichever
    is first. bf16: train with matrix products in bf16. progress: called with ("healing", steps done, `steps`).
    """
    loss = _Loss(student, teacher, held_back, bf16)
    before = loss.held_back_mean()
    best, least = student.copy_state(), before
    scales = [change for _, change in dict.fromkeys(student.scales.values())]
    groups = [{"params": [p], "lr": 0.0, "size": _compute_rms(p)} for p in student.vectors.values()]
    groups += [{"params": scales, "lr": 0.0, "size": 1.0}] if scales else []
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    start, count, evaluations, done = time.monotonic(), 0, 0, 0.0
    batches = _draw_batches(windows, batch, seed)
    while done < 1:
        progress("healing", count, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["size"] * _schedule_rate(done)
        loss.backward(next(batches))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        elapsed = 0.0 if seconds is None else (time.monotonic() - start) / seconds
        done = max(count / steps, elapsed)
        if int(done * EVALUATIONS) > evaluations:
            evaluations, current = int(done * EVALUATIONS), loss.held_back_mean()
            if current < least:
                best, least = student.copy_state(), current
    progress("healing", steps, steps)
    student.restore(best)
    student.round_scales()
    return Outcome(before, loss.held_back_mean(), count)


def _compute_rms(parameter: Tensor) -> float:
    return max(float(parameter.detach().square().mean().sqrt()), 1e-2)


def _schedule_rate(done: float) -> float:
    """Return the factor of the step size after the share `done` (0 to 1) of the training."""
    return min(1.0, 0.2 + done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))


def _draw_batches(windows: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield random batches [batch, context] of `windows` forever; each window occurs once before any occurs again."""
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.long)
    while True:
        while len(waiting) < min(batch, len(windows)):
            waiting = torch.cat([waiting, torch.randperm(len(windows), generator=generator)])
        yield windows[waiting[:batch]]
        waiting = waiting[batch:]


class _Loss:
    """The divergence of a student from its teacher; `at_once` windows fit into a forward pass (MAX_LOGITS)."""

    def __init__(self, student: Student, teacher: nn.Module, held_back: Tensor, bf16: bool) -> None:
        self.student, self.teacher, self.bf16 = student.module, teacher, bf16
        with torch.no_grad():
            vocab = teacher(held_back[:1, :1]).shape[-1]
            self.at_once = max(1, MAX_LOGITS // (vocab * held_back.shape[1]))
            self.held_back = held_back[: self.at_once]
            # Always in f32: rounding to bf16 would hide small differences.
            self.teacher_logits = teacher(self.held_back)

    def _forward(self, module: nn.Module, windows: Tensor) -> Tensor:
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.bf16):
            logits: Tensor = module(windows)
        return logits

    def backward(self, windows: Tensor) -> None:
        """Add the gradient of the mean divergence per token of `windows` [n, context] to the student's gradients."""
        for part in torch.split(windows, self.at_once):
            with torch.no_grad():
                teacher_logits = self._forward(self.teacher, part)
            # Cached, so that a weight with two readers, such as a tied table, is computed once.
            with parametrize.cached():
                loss = sum_divergence(self._forward(self.student, part), teacher_logits) / windows.numel()
                torch.autograd.backward(loss)

    @torch.no_grad()
    def held_back_mean(self) -> float:
        """Return the mean divergence per token of the held-back windows (at most `at_once`), in nats."""
        with parametrize.cached():
            logits = self.student(self.held_back)
        return float(sum_divergence(logits, self.teacher_logits)) / self.held_back.numel()
