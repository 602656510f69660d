"""Decoding with batch 1: Hugging Face's ways and weft's, beside the least time that reading the weights can take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from gpu_models import LLAMA_1B, LLAMA_8B, TINY, Shape, hugging_face, prompt
from gpu_ours import OURS, ours
from gpu_peers import AUTOTUNED, PEERS, Contender, peer
from gpu_run import Clock, Run, microseconds

CASES = ((32, 127), (1024, 64), (32_768, 32))  # tokens of the prompt, steps of a round


def timed(clock: Clock, contender: Contender, ids: torch.Tensor, steps: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a step with nothing read by the host in between, and with every token read as it comes."""

    def run(count: int) -> None:
        for _ in range(count):
            contender.step()

    def read(count: int) -> None:
        for _ in range(count):
            contender.step().tolist()

    found = {}
    for name, work in (("step_us", run), ("read_step_us", read)):
        times = []
        for _ in range(rounds + 1):  # the first warms up: it compiles, captures and plans
            contender.start(ids)
            times.append(clock.once(partial(work, steps)) / steps)
        found[name] = microseconds(times[1:])
    return found


def _decoding(run: Run, name: str, model: Callable[[], Any], shape: Shape, length: int, steps: int) -> dict[str, Any]:
    """One contender after one prompt, beside the byte floor."""
    contender = (ours if name in OURS else peer)(name, model(), length + steps + 1)
    ids = prompt(shape, 1, length, run.device)
    found = timed(run.clock, contender, ids, steps, 5 if run.cuda else 1)
    size = shape.step_bytes(length + steps // 2)
    seconds = found["step_us"]["median"] / 1e6
    found |= {
        "tokens_per_s": round(1 / seconds, 1),
        "step_bytes": size,
        "gb_per_s": round(size / seconds / 1e9, 1),
        "of_copy": run.share(size / seconds / 1e9, "copy", "gb_per_s"),
        "of_read": run.share(size / seconds / 1e9, "read", "gb_per_s"),
    }
    return found


def cost(name: str, shape: Shape) -> float:
    """Seconds to expect of a contender, compilation included, generously."""
    base = {"hf_eager": 30, "hf_static_graph": 15, "hf_static_compiled": 90, "hf_static_autotuned": 220}
    return base.get(name, 40) * (1 if shape.layers > 16 else 0.6)


def decode(run: Run) -> None:
    """Every prompt, shape and contender, short prompts first; what takes minutes to compile only if `run.args.slow`."""
    run.begin("decode")
    shapes = run.choice({"1b": LLAMA_1B, "8b": LLAMA_8B}, {"tiny": TINY})
    model = cache(lambda label: hugging_face(shapes[label], run.device, torch.bfloat16))
    names = [*OURS, *PEERS, *(AUTOTUNED if run.args.slow else ())]
    for length, steps in run.choice(CASES, ((8, 4),)):
        for (label, shape), name in product(shapes.items(), names):
            work = partial(_decoding, run, name, partial(model, label), shape, length, steps)
            run.measure("decode", f"{label}_{length}_{name}", work, cost(name, shape))
