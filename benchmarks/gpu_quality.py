"""What a decoder's speed costs in quality: its logits, step by step, beside those of f32 with the same weights.

Weights are drawn in bf16; the reference computes with them in f32, without TF32. It continues a random prompt greedily;
the others are fed those tokens one by one through the path that decodes, so that a difference cannot grow by itself.
"""

from __future__ import annotations

import fcntl
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_models import DECODERS, TINY_DECODERS, Shape, hugging_face, prompt
from gpu_ours import OURS
from gpu_peers import PEERS, Contender, Eager, peer
from gpu_pool import Work
from torch import Tensor

PROMPT, STEPS = 32, 128


def reference(args: Namespace, label: str, shape: Shape, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [1, steps] of the model in f32 after `ids`, and the logits [steps, vocab] that chose them.

    The process that comes first computes them, the others wait for its file.
    """
    path = Path(args.scratch) / f"reference_{label}.pt"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            contender = Eager(hugging_face(shape, args.device, torch.bfloat16).float())
            contender.start(ids)
            tokens = torch.cat([contender.token, *(contender.step() for _ in range(steps - 1))], 1)
            torch.save((tokens, contender.forced(ids, tokens)), path)
    chosen, logits = torch.load(path)
    return chosen, logits


def compared(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Both [steps, vocab] in f32: divergence in nats of `got` from `want`, agreement of the first choices, error.

    Where the first choices differ, `worst_gap` is by how much the reference prefers its own, in logits.
    """
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    choice, other = want.argmax(-1), got.argmax(-1)
    gap = want.gather(1, choice[:, None]) - want.gather(1, other[:, None])
    entropy = -(p.exp() * p).sum(-1)
    nll, other_nll = (-x.gather(1, choice[:, None]).mean() for x in (p, q))
    return {
        "finite": bool(got.isfinite().all()),
        "tokens": len(want),
        "same_first_choice": round(float((choice == other).double().mean()), 4),
        "worst_gap": round(float(gap.max()), 5),
        "mean_kl_nats": float(f"{divergence.mean():.4g}"),
        "max_kl_nats": float(f"{divergence.max():.4g}"),
        "nll": round(float(other_nll), 5),
        "reference_nll": round(float(nll), 5),
        "reference_entropy_nats": round(float(entropy.mean()), 4),
        "relative_error": float(f"{(got - want).norm() / want.norm():.4g}"),
    }


@torch.no_grad()
def agreement(args: Namespace, name: str, label: str, shape: Shape, steps: int) -> dict[str, Any]:
    """A contender's logits beside the reference's, and whether they are the same when it computes them again."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = prompt(shape, 1, PROMPT, args.device)
    tokens, want = reference(args, label, shape, ids, steps)
    model = hugging_face(shape, args.device, torch.bfloat16)
    make = OURS.get(name) or partial(peer, name)
    contender: Contender = make(shape, args.device, 1, PROMPT + steps + 1, model)
    got = contender.forced(ids, tokens)
    return {**compared(got, want), "repeats_bit_for_bit": bool((got == contender.forced(ids, tokens)).all())}


def works(args: Namespace) -> Iterator[Work]:
    """The contenders of decoding one text, those of the goals first; codes of 4 bits are random, so no f32 is right."""
    large = args.device == "cuda"
    shapes = {label: shape for label, shape in (DECODERS if large else TINY_DECODERS).items() if shape.bits == 16}
    names = dict.fromkeys(("weft_step", "hf_eager", "weft_runtime", *OURS, *PEERS))
    for name in names:
        for label, shape in shapes.items():
            run = partial(agreement, args, name, label, shape, STEPS if large else 4)
            seconds = 25 + shape.layers * (2 if "compiled" in name else 0.5)
            yield Work(f"{label}_{name}", run, seconds, memory=4 + 3.1 * shape.gib())
