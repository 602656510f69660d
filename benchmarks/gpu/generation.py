"""Speed of decoding and prefill by Hugging Face and weft, and the quality of the logits.

Decode steps are compared with the least time to read weights and KV cache, prompts with the floor of limits.py. Logits
are compared step by step with those of f32 with the same weights, drawn in bf16; the reference has no TF32. It
continues a random prompt greedily; all others decode those same tokens, so that a difference cannot grow by itself.
"""

from __future__ import annotations

import fcntl
from argparse import Namespace
from collections.abc import Callable, Iterator
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

from . import models
from .limits import Clock, capture, microseconds, prefill_floor
from .models import DECODERS, LLAMA_8B, TINY, TINY_DECODERS, TRANSFORMERS, Decoder, Shape, prompt, run_transformers
from .pool import Task

COMPILED = "hf_static_compiled"
FIRST = ("weft_step", COMPILED)  # decoders of every case; all others decode batch 1, after these
STEPS = {32: 127, 1024: 64, 32_768: 32}  # by tokens of a prompt, of a round of decode
ROUNDS = 5
QUALITY_PROMPT, QUALITY_STEPS = 32, 128
PREFILL = {"weft": 0.5, "weft_module": 0.5, "hf_eager": 0.3, "weft_compiled": 3, "hf_compiled": 3}  # seconds per layer


class Module(Decoder):
    """Decode by the generated module with a cache of `capacity` tokens per sequence, one launch after the other."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        self.module, self.build_step = models.generate(shape, device, model)
        self.cache = self.module.new_cache(batch, capacity)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.prompt: Tensor | None = None  # in the cache

    @torch.no_grad()
    def start(self, ids: Tensor) -> None:
        if self.prompt is not ids:  # else its keys and values are still there
            self.cache.length = 0
            last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
            self.first, self.prompt = self.module(ids, cache=self.cache, last=last)[:, -1], ids
        self.cache.length = ids.shape[1]
        self.token.copy_(self.first.argmax(-1, keepdim=True))

    def logits(self) -> Tensor:
        logits: Tensor = self.module(self.token, cache=self.cache)[:, -1]
        return logits


class Step(Module):
    """Decode by the generated step; its kernels and the choice of the token are one CUDA graph."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        super().__init__(shape, device, batch, capacity, model)
        self.run = self.build_step()
        self.position = torch.zeros_like(self.token)
        self.active = torch.ones_like(self.token, dtype=torch.bool)
        self.tickets = Tickets(TICKETS)
        self.output = torch.empty(0)
        self.replay: Callable[[], object] | None = None

    def start(self, ids: Tensor) -> None:
        if self.replay is None:
            with torch.no_grad():
                self.replay = capture([self.advance])
        super().start(ids)
        self.position.fill_(ids.shape[1])

    def advance(self) -> None:
        self.output = self.run(self.token, self.position, self.cache)[:, -1]  # replays write to the captured tensor
        begun = (self.token, self.position, self.active)
        choose_tokens(self.output, begun=begun, tickets=self.tickets(self.output))

    def logits(self) -> Tensor:
        self.step()
        return self.output.clone()

    @torch.no_grad()
    def step(self) -> Tensor:
        assert self.replay is not None
        self.replay()
        return self.token


class Runtime(Module):
    """Decode by weft's runtime, which captures the step, samples on the device and hands every token to the host."""

    def __init__(self, shape: Shape, device: str, batch: int, capacity: int, model: Any = None) -> None:
        from weft.backends.folder_facts import FolderFacts
        from weft.backends.runtime.core.sampler import Sampler, Sampling
        from weft.backends.runtime.torch.torch_decoder import TorchContext, TorchDecoder
        from weft.backends.torch.package.shipped.load import Stepper

        super().__init__(shape, device, batch, capacity, model)
        step = Stepper(self.module, self.build_step(), most=batch)
        facts = FolderFacts(Path(), (Path("model.py"),), "decoder", "torch", shape.vocab, capacity)
        decoder = TorchDecoder(self.module, facts, step=step, draws=True)
        self.cache = None
        self.context = TorchContext(decoder, batch, capacity)
        self.samplers = [Sampler(Sampling(), ()) for _ in range(batch)]
        self.draw: Any = None

    def start(self, ids: Tensor) -> None:
        scores = self.context.prefill(ids.tolist(), chunk=ids.shape[1])
        self.first = torch.from_numpy(scores.copy())
        self.token = self.first.argmax(-1, keepdim=True)
        self.draw = self.context.new_sampling_step(self.samplers)

    def step(self) -> Tensor:
        tokens = self.draw(self.token[:, 0].numpy(), np.ones(len(self.token), bool))
        self.token = torch.from_numpy(tokens)[:, None]
        return self.token

    def logits(self) -> Tensor:
        return torch.from_numpy(self.context.step(self.token[:, 0].numpy()).copy())

    def force(self, ids: Tensor, tokens: Tensor) -> Tensor:
        return super().force(ids, tokens).to(tokens.device)


