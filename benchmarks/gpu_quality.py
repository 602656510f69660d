"""What a decoder's speed costs in quality: its logits, step by step, beside those of f32 with the same weights.

Weights are drawn in bf16; the reference computes with them in f32, without TF32. It continues a random prompt greedily;
the others are fed those tokens one by one through the path that decodes, so that a difference cannot grow by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpu_models import LLAMA_1B, LLAMA_8B, TINY, Shape, hugging_face, prompt
from gpu_ours import OURS, ours
from gpu_peers import PEERS, Contender, Eager, peer
from gpu_run import Run
from torch import Tensor

PROMPT, STEPS = 32, 128


def reference(shape: Shape, device: str, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [1, steps] of the model in f32 after `ids`, and the logits [steps, vocab] that chose them."""
    model = hugging_face(shape, device, torch.bfloat16).float()
    contender = Eager(model)
    contender.start(ids)
    tokens = [contender.token, *(contender.step() for _ in range(steps - 1))]
    chosen = torch.cat(tokens, 1)
    return chosen, contender.forced(ids, chosen)


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


def _one(name: str, model: Any, ids: Tensor, tokens: Tensor, want: Tensor) -> dict[str, Any]:
    capacity = ids.shape[1] + tokens.shape[1] + 1
    contender: Contender = (ours if name in OURS else peer)(name, model, capacity)
    found = compared(contender.forced(ids, tokens), want)
    again = contender.forced(ids, tokens)
    return {**found, "repeats_bit_for_bit": bool((again == contender.forced(ids, tokens)).all())}


def quality(run: Run) -> None:
    """Every contender of the decoding stage."""
    run.begin("quality")
    torch.backends.cuda.matmul.allow_tf32 = False
    for label, shape in run.choice({"1b": LLAMA_1B, "8b": LLAMA_8B}, {"tiny": TINY}).items():
        steps = run.choice(STEPS, 4)
        ids = prompt(shape, 1, PROMPT, run.device)
        model: Any = None
        for name in [*OURS, *PEERS]:
            if run.skips("quality", f"{label}_{name}", 60 if "compiled" in name else 20):
                continue
            if model is None:
                tokens, want = reference(shape, run.device, ids, steps)
                model = hugging_face(shape, run.device, torch.bfloat16)
            run.measure("quality", f"{label}_{name}", partial(_one, name, model, ids, tokens, want))
