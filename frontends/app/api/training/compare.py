"""`weft.compare`: variants of an architecture trained side by side, at equal tokens or equal compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from weft.backends.viz.formats.chart import Curve, check_chart, render_curves
from weft.ir.errors import WeftError
from weft.ir.storage import replace_file, scratch_folder
from weft.ir.storage.documents import expand_home
from weft.ir.types.sizes import evaluate
from weft.passes.analysis.costs import compute_cost, count_parameters
from weft.passes.fitting.calibration import find_vocabulary_size

from ....model import Model
from ..inspect.counting import inspect
from ..source.sources import load_source
from .corpus import Corpus, Progress, attach_tokenizer, predicts_masked
from .runs import MAX_HELD_OUT, read_tokens
from .trainers import Training, check_trainable, choose_device, open_training
from .training_settings import TrainingSettings

POINTS = 20  # validations of a run
BACKWARD = 2  # FLOPs of a backward pass relative to the forward pass: the gradients of inputs and of weights


@dataclass(frozen=True)
class Point:
    """A validation: tokens, FLOPs and seconds of training before it, and the loss in nats per token."""

    tokens: int
    flops: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class TrainedVariant:
    """A variant of a comparison: its source, parameters, FLOPs per token of training, bytes of cache per token in f32,
    and the points of its run for each seed."""

    name: str
    parameters: int
    flops_per_token: float
    cache_bytes: int
    runs: tuple[tuple[Point, ...], ...]

    @property
    def losses(self) -> list[float]:
        """Return the loss at the end of each run."""
        return [run[-1].loss for run in self.runs]

    @property
    def spread(self) -> float:
        """Return the standard deviation of the loss over the seeds; 0 for one seed."""
        return stdev(self.losses) if len(self.runs) > 1 else 0.0


def compare(
    sources: Sequence[str],
    text: str | Path | Sequence[str | Path],
    settings: TrainingSettings = TrainingSettings(),  # noqa: B008 (it is frozen)
    *,
    flops: float | None = None,
    seeds: int = 3,
    match_parameters: bool = False,
    tokenizer: str | None = None,
    validation: str | Path | None = None,
    field: str = "text",
    device: str = "auto",
    report: Callable[[str, int, float, Point], None] = lambda name, seed, done, point: None,
    progress: Progress = lambda stage, done, total: None,
) -> list[TrainedVariant]:
    """Train the architectures `sources` on the same text with the same settings, and return their losses.

    Steps of the variants alternate, so that other load on the machine affects all alike. Every seed initializes the
    weights and orders the text anew.

    Args:
        flops: train each variant with this number of FLOPs, instead of the settings' steps: with equal compute, a
            smaller variant reads more tokens.
        seeds: number of runs of each variant.
        match_parameters: change the widths of the feed-forwards of all variants except the first, so that their sizes
            in parameters are as close to the first's as possible.
        tokenizer, validation, field, device: as in `train`.
        report: called after each validation with the name of the variant, the seed, the share of its run that is done,
            and the point.

    Raises:
        WeftError: if there are fewer than two sources, one is not an architecture, or as in `train`.
    """
    if len(sources) < 2 or seeds < 1:
        raise WeftError("a comparison needs two architectures or more, and seeds of 1 or more")
    if flops is not None and (settings.steps or settings.tokens):
        raise WeftError("flops and steps or tokens both are the length of a run: give one of them")
    if flops is not None and not 0 < flops < math.inf:
        raise WeftError(f"flops is {flops:g}, but it must be a positive number")
    if settings.minutes is not None:
        raise WeftError("variants are compared at equal steps, tokens or FLOPs, not in equal time")
    from weft.backends.torch.training.trainer import open_accelerator

    paths = [text] if isinstance(text, str | Path) else text
    training = [Corpus(expand_home(path), field) for path in paths]
    rest = [] if validation is None else [Corpus(expand_home(validation), field)]
    accelerator = open_accelerator(choose_device(device), settings.bf16, settings.accumulate)
    models = _open_variants(sources, tokenizer, training)
    models = [models[0], *(_match(model, models[0]) for model in models[1:])] if match_parameters else models
    settings, every = settings.resolve(models[0]), settings.validate_every
    ids, held_out = read_tokens(models[0], training, rest, settings, progress)
    for model in models[1:]:
        settings.resolve(model)
        if (largest := max(ids.max(), held_out.max())) >= (vocab := find_vocabulary_size(model.graph)):
            raise WeftError(f"the text has token {largest}, but the tokens of {model.spec} are 0 to {vocab - 1}")
    costs = [_count_flops(model, settings) for model in models]
    runs: list[list[tuple[Point, ...]]] = [[] for _ in models]
    for seed in range(settings.seed, settings.seed + seeds):
        courses = []
        for model, cost in zip(models, costs, strict=True):
            variant_settings = replace(settings, seed=seed, steps=_count_steps(cost, settings, flops))
            drawn = load_source(model.module, seed)
            model = replace(model, graph=drawn.graph, seed=seed)
            courses.append(_Course(open_training(model, ids, held_out, variant_settings, accelerator), cost, every))
        while any(course.trainer.done < 1 for course in courses):
            at = min(range(len(courses)), key=lambda n: courses[n].trainer.done)
            if (point := courses[at].run_step()) is not None:
                report(models[at].spec, seed, courses[at].trainer.done, point)
        for course, earlier in zip(courses, runs, strict=True):
            earlier.append(tuple(course.points))
    return [
        TrainedVariant(
            model.spec,
            count_parameters(model.graph),
            cost,
            4 * (inspect(model, settings.context).cache_per_token or 0),
            tuple(courses_of_variant),
        )
        for model, cost, courses_of_variant in zip(models, costs, runs, strict=True)
    ]


class _Course:
    """The course of a variant's training for one seed. Its time is the sum of its steps, without validations."""

    def __init__(self, training: Training, cost: float, every: int | None) -> None:
        self.trainer, self.held_out, self.cost = training.trainer, training.held_out, cost
        self.points = list[Point]()
        self._steps, self._seconds = self.trainer.train(), 0.0
        self._every = every or max(1, self.trainer.plan.steps // POINTS)

    def run_step(self) -> Point | None:
        """Run a step; return its point if it is validated."""
        step = next(self._steps)
        self._seconds += step.seconds
        if step.number % self._every and self.trainer.done < 1:
            return None
        tokens = step.number * self.trainer.plan.batch * self.trainer.data.stride
        loss = self.trainer.validate(self.held_out, MAX_HELD_OUT)
        self.points.append(Point(tokens, tokens * self.cost, self._seconds, loss))
        return self.points[-1]


def _open_variants(sources: Sequence[str], tokenizer: str | None, corpora: Sequence[Corpus]) -> list[Model]:
    """Return the models of `sources`, all with the tokenizer of the first."""
    loaded = [load_source(source) for source in sources]
    for model in loaded:
        if not model.random_init or model.module is None:
            raise WeftError(f"{model.spec} is not an architecture: comparisons train variants from random weights")
        check_trainable(model)
    if len({predicts_masked(model.graph) for model in loaded}) > 1:
        raise WeftError("losses of next and of masked tokens cannot be compared: give only decoders, or only encoders")
    first = attach_tokenizer(loaded[0], tokenizer, corpora)
    if first.tokenizer is None:
        return [first, *loaded[1:]]
    with scratch_folder() as folder:
        first.tokenizer(folder)
        remaining = [attach_tokenizer(model, str(folder), corpora) for model in loaded[1:]]
    return [first, *(replace(model, tokenizer=first.tokenizer) for model in remaining)]


def _count_flops(model: Model, settings: TrainingSettings) -> float:
    """Return the FLOPs per token of a training step."""
    context = settings.context or 1
    return (1 + BACKWARD) * evaluate(compute_cost(model.graph, seq=context).flops, {}) / context


def _count_steps(cost: float, settings: TrainingSettings, flops: float | None) -> int:
    if flops is None:
        return settings.steps or 0
    return max(1, round(flops / (cost * settings.batch * (settings.context or 1))))


def _match(model: Model, first: Model) -> Model:
    """Return `model` with feed-forwards of a width that brings its number of parameters closest to that of `first`.

    Raises:
        WeftError: if no module of it has a width of this kind, or none can be positive.
    """
    base, doubled = (count_parameters(load_source(_scale(model.module, factor)).graph) for factor in (1.0, 2.0))
    factor = 1 + (count_parameters(first.graph) - base) / (doubled - base) if doubled > base else 0.0
    if factor <= 0:
        raise WeftError(
            f"{model.spec} cannot have the number of parameters of {first.spec} by other widths of feed-forwards"
        )
    module = _scale(model.module, factor)
    return replace(model, graph=load_source(module, model.seed).graph, module=module)


def _scale(module: Any, factor: float) -> Any:
    """Return `module` with all fields called ``hidden`` of it and of modules in it multiplied by `factor`."""
    if isinstance(module, list | tuple):
        return type(module)(_scale(part, factor) for part in module)
    if not dataclasses.is_dataclass(module) or isinstance(module, type):
        return module
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    scaled = {
        name: max(1, round(value * factor)) if name == "hidden" and isinstance(value, int) else _scale(value, factor)
        for name, value in fields.items()
    }
    return dataclasses.replace(module, **{name: value for name, value in scaled.items() if value is not fields[name]})


def draw_comparison(variants: Sequence[TrainedVariant], out: Path, dark: bool = False) -> None:
    """Draw the mean loss of each variant over tokens, FLOPs and seconds, with its range over the seeds, into `out`.

    Raises:
        WeftError: if no chart has the suffix of `out`, matplotlib is not installed, or `out` cannot be written.
    """
    check_chart(out)
    plots: dict[str, list[Curve]] = {}
    for label, key in (("tokens", "tokens"), ("FLOPs", "flops"), ("seconds", "seconds")):
        plots[label] = [_draw_curve(variant, key) for variant in variants]
    with replace_file(out) as partial:
        partial.write_bytes(render_curves(out.suffix, "Loss on held-out text", "nats per token", plots, dark))


def _draw_curve(variant: TrainedVariant, key: str) -> Curve:
    columns = list(zip(*variant.runs, strict=True))
    points = [(mean(getattr(p, key) for p in column), mean(p.loss for p in column)) for column in columns]
    ranges = [(min(p.loss for p in column), max(p.loss for p in column)) for column in columns]
    return Curve(variant.name, points, ranges if len(variant.runs) > 1 else ())