WEFT: dict[str, Callable[..., Decoder]] = {"weft_step": Step, "weft_runtime": Runtime, "weft_module": Module}


def build_decoder(name: str, *args: Any) -> Decoder:
    """Build a decoder of weft or transformers from shape, device, batch, capacity and optionally a model."""
    return WEFT[name](*args) if name in WEFT else models.build_transformers(name, *args)


def time_decode(clock: Clock, decoder: Decoder, ids: Tensor, steps: int, size: int) -> dict[str, Any]:
    """Time a step in microseconds, without reads by the host in between and with a read of every token."""

    def run() -> None:
        for _ in range(steps):
            decoder.step()

    def read() -> None:
        for _ in range(steps):
            decoder.step().tolist()

    result: dict[str, Any] = {"bytes": size}
    for name, call in (("step_us", run), ("read_step_us", read)):
        times = []
        for _ in range(ROUNDS if clock.cuda else 1):
            decoder.start(ids)
            times.append(clock.once(call) / steps)
        result[name] = microseconds(times)
    seconds = result["step_us"]["median"] / 1e6
    return result | {"tokens_per_s": round(len(ids) / seconds, 1), "gb_per_s": round(size / seconds / 1e9, 1)}


def prepare_decode(
    device: str, name: str, shape: Shape, batch: int, length: int, steps: int
) -> Callable[[], dict[str, Any]]:
    """Build a decoder, run a few steps for it to compile, capture and plan, and return the function that times it."""
    ids = prompt(shape, batch, length, device)
    decoder = build_decoder(name, shape, device, batch, length + steps + 1)
    for _ in range(2):
        decoder.start(ids)
        for _ in range(3):
            decoder.step()
    return partial(time_decode, Clock(device), decoder, ids, steps, shape.step_bytes(length + steps // 2, batch))


def list_decode(args: Namespace) -> Iterator[Task]:
    """Yield every case with the decoders of FIRST, the headlines first, then with all others; long prompts last."""
    large = args.device == "cuda"
    shapes = DECODERS if large else TINY_DECODERS
    sizes = ((1, 32), (32, 1024), (8, 1024), (1, 1024)) if large else ((1, 8), (4, 8))
    cases = [(label, batch, length) for batch, length in sizes for label in shapes]
    others = [name for name in (*WEFT, *TRANSFORMERS, *(models.AUTOTUNED if args.slow else ())) if name not in FIRST]
    named = [(case, name) for case in cases for name in FIRST]
    named += [(case, name) for case in cases if case[1] == 1 for name in others]
    named += [((label, 1, 32_768), name) for label in ("8b", "1b") if large for name in (*FIRST, *others)]
    for (label, batch, length), name in named:
        shape = shapes[label]
        if name in TRANSFORMERS and (shape.bits == 8 or (shape.bits == 4 and not large)):
            continue  # torch multiplies codes of 4 bits on GPUs only, and one row of FP8 by blocks nowhere
        steps = STEPS.get(length, 4)
        seconds = shape.layers * {COMPILED: 2.0, "hf_static_autotuned": 6.0}.get(name, 0.8) + 10
        cache = batch * length * shape.layers * 4 * shape.kv_heads * shape.head_dim / 2**30
        share = 1 if shape.bits == 16 or name in TRANSFORMERS else 0.3  # of the weights in bf16
        memory = 3 + share * shape.gib() * (1.6 if name in WEFT else 1.1) + 4 * cache
        # Six times as long as the weights take to be read, at 4 TB/s.
        alone = 1 + 12 * ROUNDS * steps * shape.step_bytes(length, batch) / 4e12
        run = partial(prepare_decode, args.device, name, shape, batch, length, steps)
        yield Task(f"{label}_batch_{batch}_after_{length}_{name}", run, seconds, alone, memory)


def compute_reference(args: Namespace, label: str, shape: Shape, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return greedy tokens [1, steps] of the model in f32 after `ids`, and their logits [steps, vocab].

    The first process computes them; all others wait for its file.
    """
    path = Path(args.scratch) / f"reference_{label}.pt"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            decoder = models.Eager(models.hugging_face(shape, args.device).float())
            decoder.start(ids)
            tokens = torch.cat([decoder.token, *(decoder.step() for _ in range(steps - 1))], 1)
            torch.save((tokens, decoder.force(ids, tokens)), path)
    greedy, logits = torch.load(path)
    return greedy, logits


def compare_logits(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Compare logits [steps, vocab] in f32: divergence of `got` from `want`, agreement of the argmax, relative error.

    `worst_gap` is by how many logits the reference prefers its own argmax, where the two differ.
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
def measure_quality(args: Namespace, name: str, label: str, shape: Shape, steps: int) -> dict[str, Any]:
    """Compare a decoder's logits with the reference's, and with its own when it computes them again."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = prompt(shape, 1, QUALITY_PROMPT, args.device)
    tokens, want = compute_reference(args, label, shape, ids, steps)
    model = models.hugging_face(shape, args.device)
    decoder = build_decoder(name, shape, args.device, 1, QUALITY_PROMPT + steps + 1, model)
    got = decoder.force(ids, tokens)
    return {**compare_logits(got, want), "repeats_bit_for_bit": bool((got == decoder.force(ids, tokens)).all())}


def list_quality(args: Namespace) -> Iterator[Task]:
    """Yield the decoders of batch 1, those of the goals first; random codes have no reference in f32."""
    large = args.device == "cuda"
    shapes = {label: shape for label, shape in (DECODERS if large else TINY_DECODERS).items() if shape.bits == 16}
    for name in dict.fromkeys(("weft_step", "hf_eager", "weft_runtime", *WEFT, *TRANSFORMERS)):
        for label, shape in shapes.items():
            run = partial(measure_quality, args, name, label, shape, QUALITY_STEPS if large else 4)
            seconds = 25 + shape.layers * (2 if "compiled" in name else 0.5)
            yield Task(f"{label}_{name}", run, seconds, memory=4 + 3.1 * shape.gib())


def build_prefill(name: str, shape: Shape, device: str, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function that reads a prompt of `rows` tokens into an empty cache and returns the last logits.

    weft reads by the decode step, like its runtime, or by the module.
    """
    if name.startswith("hf"):
        from transformers import DynamicCache

        model = models.hugging_face(shape, device)
        return lambda ids: run_transformers(model, ids, DynamicCache(config=model.config))
    module, build_step = models.generate(shape, device)
    last, positions = torch.tensor([rows - 1], device=device), torch.arange(rows, device=device)[None]
    if name != "weft":
        return lambda ids: module(ids, cache=module.new_cache(1, rows), last=last)
    step = build_step()
    return lambda ids: step(ids, positions, module.new_cache(1, rows), last)


@torch.no_grad()
def prepare_prefill(device: str, name: str, shape: Shape, rows: int) -> Callable[[], dict[str, Any]]:
    """Build a model and let it read a prompt once, compiled if its name ends so; return the function that times it."""
    read = build_prefill(name, shape, device, rows)
    if name.endswith("compiled"):
        read = torch.compile(read, dynamic=False)
    ids = prompt(shape, 1, rows, device)
    read(ids)

    @torch.no_grad()
    def time_prefill() -> dict[str, Any]:
        times = Clock(device).calls(partial(read, ids))
        return {"ms": spread([1e3 * t for t in times], 3), "tokens_per_s": round(rows / median(times), 1)}

    return time_prefill


def list_prefill(args: Namespace) -> Iterator[Task]:
    """Yield the floor of every length, then all models."""
    large = args.device == "cuda"
    shape = LLAMA_8B if large else TINY
    for rows in (2048, 8192, 4096) if large else (16,):
        floor = partial(prefill_floor, args.device, shape, rows)
        yield Task(f"floor_{rows}", partial(partial, floor), alone=6, memory=6)
        for name, seconds in PREFILL.items():
            run = partial(prepare_prefill, args.device, name, shape, rows)
            alone = 2 + 10 * rows / 8192
            yield Task(f"{name}_{rows}", run, 12 + shape.layers * seconds, alone, 6 + 1.3 * shape.gib())
