"""Sizes of weights before they are compiled: what a target will store, from recipes alone.

The pipeline runs as it does for compiling, but codes are rounded to the nearest whatever method is asked for, and only
when somebody reads them, which nobody does here: the size of weights does not depend on how their codes are chosen.
Blocks of a file that stay as they are do so here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.backends.targets import TARGETS
from weft.backends.weights import bits_per_weight
from weft.ir.errors import WeftError
from weft.passes import Pipeline, run_passes
from weft.passes.core.base import Pass
from weft.passes.forms import make_forms
from weft.passes.library.quantize.quantize import QuantizeWeights
from weft.passes.library.quantize.scale_channels import ScaleChannels

from ....model import Model
from ..compile import MAX_LENGTH
from ..weights import weights_pipeline


@dataclass(frozen=True)
class WeightSizes:
    """Bytes that weights take in a folder for `target`: by kind, of which `numbers` are those of the model, and `total`
    of them all. `layers` has the bits of a number of a layer's matrices, `blocks` counts weights by block layout."""

    weights: str
    target: str
    dtype: str
    kinds: Mapping[str, Mapping[str, int]]
    layers: Mapping[str, float]
    blocks: Mapping[str, int]
    total: int

    @property
    def bits(self) -> float | None:
        """Bits of a number of the linear maps and experts on average, scales and zero points included."""
        return bits_per_weight(self.kinds)

    def json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "bits_per_weight": self.bits}


def weight_sizes(model: Model, weights: str, target: str, dtype: str | None = None) -> WeightSizes:
    """Return what the weights of `model` take after `weft compile --weights WEIGHTS` for `target` in `dtype`.

    Raises:
        WeftError: if `weights`, the target or the dtype is unknown, or the target cannot run the model.
    """
    backend = TARGETS.lookup(target)
    dtype = backend.dtype(dtype)
    length = int(model.graph.meta.get("context") or MAX_LENGTH)
    pipeline = backend.pipeline(model.graph, dtype, f"{weights_pipeline(model.graph, weights)}, default", length)
    graph = run_passes(model.graph, nearest(_unscaled(pipeline)))
    options = backend.choose({})
    built = backend.build(make_forms(graph, backend.forms(graph, options)), dtype, length, options, [])
    facts = built.facts.get("weights")
    if facts is None:
        raise WeftError(f"target {target} does not say how it stores weights; choose another --target")
    blocks = built.facts.get("blocks", {})
    return WeightSizes(weights, target, dtype, facts["kinds"], facts["layers"], blocks, built.weight_bytes)


class _Untaught(QuantizeWeights):
    """Keep what a file has in blocks, and round other weights to the nearest, in their layouts, instead of fitting them
    and searching for scales."""

    fits = searches = False


def _unscaled(pipeline: Pipeline) -> Pipeline:
    """`pipeline` without passes that read a text and change no size."""
    phases = (
        replace(phase, passes=tuple(step for step in phase.passes if not isinstance(step, ScaleChannels)))
        for phase in pipeline.phases
    )
    return replace(pipeline, phases=tuple(phases))


def nearest(pipeline: Pipeline, searches: bool = False) -> Pipeline:
    """Return `pipeline` with codes that are rounded to the nearest, by passes that read no text but for budgets and
    scales of channels; `searches` leaves those alone that search for scales by the weights."""

    def untaught(step: Pass) -> Pass:
        if not isinstance(step, QuantizeWeights) or (searches and step.searches):
            return step
        if step.method in ("auto", "hqq") and step.calibration is None and step.budget is None:
            return _Untaught(**asdict(step))
        return replace(step, method="rtn", calibration=None if step.budget is None else step.calibration)

    phases = (replace(phase, passes=tuple(map(untaught, phase.passes))) for phase in pipeline.phases)
    return replace(pipeline, phases=tuple(phases))
