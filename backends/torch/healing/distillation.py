"""Distillation: train a student until its distributions over the next token are its teacher's."""

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

NUMBERS = 1 << 26  # logits that are computed together, and that are kept of the teacher: tokens × vocabulary
ROWS = 256  # tokens whose distributions are compared together
WARM_UP = 0.05  # of the schedule
LOOKS = 5  # at the held-back windows during the training

Progress = Callable[[str, int, int], None]


class _Divergence(torch.autograd.Function):
    """Σ KL(p ‖ q) over rows, p and q being the distributions of the logits [rows, vocab] of teacher and student."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        total = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), ROWS):
            here = slice(start, start + ROWS)
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


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ KL(teacher ‖ student) over all positions of logits [batch, seq, vocab], in nats."""
    return _divergence(student.flatten(0, 1), teacher.flatten(0, 1))


@dataclass(frozen=True)
class Outcome:
    """The mean KL divergence from the teacher on the held-back windows before and after, and the steps taken."""

    before: float
    after: float
    steps: int

    @property
    def improved(self) -> bool:
        """Return whether the divergence has become smaller; one that is no number has not."""
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
    """Train `student` on `windows` [n, context], `batch` of them a step, and leave it as it was when its divergence
    from `teacher` on `held_back` was least, its scales rounded.

    `rate` is the step size of Adam, relative to what it changes. It rises, and falls to 0 along a cosine, by `steps`
    or, if that ends earlier, within `seconds`. With `bf16` matrix products are computed in it, where models train.
    """
    loss = _Loss(student, teacher, held_back, bf16)
    before = loss.held_back_mean()
    best, least = student.state(), before
    scales = [change for _, change in dict.fromkeys(student.scales.values())]
    groups = [{"params": [p], "lr": 0.0, "size": _size(p)} for p in student.vectors.values()]
    groups += [{"params": scales, "lr": 0.0, "size": 1.0}] if scales else []
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    began, taken, looks, done = time.monotonic(), 0, 0, 0.0
    batches = _batches(windows, batch, seed)
    while done < 1:
        progress("healing", taken, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["size"] * _schedule(done)
        loss.backward(next(batches))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken += 1
        elapsed = 0.0 if seconds is None else (time.monotonic() - began) / seconds
        done = max(taken / steps, elapsed)
        if int(done * LOOKS) > looks:
            looks, found = int(done * LOOKS), loss.held_back_mean()
            if found < least:
                best, least = student.state(), found
    progress("healing", steps, steps)
    student.restore(best)
    student.round_scales()
    return Outcome(before, loss.held_back_mean(), taken)


def _size(parameter: Tensor) -> float:
    """The root mean square of a vector, and something small for one of zeros."""
    return max(float(parameter.detach().square().mean().sqrt()), 1e-2)


def _schedule(done: float) -> float:
    """The step size after a share `done` of the training, of its largest."""
    return min(1.0, 0.2 + done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))


def _batches(windows: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches without end, every window once before any again."""
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.long)
    while True:
        while len(waiting) < min(batch, len(windows)):
            waiting = torch.cat([waiting, torch.randperm(len(windows), generator=generator)])
        yield windows[waiting[:batch]]
        waiting = waiting[batch:]


class _Loss:
    """The divergence of a student from its teacher, of so few windows at once as memory allows."""

    def __init__(self, student: Student, teacher: nn.Module, held_back: Tensor, bf16: bool) -> None:
        self.student, self.teacher, self.bf16 = student.module, teacher, bf16
        with torch.no_grad():
            vocab = teacher(held_back[:1, :1]).shape[-1]
            self.together = max(1, NUMBERS // (vocab * held_back.shape[1]))
            self.held_back = held_back[: self.together]
            # In f32 whatever trains: what rounding to bf16 adds would hide small differences.
            self.wanted = teacher(self.held_back)

    def _computed(self, module: nn.Module, windows: Tensor) -> Tensor:
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self.bf16):
            logits: Tensor = module(windows)
        return logits

    def backward(self, windows: Tensor) -> None:
        """Add the gradient of the mean over the tokens of `windows`."""
        for part in torch.split(windows, self.together):
            with torch.no_grad():
                wanted = self._computed(self.teacher, part)
            # Cached: a weight that is read twice, as a tied table is, is computed once.
            with parametrize.cached():
                loss = divergence(self._computed(self.student, part), wanted) / windows.numel()
                torch.autograd.backward(loss)

    @torch.no_grad()
    def held_back_mean(self) -> float:
        """The mean over the tokens of the held-back windows."""
        with parametrize.cached():
            found = self.student(self.held_back)
        return float(divergence(found, self.wanted)) / self.held_back.numel()
