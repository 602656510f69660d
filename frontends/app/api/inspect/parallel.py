"""Count what devices hold and send each other when they share a model, before it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from weft.backends.targets import TARGETS
from weft.ir.errors import WeftError
from weft.ir.readable import count, size
from weft.ir.types import dtypes
from weft.passes import run_passes
from weft.passes.forms import make_forms

from ....model import Model
from ..compile import MAX_LENGTH

if TYPE_CHECKING:
    from weft.backends.torch.transformers.scale.estimate import Parallel
    from weft.backends.torch.transformers.scale.traffic import Collective

DEVICES = ("stage", "layers", "weights", "cache/token", "cache", "state", "FLOPs")
TRAFFIC = ("collective", "among", "times", "message", "bytes/token", "sent/token", "for")


def parallel(model: Model, split: str, tokens: int, dtype: str = "f16") -> Parallel:
    """Return what each device holds and sends where `model` is divided by ``tp=8,ep=8,pp=2``: linear maps, experts and
    layers, by the plans that ``weft compile --target transformers`` writes.

    Raises:
        WeftError: if the text cannot be parsed, naming what cannot be divided so, or if there is no PyTorch: the plans
            are of modules.
    """
    from weft.backends.runtime.torch.folder import pytorch

    pytorch()
    from weft.backends.torch.transformers.build import TransformersFolder
    from weft.backends.torch.transformers.scale.estimate import estimate
    from weft.backends.torch.transformers.scale.split import Split

    degrees = Split.parse(split)
    if (kind := model.graph.meta.get("kind")) not in ("decoder", "encoder"):
        raise WeftError(f"--parallel counts decoders and encoders, and {model.graph.name} is of the kind {kind}")
    target = TARGETS.lookup("transformers")
    graph = run_passes(model.graph, target.pipeline(model.graph, dtype))
    forms = make_forms(graph, target.forms(graph, target.choose({})))
    folder = TransformersFolder(forms, dtype, int(graph.meta.get("context") or MAX_LENGTH), "", [])
    item = dtypes.parse(dtype).bits // 8
    return estimate(folder.base, folder.plans, folder.tensors, degrees, dtype, item, tokens)


def device_rows(costs: Parallel) -> list[tuple[str, ...]]:
    """A row of `DEVICES` for each stage."""
    return [
        (
            str(number),
            f"{first}-{stop - 1}" if stop > first else "",
            size(stage.weights),
            size(stage.cache_per_token) if stage.cache_per_token else "",
            size(stage.cache) if stage.cache else "",
            size(stage.state) if stage.state else "",
            count(stage.flops),
        )
        for number, stage in enumerate(costs.stages)
        for first, stop in [stage.layers]
    ]


def traffic_rows(costs: Parallel) -> Iterator[tuple[str, ...]]:
    """A row of `TRAFFIC` for each kind of collective with messages of one size; a token passes all stages."""

    def alike(c: Collective) -> tuple[str, str, int, int]:
        return c.kind, c.group, c.degree, c.size

    for (kind, group, degree, message), same in groupby(sorted(costs.collectives, key=alike), alike):
        found = [*same]
        names = sorted({c.path.rpartition(".")[2] for c in found})
        yield (
            kind,
            f"{degree} {group}",
            f"× {len(found)}",
            size(message),
            size(message * len(found)),
            size(round(sum(c.sent for c in found))),
            ", ".join(names),
        )


def summary(costs: Parallel) -> str:
    """The split in words, with the bubble of its pipeline."""
    split = costs.split
    degrees = ", ".join(f"{name}={n}" for name, n in vars(split).items() if n > 1) or "one device"
    text = f"parallel: {degrees}: {count(split.devices)} devices, {costs.tokens} tokens in {costs.dtype}"
    if split.pp == 1:
        return text
    waits = f"each stage waits {costs.bubble:.0%} of the time with {split.microbatches} "
    return f"{text}; {waits}{'microbatches' if split.microbatches > 1 else 'batch at a time'}"
