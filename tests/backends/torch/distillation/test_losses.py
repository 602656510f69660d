"""Losses against a teacher: their values and gradients equal those of torch, and each layer gets its own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.torch.distillation.losses import (
    Layers,
    Predictions,
    Teacher,
    align_layers,
    record_layers,
    sum_divergence,
)
from weft.backends.torch.training.batches import WindowBatch
from weft.ir.errors import WeftError

VOCAB, LENGTH = 41, 12


def build(layers: int = 3, seed: int = 0, std: float = 0.3) -> Any:
    block = Block(Attention(4, kv_heads=2, rope=RoPE()), GatedMLP(24), RMSNorm())
    net = weft.torch(Decoder(VOCAB, 16, layers, block, context=LENGTH))
    torch.manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0, std)
    return net


@pytest.fixture
def batch() -> WindowBatch:
    ids = torch.randint(VOCAB, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    return WindowBatch(ids, torch.tensor([4, 0, 3, 1, 2]))


def teacher_of(net: nn.Module, top: int, folder: Path) -> Teacher:
    return Teacher(net, 5, LENGTH, top, folder)


def relative(y: torch.Tensor, target: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.mse_loss(*p[:2]) / F.mse_loss(*p[1:]) for p in zip(y, target, base, strict=True)]).mean()


def test_divergence_and_its_gradient_equal_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 300, 11, generator=generator) for _ in range(2))  # more rows than one block
    student.requires_grad_(True)
    found = sum_divergence(student, teacher.log_softmax(-1))
    (gradient,) = torch.autograd.grad(found, student)
    exact = student.detach().double().requires_grad_(True)
    p, log_q = teacher.double().log_softmax(-1), exact.log_softmax(-1)
    wanted = F.kl_div(log_q, p, log_target=True, reduction="sum")
    (expected,) = torch.autograd.grad(wanted, exact)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-6)


def test_divergence_on_stored_tokens_counts_all_others_as_one() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(1, 300, 11, generator=generator).double() for _ in range(2))
    student.requires_grad_(True)
    log_p, ids = teacher.log_softmax(-1).topk(4)
    found = sum_divergence(student, log_p, ids)
    (gradient,) = torch.autograd.grad(found, student)
    q = student.softmax(-1)
    merged = [
        torch.cat((x.gather(2, ids), 1 - x.gather(2, ids).sum(-1, keepdim=True)), -1) for x in (teacher.softmax(-1), q)
    ]
    wanted = (merged[0] * (merged[0] / merged[1]).log()).sum()
    (expected,) = torch.autograd.grad(wanted, student)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)
    assert float(wanted.detach()) < float(sum_divergence(student, teacher.log_softmax(-1)).detach())


def test_a_teacher_predicts_each_window_once(batch: WindowBatch, tmp_path: Path) -> None:
    net, calls = build(), []
    net.register_forward_hook(lambda module, operands, output: calls.append(len(operands[0])))
    teacher = teacher_of(net, 6, tmp_path)
    first = teacher.predict(WindowBatch(batch.windows[:3], batch.indices[:3]))
    again = teacher.predict(batch)
    assert calls == [3, 2]
    assert all(torch.equal(a, b[:3]) for a, b in zip(first, again, strict=True))
    log_p, ids = teacher.predict_all(batch.windows).topk(6)
    assert torch.equal(again[1].long(), ids)
    torch.testing.assert_close(again[0].float(), log_p, rtol=2**-10, atol=1e-3)


def test_terms_of_the_predictions(batch: WindowBatch, tmp_path: Path) -> None:
    """In training the stored tokens, the text itself and the streams; in validation all tokens."""
    original, student = build(), build(seed=1)
    teacher = teacher_of(original, 0, tmp_path)
    terms = Predictions(teacher, labels=0.5, hidden=0.25, segments=[0, 1, 2])(student.train(), batch)
    logits, wanted = student(batch.windows), original(batch.windows).log_softmax(-1)
    kl = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum") / batch.windows.numel()
    torch.testing.assert_close(terms["loss"], kl)
    entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.windows[:, 1:].flatten())
    torch.testing.assert_close(terms["labels"], 0.5 * entropy)
    with record_layers(student) as mine, record_layers(original) as others:
        student(batch.windows), original(batch.windows)
    errors = [relative(a, b, 0 * b) for (_, a), (_, b) in zip(mine, others, strict=True)]
    torch.testing.assert_close(terms["hidden"], 0.25 * torch.stack(errors).mean())
    stored = Predictions(teacher_of(original, VOCAB, tmp_path))
    torch.testing.assert_close(stored(student, batch)["loss"], kl, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(stored(student.eval(), batch)["loss"], kl)


def test_each_layer_gets_the_original_input_and_only_its_own_error(batch: WindowBatch, tmp_path: Path) -> None:
    original, student = build(), build(seed=1)
    loss = Layers(teacher_of(original, 0, tmp_path), [0, 1, 2])(student, batch)["loss"]
    loss.backward()
    with record_layers(original) as expected:
        original(batch.windows)
    errors = []
    for layer, (x, target) in zip(student.layers, expected, strict=True):
        seen: dict[str, Any] = {}
        hook = layer.register_forward_pre_hook(lambda _, operands, seen=seen: seen.update(rest=operands[1:]))
        with torch.no_grad():
            student(batch.windows)
        hook.remove()
        errors.append(relative(layer(x, *seen["rest"]), target, x))
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    own = torch.autograd.grad(errors[1] / 3, list(student.layers[1].parameters()))
    for parameter, gradient in zip(student.layers[1].parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert student.embed.weight.grad is None


def test_the_layer_after_removed_ones_takes_over_their_work(batch: WindowBatch, tmp_path: Path) -> None:
    original = build(5)
    for kept in ([0, 2, 4], [1, 2], [0, 1, 2, 3]):
        student = build(len(kept), seed=2)
        for mine, at in zip(student.layers, kept, strict=True):
            mine.load_state_dict(original.layers[at].state_dict())
        segments = align_layers(student, original)
        assert segments == [*kept[:-1], 4]
        with torch.no_grad():
            loss = float(Layers(teacher_of(original, 0, tmp_path), segments)(student, batch)["loss"])
        assert loss > 1e-3  # no layer does the work of two
    assert align_layers(build(5, seed=3), original) == [0, 1, 2, 3, 4]
    with pytest.raises(WeftError, match="layers cannot be compared"):
        align_layers(build(6), original)


def test_an_equal_student_has_no_error(batch: WindowBatch, tmp_path: Path) -> None:
    teacher = teacher_of(build(), 0, tmp_path)
    with torch.no_grad():
        assert float(Layers(teacher, [0, 1, 2])(build(), batch)["loss"]) < 1e-10
        assert abs(float(Predictions(teacher)(build(), batch)["loss"])) < 1e-6
    assert np.isfinite(teacher.predict_all(batch.windows).numpy()).all()
