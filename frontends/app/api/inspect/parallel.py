"""Counts for devices that share a model, before it is compiled: memory, FLOPs and messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from weft.backends.target import TARGETS, import_torch
from weft.ir.errors import WeftError
from weft.ir.readable import format_bytes, format_count
from weft.ir.types import dtypes
from weft.passes import run_passes
from weft.passes.forms import derive_graphs

from ....model import Model
from ..compile import MAX_LENGTH

if TYPE_CHECKING:
    from weft.backends.torch.transformers.scale.estimate import ParallelCosts

DEVICES = ("stage", "layers", "weights", "cache/token", "cache", "state", "FLOPs")
TRAFFIC = ("collective", "among", "times", "message", "bytes/token", "sent/token", "for")


def estimate_parallel(model: Model, split: str, tokens: int, dtype: str = "f16") -> ParallelCosts:
    """Return the memory, FLOPs and traffic of each device for a `model` divided by `split`, such as ``tp=8,ep=8,pp=2``.

    Linear layers, experts and layers are divided by the plans that ``weft compile --target transformers`` writes.

    Raises:
        WeftError: if `split` cannot be parsed, a part cannot be divided (naming it), the model is neither a decoder nor
            an encoder, or PyTorch is missing: the plans refer to modules.
    """
    import_torch()
    from weft.backends.torch.transformers.scale.estimate import estimate_costs
    from weft.backends.torch.transformers.scale.shards import Split
    from weft.backends.torch.transformers.transformers_folder import TransformersFolder

    degrees = Split.parse(split)
    if (kind := model.graph.meta.get("kind")) not in ("decoder", "encoder"):
        raise WeftError(f"--parallel needs a decoder or encoder, not {model.graph.name} of kind {kind}: leave it out")
    target = TARGETS.lookup("transformers")
    graph = run_passes(model.graph, target.pipeline(model.graph, dtype))
    forms = derive_graphs(graph, target.forms(graph, target.choose({})))
    folder = TransformersFolder(forms, dtype, int(graph.meta.get("context") or MAX_LENGTH), "", [])
    item = dtypes.parse(dtype).bits // 8
    return estimate_costs(folder.base, folder.plans, folder.tensors, degrees, dtype, item, tokens)


def list_device_rows(costs: ParallelCosts) -> list[tuple[str, ...]]:
    """Return a row with the columns `DEVICES` for each pipeline stage."""
    return [
        (
            str(number),
            f"{first}-{stop - 1}" if stop > first else "",
            format_bytes(stage.weights),
            format_bytes(stage.cache_per_token) if stage.cache_per_token else "",
            format_bytes(stage.cache) if stage.cache else "",
            format_bytes(stage.state) if stage.state else "",
            format_count(stage.flops),
        )
        for number, stage in enumerate(costs.stages)
        for first, stop in [stage.layers]
    ]


def list_traffic_rows(costs: ParallelCosts) -> Iterator[tuple[str, ...]]:
    """Yield a row with the columns `TRAFFIC` for each kind, device group and message size of collectives."""
    group_key = attrgetter("kind", "group", "degree", "size")
    for (kind, group, degree, message), members in groupby(sorted(costs.collectives, key=group_key), group_key):
        collectives = [*members]
        names = sorted({c.path.rpartition(".")[2] for c in collectives})
        yield (
            kind,
            f"{degree} {group}",
            f"× {len(collectives)}",
            format_bytes(message),
            format_bytes(message * len(collectives)),
            format_bytes(round(sum(c.sent_bytes for c in collectives))),
            ", ".join(names),
        )


def summarize_split(costs: ParallelCosts) -> str:
    """Return a sentence about the split and its pipeline bubble."""
    split = costs.split
    degrees = ", ".join(f"{name}={n}" for name, n in vars(split).items() if n > 1) or "one device"
    text = f"parallel: {degrees}: {format_count(split.devices)} devices, {costs.tokens} tokens in {costs.dtype}"
    if split.pp == 1:
        return text
    waits = f"each stage waits {costs.bubble:.0%} of the time with {split.microbatches} "
    return f"{text}; {waits}{'microbatches' if split.microbatches > 1 else 'batch at a time'}"
