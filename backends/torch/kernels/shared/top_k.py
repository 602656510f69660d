"""Top-k choice of experts from router logits, in registers: scores, the k largest, their weights (arXiv 1701.06538).

The scores of all experts of a token are in registers, and k passes each take the largest. Weights are softmax or
sigmoid scores; a bias may decide the choice without being part of a weight (DeepSeek-V3, arXiv 2412.19437). Groups of
experts may compete first (DeepSeek-V2, arXiv 2405.04434): the best groups are chosen in the same way.
"""

from __future__ import annotations

from typing import Any

from .launch import jit, tl
from .operands import power_of_2

MOST_EXPERTS = 512
MOST_CHOICES = 16


@jit
def expert_places(EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr):
    """Return the expert of each place, i32 [GROUP_SLOTS · WIDE], and whether the place has one, bool. The GROUPS groups
    are padded to GROUP_SLOTS groups, and the experts of a group to WIDE places, both powers of 2."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, GROUP_SLOTS * WIDE)
    return place // WIDE * MEMBERS + place % WIDE, (place % WIDE < MEMBERS) & (place // WIDE < GROUPS)


@jit
def _of_best_groups(ranked, OPEN: tl.constexpr, TOP2: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr):
    """Return `ranked` [rows, SLOTS · WIDE] with −∞ outside of the OPEN best of the SLOTS groups of a row. A group's
    score is the maximum of its WIDE elements, or with TOP2 the sum of the two largest."""
    ROWS: tl.constexpr = ranked.shape[0]
    members = tl.reshape(ranked, [ROWS, SLOTS, WIDE])
    best = tl.max(members, axis=2)
    if TOP2:
        first = tl.arange(0, WIDE)[None, None, :] == tl.argmax(members, axis=2)[:, :, None]
        best += tl.max(tl.where(first, float("-inf"), members), axis=2)
    group, there = tl.arange(0, SLOTS)[None, :], tl.zeros([ROWS, SLOTS], tl.int1)
    for _ in tl.static_range(OPEN):
        chosen = group == tl.argmax(best, axis=1)[:, None]  # the first of equals
        there, best = there | chosen, tl.where(chosen, float("-inf"), best)
    return tl.reshape(tl.where(there[:, :, None], members, float("-inf")), [ROWS, SLOTS * WIDE])


@jit
def choose_experts(
    logits, push, expert, there, scale, CHOICES: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GROUP_SLOTS: tl.constexpr, WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Return the chosen experts, i32, and their weights, f32, both [rows, SLOTS], for logits f32 [rows, places]; slots
    from CHOICES on hold 0. `expert` and `there` [places] are the results of `expert_places`; logits are −∞ where
    `there` is false. `push` [places] is added to the scores for the choice only. Weights are scores, divided by their
    sum if RENORMALIZE, times `scale`."""
    ROWS: tl.constexpr = logits.shape[0]
    place, slot = tl.arange(0, GROUP_SLOTS * WIDE)[None, :], tl.arange(0, SLOTS)[None, :]
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores /= tl.sum(scores, axis=1)[:, None]
    ranked = tl.where(there[None, :], scores + push[None, :], float("-inf"))
    if GROUPS > 1:
        ranked = _of_best_groups(ranked, OPEN, TOP2, GROUP_SLOTS, WIDE)
    experts, weights = tl.zeros([ROWS, SLOTS], tl.int32), tl.zeros([ROWS, SLOTS], tl.float32)
    for choice in tl.static_range(CHOICES):
        best = place == tl.argmax(ranked, axis=1)[:, None]  # the first of equals
        number = tl.sum(tl.where(best, expert[None, :], 0), axis=1)[:, None]
        experts = tl.where(slot == choice, number, experts)
        weights = tl.where(slot == choice, tl.sum(tl.where(best, scores, 0.0), axis=1)[:, None], weights)
        ranked = tl.where(best, float("-inf"), ranked)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None]
    return experts, weights * scale


def refusal(experts: int, k: int) -> str | None:
    """Return the reason why kernels cannot choose `k` of `experts` experts, in a few words; None if they can."""
    fits = experts <= MOST_EXPERTS and k <= MOST_CHOICES
    return None if fits else f"more than {MOST_EXPERTS} experts or {MOST_CHOICES} choices"


def check(experts: int, k: int, scoring: str, groups: int, top_groups: int, group_score: str) -> None:
    """Check that `k` of `experts` experts can be chosen from the `top_groups` best of `groups` groups. Raise ValueError
    if they cannot, or if `scoring` or `group_score` is unknown."""
    if experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{experts} experts cannot be split into groups={groups}, or top_groups={top_groups} is out of range"
        )
    if not 1 <= k <= experts // groups * top_groups:
        raise ValueError(f"k={k} exceeds the number of experts to choose from, {experts // groups * top_groups}")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring={scoring!r} is not softmax or sigmoid")
    if group_score not in ("max", "top2"):
        raise ValueError(f"group_score={group_score!r} is not max or top2")
    if groups > 1 and group_score == "top2" and experts < 2 * groups:
        raise ValueError("group_score='top2' needs two experts per group")


def constants(
    experts: int, k: int, scoring: str, renormalize: bool, groups: int, top_groups: int, group_score: str
) -> dict[str, Any]:
    """Return the constexpr arguments of `choose_experts` and `expert_places`. Padding groups and experts per group to
    powers of 2 gives fewer than 4 places per expert."""
    sizes = {"GROUP_SLOTS": power_of_2(groups), "WIDE": power_of_2(experts // groups), "SLOTS": power_of_2(k)}
    how = {"SIGMOID": scoring == "sigmoid", "RENORMALIZE": renormalize, "TOP2": group_score == "top2"}
    return {"EXPERTS": experts, "CHOICES": k, "GROUPS": groups, "OPEN": top_groups, **how, **sizes}
