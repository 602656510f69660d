"""Decoding: Hugging Face's ways and weft's, beside the least time that reading the weights and caches can take."""

from __future__ import annotations

import fcntl
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import spread
from torch import Tensor

from weft.backends.torch.kernels.choose_tokens import TICKETS, choose_tokens
from weft.backends.torch.kernels.shared.tickets import Tickets

from .limits import Clock, captured, floor, microseconds
from .models import (
    AUTOTUNED,
    DECODERS,
    LLAMA_8B,
    PEERS,
    TINY,
    TINY_DECODERS,
    Contender,
    Eager,
    Shape,
    generated,
    hugging_face,
    peer,
    prompt,
)
from .pool import Work


class Module:
    """The generated module as it is, call by call with its cache of `capacity` tokens for each text of a batch."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        self.forms, self.module = generated(shape, device, model=model)
        self.vocab, self.device = shape.vocab, device
        self.cache = self.module.new_cache(batch, capacity)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.first = torch.empty(0)  # logits after the prompt
        self.known: Tensor | None = None  # the prompt that is in the cache

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        if self.known is not ids:  # else its keys and values are still there
            self.cache.length = 0
            last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
            self.first, self.known = self.module(ids, cache=self.cache, last=last)[:, -1], ids
        self.cache.length = ids.shape[1]
        self.token.copy_(self.first.argmax(-1, keepdim=True))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Those [batch, vocab] after `token`, which from then on is in the cache."""
        found: Tensor = self.module(self.token, cache=self.cache)[:, -1]
        return found

    @torch.no_grad()
    def step(self) -> Tensor:
        self.token.copy_(self.logits().argmax(-1, keepdim=True))
        return self.token

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        self.start(ids)
        rows = [self.first.float()]
        for i in range(tokens.shape[1] - 1):
            self.token.copy_(tokens[:, i : i + 1])
            rows.append(self.logits().float())
        return torch.cat(rows)


