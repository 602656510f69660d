"""Prompts with lengths of answers, and a loop that runs a batch until all answers have left."""

from __future__ import annotations

from typing import Any

from weft import Block, GatedMLP, RMSNorm
from weft.backends.runtime.batching.batch import Batch
from weft.backends.runtime.core.answers import Answer
from weft.backends.runtime.core.generation import Generator

VOCAB = 61


def block(mixer: Any) -> Block:
    return Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6))


PROMPTS = [
    *([5, 9, 33, 2, 60, 7, 11], [1], [40, 41, 42], [3, 2, 1], list(range(20, 41))),
    *([8, 8, 8], list(range(1, 40)), [17], [55, 4, 3, 2, 1, 0, 9, 12]),
]


LENGTHS = [9, 1, 14, 3, 20, 2, 8, 17, 5]


def alone(model: Generator) -> list[list[int]]:
    return [model.generate([prompt], max_tokens=n)[0].tokens for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]


def answers(model: Generator, **options: Any) -> list[Answer]:
    return [model.answer(prompt, max_tokens=n, **options) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]


def run(batch: Batch, joining: list[Answer], at_a_time: int = 2) -> None:
    """Let `joining` join, `at_a_time` between two steps, until all have left."""
    rest = list(joining)
    for _ in range(1000):
        for answer in rest[:at_a_time]:
            batch.join(answer)
        del rest[:at_a_time]
        batch.advance()
        if not rest and not len(batch):
            return
    raise AssertionError("the batch does not end")
