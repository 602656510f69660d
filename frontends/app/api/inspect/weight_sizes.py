"""Sizes of the weights that a target would store, from recipes alone, without compiling.

The pipeline runs as in `compile`, except that the pass quantize rounds to the nearest code, whatever its method: sizes
do not depend on the choice of codes. No code is computed, since nothing reads the values. Blocks of a checkpoint that
compile keeps are kept here as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.backends.target import TARGETS
from weft.backends.weights import average_bits
from weft.ir.errors import WeftError
from weft.passes import run_passes
from weft.passes.forms import derive_graphs

from ....model import Model
from ..compile import MAX_LENGTH
from ..source.stored import round_to_nearest
from ..weights import expand_weights


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of the weights in a folder for `target`.

    kinds: counts and bytes, keyed by kind of weight. total: all bytes. layers: bits per value of matrices,
    keyed by layer. blocks: number of weights, keyed by block layout.
    """

    weights: str
    target: str
    dtype: str
    kinds: Mapping[str, Mapping[str, int]]
    layers: Mapping[str, float]
    blocks: Mapping[str, int]
    total: int

    @property
    def bits(self) -> float | None:
        """Return the average bits per value of linear layers and experts (scales included); None without any."""
        return average_bits(self.kinds)

    def json(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible data."""
        return {**asdict(self), "bits_per_weight": self.bits}


def compute_weight_sizes(model: Model, weights: str, target: str, dtype: str | None = None) -> WeightSizes:
    """Return the sizes of the weights of `model` after `weft compile --weights WEIGHTS` for `target` in `dtype`.

    Raises:
        WeftError: if `weights`, the target or the dtype is unknown, or the target cannot run the model.
    """
    backend = TARGETS.lookup(target)
    dtype = backend.dtype(dtype)
    length = int(model.graph.meta.get("context") or MAX_LENGTH)
    pipeline = backend.pipeline(model.graph, dtype, f"{expand_weights(model.graph, weights)}, default", length)
    graph = run_passes(model.graph, round_to_nearest(pipeline, exact=False))
    options = backend.choose({})
    built = backend.build(derive_graphs(graph, backend.forms(graph, options)), dtype, length, options, [])
    facts = built.facts.get("weights")
    if facts is None:
        raise WeftError(f"target {target} does not report how it stores weights; choose another --target")
    blocks = built.facts.get("blocks", {})
    return WeightSizes(weights, target, dtype, facts["kinds"], facts["layers"], blocks, built.weight_bytes)