class Step(Module):
    """The generated decode step, its kernels and the choice of the token captured as one CUDA graph."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        from weft.backends.torch.package.module import build_step

        super().__init__(shape, device, batch, capacity, model)
        self.run = build_step(self.forms, self.module, float8_caches=shape.bits == 8)
        self.position = torch.zeros_like(self.token)
        self.active = torch.ones_like(self.token, dtype=torch.bool)
        self.tickets = Tickets(TICKETS)
        self.held = torch.empty(0)
        self.replay: Callable[[], None] | None = None

    def start(self, ids: Tensor) -> None:
        if self.replay is None:
            with torch.no_grad():
                self.replay = captured([self.advance])
        super().start(ids)
        self.position.fill_(ids.shape[1])

    def advance(self) -> None:
        self.held = self.run(self.token, self.position, self.cache)[:, -1]  # a replay writes it where the capture did
        begun = (self.token, self.position, self.active)
        choose_tokens(self.held, begun=begun, tickets=self.tickets(self.held))

    @torch.no_grad()
    def logits(self) -> Tensor:
        self.step()
        return self.held.clone()

    @torch.no_grad()
    def step(self) -> Tensor:
        assert self.replay is not None
        self.replay()
        return self.token


class Runtime(Module):
    """weft's runtime: the step captured by it, and every token drawn on the device and given to the host."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        from weft.backends.runtime.core.sampling import Sampler, Sampling
        from weft.backends.runtime.torch.decoder import TorchContext, TorchDecoder
        from weft.backends.torch.package.module import build_step
        from weft.backends.torch.package.shipped.load import Stepper

        super().__init__(shape, device, batch, capacity, model)
        one = build_step(self.forms, self.module, float8_caches=shape.bits == 8)
        step = Stepper(self.module, one, most=batch)  # as a folder has it
        decoder = TorchDecoder(self.module, vocab=self.vocab, max_length=capacity, step=step, draws=True)
        self.cache = None
        self.context = TorchContext(decoder, batch, capacity)
        self.samplers = [Sampler(Sampling(), ()) for _ in range(batch)]
        self.draw: Any = None

    def start(self, ids: Tensor) -> None:
        scores = self.context.prefill(ids.tolist(), chunk=ids.shape[1])
        self.first = torch.from_numpy(scores.copy())
        self.token = self.first.argmax(-1, keepdim=True)
        self.draw = self.context.drawing(self.samplers)

    def step(self) -> Tensor:
        drawn = self.draw(self.token[:, 0].numpy(), np.ones(len(self.token), bool))
        self.token = torch.from_numpy(drawn)[:, None]
        return self.token

    def logits(self) -> Tensor:
        return torch.from_numpy(self.context.step(self.token[:, 0].numpy()).copy())

    def forced(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return super().forced(ids, tokens).to(tokens.device)


OURS: dict[str, Callable[..., Contender]] = {"weft_step": Step, "weft_runtime": Runtime, "weft_module": Module}
COMPILED = "hf_static_compiled"
FIRST = ("weft_step", COMPILED)  # contenders of every case; the others decode one text, and come after these
STEPS_AFTER = {32: 127, 1024: 64, 32_768: 32}  # tokens of a prompt: steps of a round
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


def prepare_decode(args: Namespace, name: str, case: Case, shape: Shape, steps: int) -> Callable[[], dict[str, Any]]:
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


def list_decode(args: Namespace) -> Iterator[Work]:
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
        steps = STEPS_AFTER.get(case.length, 4)
        seconds = shape.layers * {COMPILED: 2.0, "hf_static_autotuned": 6.0}.get(name, 0.8) + 10
        cache = case.batch * case.length * shape.layers * 4 * shape.kv_heads * shape.head_dim / 2**30
        held = 1 if shape.bits == 16 or name in PEERS else 0.3
        memory = 3 + held * shape.gib() * (1.6 if name in OURS else 1.1) + 4 * cache
        # Six times as long as the weights take to be read, at 4 TB/s.
        alone = 1 + 12 * ROUNDS * steps * shape.step_bytes(case.length, case.batch) / 4e12
        yield Work(
            f"{case.name}_{name}", partial(prepare_decode, args, name, case, shape, steps), seconds, alone, memory
        )


QUALITY_PROMPT, QUALITY_STEPS = 32, 128


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
    ids = prompt(shape, 1, QUALITY_PROMPT, args.device)
    tokens, want = reference(args, label, shape, ids, steps)
    model = hugging_face(shape, args.device, torch.bfloat16)
    make = OURS.get(name) or partial(peer, name)
    contender: Contender = make(shape, args.device, 1, QUALITY_PROMPT + steps + 1, model)
    got = contender.forced(ids, tokens)
    return {**compared(got, want), "repeats_bit_for_bit": bool((got == contender.forced(ids, tokens)).all())}


def list_quality(args: Namespace) -> Iterator[Work]:
    """The contenders of one text, those of the goals first; codes of 4 bits are random, so no f32 is right."""
    large = args.device == "cuda"
    shapes = {label: shape for label, shape in (DECODERS if large else TINY_DECODERS).items() if shape.bits == 16}
    names = dict.fromkeys(("weft_step", "hf_eager", "weft_runtime", *OURS, *PEERS))
    for name in names:
        for label, shape in shapes.items():
            run = partial(agreement, args, name, label, shape, QUALITY_STEPS if large else 4)
            seconds = 25 + shape.layers * (2 if "compiled" in name else 0.5)
            yield Work(f"{label}_{name}", run, seconds, memory=4 + 3.1 * shape.gib())


def weft_prefill(shape: Shape, device: str, rows: int, by_step: bool = True) -> Callable[[Tensor], Tensor]:
    """A prompt of `rows` tokens into an empty cache, and the logits of the last token: by the decode step, as the
    runtime reads it, or by the module."""
    from weft.backends.torch.package.module import build_step

    forms, module = generated(shape, device)
    step = build_step(forms, module, float8_caches=shape.bits == 8) if by_step else None
    last, positions = torch.tensor([rows - 1], device=device), torch.arange(rows, device=device)[None]

    def read(ids: Tensor) -> Tensor:
        cache = module.new_cache(1, rows)
        logits: Tensor = step(ids, positions, cache, last) if step else module(ids, cache=cache, last=last)
        return logits

    return read


PREFILL_LENGTHS = (2048, 8192, 4096)


@torch.no_grad()
def prepare_prefill(device: str, name: str, shape: Shape, rows: int) -> Callable[[], dict[str, Any]]:
    """Build a contender, let it read a prompt of `rows` tokens, compiled if its name says so; return what times it."""
    read = _hugging_face(shape, device) if name.startswith("hf") else weft_prefill(shape, device, rows, name == "weft")
    if name.endswith("compiled"):
        read = torch.compile(read, dynamic=False)
    ids = prompt(shape, 1, rows, device)
    read(ids)

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        times = Clock(device).calls(partial(read, ids))
        return {"ms": spread([1e3 * t for t in times], 3), "tokens_per_s": round(rows / median(times), 1)}

    return measured


def _hugging_face(shape: Shape, device: str) -> Callable[[Tensor], Tensor]:
    """A prompt into an empty cache, and the logits of the last token."""
    from transformers import DynamicCache

    model = hugging_face(shape, device, torch.bfloat16)

    def read(ids: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return read


def list_prefill(args: Namespace) -> Iterator[Work]:
    """Every length: its floor, then all contenders."""
    large = args.device == "cuda"
    shape = LLAMA_8B if large else TINY
    for rows in PREFILL_LENGTHS if large else (16,):
        yield Work(f"floor_{rows}", lambda rows=rows: partial(floor, args.device, shape, rows), alone=6, memory=6)
        for name, layer in {
            "weft": 0.5,
            "weft_module": 0.5,
            "hf_eager": 0.3,
            "weft_compiled": 3,
            "hf_compiled": 3,
        }.items():
            run = partial(prepare_prefill, args.device, name, shape, rows)
            alone = 2 + 10 * rows / 8192
            yield Work(f"{name}_{rows}", run, 12 + shape.layers * layer, alone, 6 + 1.3 * shape.gib())
