"""Steps of training: gradients of an objective, on one process or several, and AdamW."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .batches import WindowBatch, Windows
from .objectives import Objective
from .optimizer import compute_rate, group_parameters


@dataclass(frozen=True)
class Plan:
    """Length and speed of a training.

    batch: windows per step, of all processes. accumulate: parts in which a batch is computed. rate: peak learning rate.
    warmup: share of the run in which it rises. clip: largest norm of the gradient. seconds: time limit,
    validations included.
    """

    steps: int
    batch: int
    accumulate: int = 1
    rate: float = 1e-3
    warmup: float = 0.0
    schedule: str = "cosine"
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seconds: float | None = None


@dataclass(frozen=True)
class TrainingStep:
    """A step that is done: its number from 1, the terms of the loss by name, learning rate, norm of the gradient before
    clipping, and seconds."""

    number: int
    losses: Mapping[str, float]
    rate: float
    gradient: float
    seconds: float


def open_accelerator(device: str, bf16: bool, accumulate: int = 1) -> Accelerator:
    """Return the connection to the processes that torchrun started, or to this one alone. bf16: matrix products of
    training in bf16."""
    # Accelerate has one state per process, which does not change: an earlier run here may have had another.
    AcceleratorState._reset_state(reset_partial_state=True)
    precision = "bf16" if bf16 else "no"
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=accumulate)
    if accelerator.num_processes > 1:
        atexit.register(accelerator.state.destroy_process_group)  # before Python ends, as torch asks
    return accelerator


class Trainer:
    """Training of a module on windows by an objective.

    With several processes, each computes its own rows of a batch. It holds a shard of every weight, and gathers the
    weights of a layer only while this runs (FSDP2).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        net: nn.Module,
        objective: Objective,
        data: Windows,
        plan: Plan,
        decayed: Collection[str] = (),
        factors: Mapping[str, float] = {},
        sharded: bool = True,
    ) -> None:
        """Prepare to train those parameters of `net` that require gradients; `decayed` and `factors` as in
        `group_parameters`. sharded: several processes hold parts of the weights; else each holds all."""
        self.accelerator, self.objective, self.data, self.plan = accelerator, objective, data, plan
        self.sharded = sharded and accelerator.num_processes > 1
        self.net = _shard(net, accelerator) if self.sharded else net.to(accelerator.device)
        self.groups = group_parameters(net, decayed, plan.decay, factors)
        fused = not self.sharded
        optimizer = torch.optim.AdamW(self.groups, lr=plan.rate, betas=plan.betas, fused=fused)
        self.optimizer: Any = accelerator.prepare_optimizer(optimizer)
        self.step, self.elapsed = 0, 0.0

    @property
    def done(self) -> float:
        """Return the share of the plan that is done, at least 1 at its end."""
        spent = 0.0 if self.plan.seconds is None else self.elapsed / self.plan.seconds
        return max(self.step / self.plan.steps, spent)

    def train(self) -> Iterator[TrainingStep]:
        """Run the steps that the plan has left, and yield each when it is done.

        Raises:
            FloatingPointError: if the loss is not finite; the weights are as before this step.
        """
        is_over = self.done >= 1
        while not is_over:
            record = self._run_step()
            self._add_time(record.seconds)
            is_over, start = self.done >= 1, time.perf_counter()  # the last step is one that the caller sees as such
            yield record
            self._add_time(time.perf_counter() - start)  # of the validation, for example

    def _add_time(self, seconds: float) -> None:
        """Add to the time of the run: the mean over the processes, as rates and the end depend on it."""
        if self.plan.seconds is not None and self.accelerator.num_processes > 1:
            total = torch.tensor(seconds, device=self.accelerator.device)
            seconds = float(self.accelerator.reduce(total, "mean"))
        self.elapsed += seconds

    def _run_step(self) -> TrainingStep:
        start, plan = time.perf_counter(), self.plan
        spent = 0.0 if plan.seconds is None else self.elapsed / plan.seconds
        done = max((self.step + 1) / plan.steps, spent)
        rate = plan.rate * compute_rate(plan.schedule, done, plan.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.net.train()
        totals: dict[str, Tensor] = {}
        batch = self._own_rows(self.data.draw(self.step * plan.batch, plan.batch))
        for part in batch.split(-(-len(batch.windows) // plan.accumulate)):
            with self.accelerator.accumulate(self.net), self.accelerator.autocast():
                losses = self.objective(self.net, part)
                self.accelerator.backward(sum(losses.values()))
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss.detach() / plan.accumulate
        means = {name: float(self.accelerator.reduce(total, "mean")) for name, total in totals.items()}
        parameters = [p for group in self.groups for p in group["params"]]
        if not self.sharded:
            for p in parameters:
                p.grad = None if p.grad is None else self.accelerator.reduce(p.grad, "mean")
        gradient = self.accelerator.clip_grad_norm_(parameters, plan.clip)
        norm = float(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
        if not all(map(math.isfinite, (*means.values(), norm))):
            raise FloatingPointError(f"step {self.step + 1}: the loss is {means}, its gradient {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return TrainingStep(self.step, means, rate, norm, time.perf_counter() - start)

    def _own_rows(self, batch: WindowBatch) -> WindowBatch:
        """Return the rows of `batch` that this process computes."""
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        return WindowBatch(
            batch.windows.chunk(count)[rank].to(self.accelerator.device), batch.indices.chunk(count)[rank]
        )

    @torch.no_grad()
    def validate(self, data: Windows, limit: int | None = None) -> float:
        """Return the mean of the objective's ``loss``, in f32, over `data` or `limit` evenly spaced windows of it."""
        self.net.eval()
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        chosen = np.linspace(0, len(data) - 1, min(len(data), limit or len(data))).round().astype(np.int64)
        total = torch.zeros((), device=self.accelerator.device)
        size = max(1, self.plan.batch // (self.plan.accumulate * count))
        for start in range(0, len(chosen), size * count):
            # Every process runs equally often, because a run gathers the shards of all; its result may count 0 times.
            first = start + rank * size
            indices = chosen[first : first + size]
            batch = data.read(indices if len(indices) else chosen[:1])
            batch = WindowBatch(batch.windows.to(self.accelerator.device), batch.indices)
            total += self.objective(self.net, batch)["loss"] * len(indices)
        return float(self.accelerator.reduce(total, "sum")) / len(chosen)


def _shard(net: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return `net` with its weights sharded among the processes (Rajbhandari 2020, arXiv 1910.02054), layer by layer.

    accelerate shards on GPUs only; PyTorch itself also does on CPUs.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    bf16 = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layers in [module for name, module in net.named_modules() if name.rpartition(".")[2] == "layers"]:
        for layer in layers.children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net
