"""The settings of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from weft.ir.errors import WeftError

from ....model import Model
from ..initialization import SCHEMES, Scheme

if TYPE_CHECKING:
    from weft.backends.torch.training.trainer import Plan

SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of `weft.train` and `weft.compare`.

    steps: number of optimizer steps. tokens: number of tokens instead. minutes: time limit; the schedule adapts to it
    (None for all three: 600 steps). batch: windows per step, of all processes. context: tokens per window (None: the
    model's context, at most 256). accumulate: parts in which a batch is computed, one after the other. rate: peak
    learning rate of AdamW (None: 0.002 for random weights, 0.0001 for a checkpoint). warmup: steps of its linear rise
    (None: a tenth of all, at most 100; 3 % of the minutes). schedule: ``cosine`` falls to a tenth, ``wsd`` is constant
    and falls to 0 in the last fifth, ``constant``. decay: weight decay of the weights of products and tables; norms,
    biases and the parameters of recurrences have none. betas: of AdamW. clip: largest norm of the gradient. bf16:
    matrix products in bf16. checkpointing: compute activations again in the backward pass, in less memory. compiled:
    compile the module with torch.compile. init, width: scheme of the initial weights, and its width
    (`weft.initialize`); ``mup`` also scales the learning rates. lora: train matrices of this rank that are
    added to the weights of linear layers, instead of the weights; the folder ``adapter`` of the run is theirs in the
    format of PEFT. validate_every: steps from one validation and
    checkpoint to the next (None: a tenth of the run). seed: of the initial weights and the order of the windows.

    Raises:
        WeftError: if a value is out of its range.
    """

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    batch: int = 16
    context: int | None = None
    accumulate: int = 1
    rate: float | None = None
    warmup: int | None = None
    schedule: str = "cosine"
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    bf16: bool = False
    checkpointing: bool = False
    compiled: bool = False
    init: Scheme | None = None
    width: int = 256
    lora: int | None = None
    validate_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "validate_every", "tokens", "context", "width", "lora"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise WeftError(f"{name} is {number}, but it must be at least 1")
        for name in ("rate", "clip", "minutes"):
            if (number := getattr(self, name)) is not None and not 0 < number < float("inf"):
                raise WeftError(f"{name} is {number}, but it must be a positive number")
        for name in ("decay", "warmup", "seed"):
            if (number := getattr(self, name)) is not None and not 0 <= number < float("inf"):
                raise WeftError(f"{name} is {number}, but it must be at least 0")
        for name, names in (("schedule", SCHEDULES), ("init", (None, *SCHEMES))):
            if getattr(self, name) not in names:
                raise WeftError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(map(str, names))}")
        if self.batch % self.accumulate:
            raise WeftError(f"a batch of {self.batch} windows cannot be computed in {self.accumulate} equal parts")

    def resolve(self, model: Model) -> Self:
        """Return the settings with the values that depend on `model` filled in.

        Raises:
            WeftError: if the context exceeds the model's table of positions.
        """
        context = self.context or min(model.graph.meta.get("context") or 256, 256)
        if context > (longest := model.graph.meta.get("max_positions") or context):
            raise WeftError(f"context is {context}, but {model.spec} has {longest} positions: choose a smaller one")
        steps = self.steps or (1 << 40 if self.minutes else 600)
        if self.tokens is not None:
            steps = -(-self.tokens // (self.batch * context))
        rate = self.rate or (2e-3 if model.random_init or self.lora else 1e-4)
        return dataclasses.replace(self, context=context, steps=steps, tokens=None, rate=rate)

    def make_plan(self, share: float = 1.0) -> Plan:
        """Return the plan of these settings, which are resolved, for a `share` of the run."""
        from weft.backends.torch.training.trainer import Plan

        assert self.steps is not None and self.rate is not None
        steps = max(1, round(self.steps * share))
        warmup = 0.03 if self.minutes else min(0.1, 100 / steps)
        return Plan(
            steps,
            self.batch,
            self.accumulate,
            self.rate,
            warmup if self.warmup is None else min(1.0, self.warmup / steps),
            self.schedule,
            self.decay,
            self.betas,
            self.clip,
            None if self.minutes is None else 60 * self.minutes * share,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """Return the settings that `values` of the file `name` hold.

        Raises:
            WeftError: if a value is missing, unknown, or of another type.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        try:
            if values.keys() != fields:
                raise WeftError(f"{name} has settings of another version of weft: {sorted(fields ^ values.keys())[0]}")
            return cls(**{**values, "betas": tuple(values["betas"])})
        except TypeError as e:
            raise WeftError(f"{name} has invalid settings ({e})") from e
