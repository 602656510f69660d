"""The settings of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from weft.ir.errors import WeftError

if TYPE_CHECKING:
    from weft.backends.torch.training.trainer import Plan

    from ....model import Model


UNUSED = ("init", "width", "lora", "compiled", "checkpointing")  # by distillation


def setting(default: Any, help: str, *, least: int | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Return a field of settings with the `help` of its option; a number must be `least` or more, without it positive.
    `choices`: the valid words."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least, "choices": choices})


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of `weft.train` and `weft.compare`. None is replaced by the default that the help of a field states.

    Raises:
        WeftError: if a value is out of its range.
    """

    steps: int | None = setting(None, "Optimizer steps; default: 600.", least=1)
    tokens: int | None = setting(None, "Tokens to train on, instead of --steps.", least=1)
    minutes: float | None = setting(None, "Time limit; rates fall accordingly.")
    batch: int = setting(16, "Windows per step, of all processes; default: 16.", least=1)
    context: int | None = setting(None, "Tokens per window; default: the model's context, at most 256.", least=1)
    accumulate: int = setting(1, "Compute a batch in this number of parts; default: 1.", least=1)
    rate: float | None = setting(
        None, "Peak learning rate of AdamW; default: 0.002 for random weights, 0.0001 for a checkpoint."
    )
    warmup: int | None = setting(
        None, "Steps of its linear rise; default: a tenth, at most 100; with --minutes 3 % of the time.", least=0
    )
    schedule: str = setting(
        "cosine",
        "Fall to a tenth along a cosine (default), to 0 in the last fifth, or not at all.",
        choices=("cosine", "wsd", "constant"),
    )
    decay: float = setting(
        0.1, "Weight decay of matrices and tables, not of norms, biases and recurrences; default: 0.1.", least=0
    )
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    clip: float = setting(1.0, "The largest norm of the gradient; default: 1.")
    init: str | None = setting(
        None,
        "Scheme of the initial weights, as in `weft.initialize`; mup also scales the rates. Default: the "
        "architecture's own.",
        choices=("plain", "depth", "fan-in", "mup"),
    )
    width: int = setting(256, "The width at which mup's rates were tuned; default: 256.", least=1)
    lora: int | None = setting(
        None,
        "Train matrices of this rank, added to linear weights, instead of the weights; also write them for PEFT.",
        least=1,
    )
    validate_every: int | None = setting(
        None, "Steps between validations, with a checkpoint each; default: a tenth of the run.", least=1
    )
    bf16: bool = setting(False, "Matrix products in bf16.")
    checkpointing: bool = setting(False, "Compute activations again in the backward pass: less memory.")
    compiled: bool = setting(False, "Compile the module with torch.compile.")
    seed: int = setting(0, "Of the initial weights and the order of the text; default: 0.", least=0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata.get("least")
            if choices := field.metadata.get("choices"):
                if value not in (field.default, *choices):
                    raise WeftError(f"unknown {field.name} {value!r}; known are {', '.join(choices)}")
            elif "least" in field.metadata and value is not None and not isinstance(value, bool):
                is_low = value <= 0 if least is None else value < least
                if is_low or not value < float("inf"):
                    rule = "a positive number" if least is None else f"at least {least}"
                    raise WeftError(f"{field.name} is {value}, but it must be {rule}")
        if self.steps is not None and self.tokens is not None:
            raise WeftError("steps and tokens both are the length of the run: give one of them")
        if self.minutes is not None and self.warmup is not None:
            raise WeftError("warmup is a number of steps, which minutes does not know: leave it out")
        if self.width != type(self).width and self.init != "mup":
            raise WeftError("width is a setting of init=mup: leave it out")
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
            return cls(**{**values, "betas": tuple(map(float, values["betas"]))})
        except (TypeError, ValueError) as e:
            raise WeftError(f"{name} has invalid settings ({e})") from e


@dataclass(frozen=True)
class DistilSettings(TrainingSettings):
    """Settings of `weft.distil`.

    train: groups of parameters that train: ``scales`` (of quantized weights), ``norms``, ``biases``, ``changed``
    (sublayers with an operation or a weight that is not the original's), ``all``, patterns of names such as
    ``layers.*.attn.*``, and ``lora`` (products of low `rank`, added to all other float matrices). None: scales, norms
    and biases of a quantized model; else changed, or all if nothing has changed.
    """

    batch: int = setting(8, "Windows per step, of all processes; default: 8.", least=1)
    rate: float | None = setting(
        None,
        "Peak learning rate of AdamW, relative to the root mean square of each parameter; default: 0.005, for "
        "floats less if the divergence is below 0.25 nats.",
    )
    decay: float = setting(0.0, "Weight decay of matrices and tables; default: 0.", least=0)
    train: tuple[str, ...] | None = None
    rank: int = setting(8, "Rank of the matrices of lora; default: 8.", least=1)
    layers: float | None = setting(
        None, "Share of the run that trains each layer alone; default: 0.2, 0 for scales.", least=0
    )
    labels: float = setting(0.0, "Weight of the cross-entropy with the text itself; default: 0.", least=0)
    hidden: float = setting(0.0, "Weight of the error of the residual stream after each layer; default: 0.", least=0)
    top: int = setting(64, "Stored tokens of the original per position; default: 64; 0: all.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = [f.name for f in dataclasses.fields(self) if f.name in UNUSED and getattr(self, f.name) != f.default]
        if refused:
            raise WeftError(f"{refused[0]} is a setting of weft.train, without effect on a distillation: leave it out")
        if self.rank != type(self).rank and "lora" not in (self.train or ()):
            raise WeftError("rank is for train=lora: leave it out")
        if (self.layers or 0) >= 1:
            raise WeftError(f"layers is {self.layers}, but it is a share of the run, below 1")
