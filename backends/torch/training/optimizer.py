"""AdamW with the parameter groups that an architecture declares, and schedules of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

SCHEDULES = ("cosine", "wsd", "constant")
LEAST = 0.1  # share of the peak rate at the end of a cosine
DECAY_SHARE = 0.2  # share of the steps in which `wsd` decays (Hägele 2024, arXiv 2405.18392)


def group_parameters(
    net: nn.Module, decayed: Collection[str], decay: float, factors: Mapping[str, float] = {}
) -> list[dict[str, Any]]:
    """Return groups for AdamW of the parameters of `net` that require gradients.

    Weight decay `decay` applies to the parameters named in `decayed`: weights of products and tables, not norms,
    biases, or states of recurrences. `factor` multiplies the learning rate of a group: 1, or the value in `factors`.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in net.named_parameters():
        if p.requires_grad:
            groups.setdefault((decay if name in decayed else 0.0, factors.get(name, 1.0)), []).append(p)
    return [{"params": of, "weight_decay": decay, "factor": factor} for (decay, factor), of in groups.items()]


def compute_rate(schedule: str, done: float, warmup: float) -> float:
    """Return the factor of the peak learning rate after the share `done` of a run that begins with a linear rise, the
    share `warmup`.

    cosine: down to `LEAST` (Loshchilov 2017, arXiv 1608.03983). wsd: constant, then linear down to 0 in the last
    `DECAY_SHARE` of the run. constant: no descent.
    """
    done = min(1.0, done)
    if done < warmup or warmup >= 1:
        return done / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return min(1.0, (1 - done) / DECAY_SHARE)
    fall = 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))
    return LEAST + (1 - LEAST) * fall
