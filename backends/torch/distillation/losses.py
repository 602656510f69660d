"""Losses of a student against its teacher: divergence of predictions, and errors of single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from weft.ir.errors import WeftError

from ..training.batches import WindowBatch
from ..training.objectives import run_windows, split_outputs

TOKENS_AT_ONCE = 256  # tokens whose divergence is computed at once, which limits the memory


class _Divergence(torch.autograd.Function):
    """Σ KL(p ‖ q) over the tokens of logits [tokens, vocab] of a student (q), which alone has a gradient.

    The teacher's p is `log_p` of the tokens `ids`, both [tokens, k]. The tokens not in `ids` count as one: their
    probability is the remaining 1 − Σp.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, log_p: Tensor, ids: Tensor | None) -> Tensor:
        total = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), TOKENS_AT_ONCE):
            here = slice(start, start + TOKENS_AT_ONCE)
            log_q, log_t = student[here].float().log_softmax(-1), log_p[here].float()
            p, q = log_t.exp(), log_q.exp()
            if ids is None:
                total += (p * (log_t - log_q)).sum()
                gradient[here] = q.sub_(p)
                continue
            chosen = ids[here].long()
            total += (p * (log_t - log_q.gather(1, chosen))).sum()
            other_p, other_q = ((1 - x.sum(1, keepdim=True)).clamp_min(1e-9) for x in (p, q.gather(1, chosen)))
            total += (other_p * (other_p / other_q).log()).sum()
            # d KL / d logit = q − p for the chosen tokens, and q · (1 − other_p / other_q) for the others.
            slope = q * (1 - other_p / other_q)
            gradient[here] = slope.scatter_(1, chosen, q.gather(1, chosen) - p)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


_divergence: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Divergence.apply  # torch gives it no types


def sum_divergence(student: Tensor, log_p: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return Σ KL(teacher ‖ student) in nats over all tokens, for the student's logits [batch, seq, vocab].

    The teacher's log-probabilities `log_p` [batch, seq, vocab] are of all tokens, or, as [batch, seq, k], of the k
    tokens `ids` of each position. All tokens not in `ids` then count as one, so that the sum is a lower bound.
    """
    rows = None if ids is None else ids.flatten(0, 1)
    return _divergence(student.flatten(0, 1), log_p.flatten(0, 1), rows)


class Teacher:
    """A fixed module whose predictions are computed once per window, and stored: the `top` most likely tokens of each
    position, in files in `folder`. `top` 0: nothing is stored."""

    def __init__(self, module: nn.Module, windows: int, length: int, top: int, folder: Path) -> None:
        self.module = module.eval().requires_grad_(False)
        self.top, self._done = top, np.zeros(windows, bool)
        if top:
            shape = (windows, length, top)
            self._ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int32, shape)
            self._log_p = np.lib.format.open_memmap(folder / "log_p.npy", "w+", np.float16, shape)

    @torch.no_grad()
    def predict(self, batch: WindowBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, token ids), both [n, length, top], of the most likely tokens of windows."""
        indices = batch.indices.numpy()
        if len(new := np.flatnonzero(~self._done[indices])):
            logits, _ = split_outputs(self.module(batch.windows[new]))
            for row, window in zip(indices[new], logits.float(), strict=True):
                log_p, ids = window.log_softmax(-1).topk(self.top)
                self._ids[row], self._log_p[row] = ids.cpu().numpy(), log_p.cpu().numpy()
            self._done[indices] = True
        at = batch.windows.device
        return torch.from_numpy(self._log_p[indices]).to(at), torch.from_numpy(self._ids[indices]).to(at)

    @torch.no_grad()
    def predict_all(self, windows: Tensor) -> Tensor:
        """Return the log-probabilities of all tokens, [n, length, vocab], of windows [n, length]."""
        logits, _ = split_outputs(self.module(windows))
        return logits.float().log_softmax(-1)


class Predictions:
    """KL(teacher ‖ student) of the next token in nats per token, on the stored tokens in training and on all tokens in
    validation; optionally also ``labels``, the cross-entropy of the next token in the text, and ``hidden``, the error
    of the residual stream after each layer relative to the teacher's."""

    def __init__(
        self, teacher: Teacher, labels: float = 0.0, hidden: float = 0.0, segments: Sequence[int] = ()
    ) -> None:
        """`labels` and `hidden` are the weights of these terms. segments: as in `Layers`."""
        self.teacher, self.labels, self.hidden, self.segments = teacher, labels, hidden, segments

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        tokens = batch.windows.numel()
        with ExitStack() as stack:
            stack.enter_context(parametrize.cached())  # a tied table is computed once
            student = stack.enter_context(record_layers(net)) if self.hidden else []
            logits, auxiliary = split_outputs(net(batch.windows))
        if not net.training:
            return {"loss": sum_divergence(logits, self.teacher.predict_all(batch.windows)) / tokens}
        if self.hidden:
            with record_layers(self.teacher.module) as expected:
                log_p, ids = self.teacher.predict_all(batch.windows), None
            pairs = [(record[1], expected[at][1]) for record, at in zip(student, self.segments, strict=True)]
            errors = [_compute_error(y, target, torch.zeros_like(target)) for y, target in pairs]
        elif self.teacher.top:
            log_p, ids = self.teacher.predict(batch)
        else:
            log_p, ids = self.teacher.predict_all(batch.windows), None
        terms = {"loss": sum_divergence(logits, log_p, ids) / tokens, "aux_loss": auxiliary}
        if self.hidden:
            terms["hidden"] = self.hidden * torch.stack(errors).mean()
        if self.labels:
            entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.windows[:, 1:].flatten())
            terms["labels"] = self.labels * entropy
        return terms


