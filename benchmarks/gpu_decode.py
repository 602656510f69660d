"""Decoding: Hugging Face's ways and weft's, beside the least time that reading the weights and caches can take."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_clock import Clock, microseconds
from gpu_models import DECODERS, TINY_DECODERS, Shape, prompt
from gpu_ours import OURS
from gpu_peers import AUTOTUNED, PEERS, Contender, peer
from gpu_pool import Work

COMPILED = "hf_static_compiled"
FIRST = ("weft_step", COMPILED)  # contenders of every case; the others decode one text, and come after these
LENGTHS = {32: 127, 1024: 64, 32_768: 32}  # tokens of a prompt: steps of a round
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """`batch` texts decoded by a model after prompts of `length` tokens each."""

    label: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.label}_batch_{self.batch}_after_{self.length}"


# The headlines first.
CASES = tuple(Case(label, 1, 32) for label in DECODERS) + tuple(
    Case(label, *sizes) for sizes in ((32, 1024), (8, 1024), (1, 1024)) for label in DECODERS
)
LONG = tuple(Case(label, 1, 32_768) for label in ("8b", "1b"))
TINY_CASES = (*(Case(label, 1, 8) for label in TINY_DECODERS), *(Case(label, 4, 8) for label in TINY_DECODERS))


def measured(clock: Clock, contender: Contender, ids: torch.Tensor, steps: int, size: int) -> dict[str, Any]:
    """Microseconds of a step with nothing read by the host in between, and with every token read as it comes."""

    def run(count: int) -> None:
        for _ in range(count):
            contender.step()

    def read(count: int) -> None:
        for _ in range(count):
            contender.step().tolist()

    found: dict[str, Any] = {"bytes": size}
    for name, work in (("step_us", run), ("read_step_us", read)):
        times = []
        for _ in range(ROUNDS if clock.cuda else 1):
            contender.start(ids)
            times.append(clock.once(partial(work, steps)) / steps)
        found[name] = microseconds(times)
    seconds = found["step_us"]["median"] / 1e6
    return found | {"tokens_per_s": round(len(ids) / seconds, 1), "gb_per_s": round(size / seconds / 1e9, 1)}


def prepared(args: Namespace, name: str, case: Case, shape: Shape, steps: int) -> Callable[[], dict[str, Any]]:
    """Build a contender, let it compile, capture and plan in a few steps, and return what times it."""
    ids = prompt(shape, case.batch, case.length, args.device)
    make = OURS.get(name) or partial(peer, name)
    contender: Contender = make(shape, args.device, case.batch, case.length + steps + 1)
    for _ in range(2):
        contender.start(ids)
        for _ in range(3):
            contender.step()
    size = shape.step_bytes(case.length + steps // 2, case.batch)
    return partial(measured, Clock(args.device), contender, ids, steps, size)


def contenders(case: Case, slow: bool) -> tuple[str, ...]:
    """The names of all that decode a case, those of FIRST first."""
    others = (*OURS, *PEERS, *(AUTOTUNED if slow else ())) if case.batch == 1 else ()
    return (*FIRST, *(name for name in others if name not in FIRST))


def works(args: Namespace) -> Iterator[Work]:
    """Every case with the contenders of FIRST, then with all others; long prompts last."""
    large = args.device == "cuda"
    shapes = DECODERS if large else TINY_DECODERS
    cases = CASES if large else TINY_CASES
    pairs = [(case, name) for case in cases for name in FIRST]
    pairs += [(case, name) for case in cases for name in contenders(case, args.slow) if name not in FIRST]
    pairs += [(case, name) for case in (LONG if large else ()) for name in contenders(case, args.slow)]
    for case, name in pairs:
        shape = shapes[case.label]
        if name in PEERS and (shape.bits == 8 or (shape.bits == 4 and not large)):
            continue  # torch's product with codes of 4 bits is for GPUs, and it has none for one row of FP8 by tiles
        steps = LENGTHS.get(case.length, 4)
        seconds = shape.layers * {COMPILED: 2.0, "hf_static_autotuned": 6.0}.get(name, 0.8) + 10
        cache = case.batch * case.length * shape.layers * 4 * shape.kv_heads * shape.head_dim / 2**30
        held = 1 if shape.bits == 16 or name in PEERS else 0.3
        memory = 3 + held * shape.gib() * (1.6 if name in OURS else 1.1) + 4 * cache
        # Six times as long as the weights take to be read, at 4 TB/s.
        alone = 1 + 12 * ROUNDS * steps * shape.step_bytes(case.length, case.batch) / 4e12
        yield Work(f"{case.name}_{name}", partial(prepared, args, name, case, shape, steps), seconds, alone, memory)