class OutputErrors:
    """The error of an encoder's outputs, Σ‖y − t‖² relative to their size, Σ‖t‖²: the mean over outputs and windows."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        with torch.no_grad():
            targets = run_windows(self.teacher.module, batch.windows)
        with parametrize.cached():
            outputs = run_windows(net, batch.windows)
        pairs = [(y, t) for y, t in zip(outputs, targets, strict=True) if t.dim() > 1]  # others are auxiliary losses
        return {"loss": torch.stack([_compute_error(y, t, torch.zeros_like(t)) for y, t in pairs]).mean()}


class Layers:
    """The mean error of a student's layers, each given the teacher's input of that layer: Σ‖y − t‖² relative to the
    change of the layer's input, Σ‖t − x‖² (blockwise distillation; Li 2020, arXiv 1911.13053).

    segments: for each layer of the student the index of the teacher's layer whose output it should have; it replaces
    all of the teacher's layers since the segment before.
    """

    def __init__(self, teacher: Teacher, segments: Sequence[int]) -> None:
        self.teacher, self.segments = teacher, segments

    def __call__(self, net: nn.Module, batch: WindowBatch) -> dict[str, Tensor]:
        with torch.no_grad(), record_layers(self.teacher.module) as expected:
            run_windows(self.teacher.module, batch.windows)
        begins = [0, *(at + 1 for at in self.segments[:-1])]
        inputs = [expected[at][0] for at in begins]
        with parametrize.cached(), record_layers(net, inputs) as outputs:
            run_windows(net, batch.windows)
        errors = []
        for (x, y), at in zip(outputs, self.segments, strict=True):
            errors.append(_compute_error(y, expected[at][1], x))
        return {"loss": torch.stack(errors).mean()}


def _compute_error(y: Tensor, target: Tensor, base: Tensor) -> Tensor:
    """Return the mean over windows of ‖y − target‖² / ‖base − target‖², for [windows, …, width]. Each window has
    its own ratio, so that the mean is the same if several processes divide the windows."""
    y, target, base = (x.float().flatten(1) for x in (y, target, base))
    errors, sizes = ((x - target).square().sum(1) for x in (y, base))
    return (errors / sizes.clamp_min(1e-12)).mean()


@contextmanager
def record_layers(net: Any, inputs: Sequence[Tensor] | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield a list to which each layer of `net` appends (input, output) when it runs in the block. With `inputs`, layer
    i gets ``inputs[i]`` instead of the output of the layer before. Of several operands or results, such as auxiliary
    losses and shared tables, the first with an axis of features is the residual stream."""
    records: list[tuple[Tensor, Tensor]] = []

    def find_stream(values: Any) -> int:
        return next(i for i, x in enumerate(values) if isinstance(x, Tensor) and x.ndim > 2 and x.is_floating_point())

    def replace(_: nn.Module, operands: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if inputs is None:
            return None
        at = find_stream(operands)
        return (*operands[:at], inputs[len(records)], *operands[at + 1 :])

    def record(_: nn.Module, operands: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        records.append((operands[find_stream(operands)], results[find_stream(results)]))

    hooks = [
        handle
        for layer in net.layers
        for handle in (layer.register_forward_pre_hook(replace), layer.register_forward_hook(record))
    ]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def align_layers(student: Any, teacher: Any) -> list[int]:
    """Return for each layer of `student` the index of the layer of `teacher` whose output it should have.

    Equal numbers of layers correspond one to one. Otherwise layers with equal weights do, in order, as many as possible
    (the student lacks some of the teacher's layers). The last index is that of the teacher's last layer.

    Raises:
        WeftError: if the layers have different widths, or the student has more of them.
    """
    layers, targets = list(student.layers), list(teacher.layers)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(teacher.parameters()).device)
    widths = list[int]()
    for net in (student, teacher):
        with torch.no_grad(), record_layers(net) as records:
            run_windows(net, tokens)
        widths.append(records[0][1].shape[-1])
    if widths[0] != widths[1]:
        raise WeftError(
            f"layers have the widths {widths[0]} and {widths[1]}, which cannot be compared: use --layers 0, no --hidden"
        )
    if len(layers) == len(targets):
        return list(range(len(layers)))
    if len(layers) > len(targets):
        raise WeftError(
            f"the student has {len(layers)} layers and the original {len(targets)}: layers cannot be compared"
        )
    alike = -np.array([[_compute_distance(a, b) for b in targets] for a in layers])
    best = np.full((len(layers) + 1, len(targets) + 1), -np.inf)  # [i, j]: sum of the first i layers among the first j
    best[0] = 0
    for i, j in np.ndindex(alike.shape):
        best[i + 1, j + 1] = max(best[i + 1, j], best[i, j] + alike[i, j])
    segments, j = list[int](), len(targets)
    for i in reversed(range(len(layers))):
        while best[i + 1, j] == best[i + 1, j - 1]:
            j -= 1
        j -= 1
        segments.insert(0, j)
    return [*segments[:-1], len(targets) - 1]


@torch.no_grad()
def _compute_distance(a: nn.Module, b: nn.Module) -> float:
    """Return the mean distance of the parameters that two layers share, relative to their size; 1 without any."""
    pairs = [(p, q) for name, p in a.named_parameters() for n, q in b.named_parameters() if n == name]
    distances = [float((p - q).norm() / q.norm().clamp_min(1e-9)) for p, q in pairs if p.shape == q.shape]
    return sum(distances) / len(distances) if distances else 1.0
