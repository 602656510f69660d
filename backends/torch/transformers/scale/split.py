"""The degrees of parallelism, and checks that a model can be divided by them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.types import sizes

from ..engines.plans import LAYER, Plans
from ..lower.lower_base_and_head import LoweredModel
from ..lower.stacked_experts import get_experts_path
from ..modeling.base import BaseModel

EXAMPLE = "tp=8,ep=8,pp=2"


@dataclass(frozen=True)
class Split:
    """Degrees of parallelism.

    tp: devices that share the linear maps of a layer. ep: devices that share the experts; if ep > tp, there are ep / tp
    groups of tp devices, each with its own sequences. pp: pipeline stages. microbatches: per forward pass.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    microbatches: int = 1

    @property
    def devices(self) -> int:
        return self.pp * max(self.tp, self.ep)

    @classmethod
    def parse(cls, text: str) -> Split:
        """Return the degrees in `text`, such as ``tp=8,ep=8,pp=2``; a missing degree is 1.

        Raises:
            WeftError: for an unknown name, a name given twice, or a value that is not an integer from 1 to 10⁶.
        """
        names, degrees = [f.name for f in fields(cls)], dict[str, int]()
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in names:
                raise WeftError(f"--parallel {name!r} is unknown: choose among {', '.join(names)}, such as {EXAMPLE}")
            if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 10**6:
                raise WeftError(f"--parallel {part.strip()!r}: {name} takes a whole number from 1, such as {EXAMPLE}")
            if name in degrees:
                raise WeftError(f"--parallel gives {name} twice; give it once, such as {EXAMPLE}")
            degrees[name] = int(number)
        return cls(**degrees)


def check_split(split: Split, base: BaseModel, plans: Plans) -> None:
    """Check that `split` can divide the model of `base` with its `plans`. Raise WeftError, which names the part, if one
    cannot be divided evenly, there is nothing to divide, tp does not divide ep, or there are too few layers."""
    lowered, name = base.lowered, base.lowered.graph.name
    if split.tp > 1:
        _check_parts(split.tp, "tp", [*_list_tensor_parts(lowered, plans, experts=split.ep == 1)], name)
        if not plans.units:
            reason = next(iter(plans.undivided.values()))
            raise WeftError(f"tp={split.tp} cannot divide any part of {name}: {reason}; leave tp out")
    if split.ep > 1:
        _check_parts(split.ep, "ep", [(n, "experts", where) for n, _, where in list_mixtures(lowered.graph)], name)
        if not lowered.emitter.experts:
            raise WeftError(f"ep={split.ep} divides experts, but {name} has none: leave ep out")
        if split.ep % split.tp:
            raise WeftError(
                f"ep={split.ep} is not a multiple of tp={split.tp}: choose ep={split.tp} or a multiple of it"
            )
    if split.pp > 1:
        if plans.one_stage:
            raise WeftError(f"pp={split.pp}: {name} has one pipeline stage, because {plans.one_stage}; leave pp out")
        assert base.stack is not None
        if split.pp > len(base.stack):
            raise WeftError(f"pp={split.pp} is more than the {len(base.stack)} layers of {name}: each stage needs one")


def _check_parts(degree: int, option: str, parts: list[tuple[int, str, str]], name: str) -> None:
    """Raise WeftError for the first of `parts` (count, kind, path) that `degree` devices cannot share evenly."""
    for count, kind, where in parts:
        if count % degree:
            divisor = math.gcd(*(n for n, _, _ in parts))
            raise WeftError(
                f"{option}={degree} cannot share the {count} {kind} of {LAYER.sub('.*', where)} in {name} evenly; "
                f"{option} must divide {divisor}"
            )


def _list_tensor_parts(lowered: LoweredModel, plans: Plans, experts: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (count, what is counted, path) of each part that tensor parallelism divides, such as (8, "query heads",
    "layers.0.attn"); the hidden units of experts only if `experts` is set."""
    weights = lowered.base.weights
    for node in lowered.graph.nodes:
        if node.op is ops.attention and node.scope in plans.units:
            yield int(node.attrs["kv_heads"]), "key/value heads", node.scope
            yield int(node.attrs["heads"]), "query heads", node.scope
    attended = {node.scope for node in lowered.graph.nodes if node.op is ops.attention}
    for name, unit in plans.units.items():
        if name not in attended and name not in lowered.emitter.experts:
            rows = next(path for path, style in unit.items() if style == "rowwise")
            yield weights[f"{rows}.weight"].type.concrete({})[-1], "hidden units", rows.rpartition(".")[0]
    if experts:
        yield from ((n, "hidden units", where) for _, n, where in list_mixtures(lowered.graph) if where in plans.units)


def list_mixtures(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """Yield (number of experts, hidden width, module path) of each mixture of experts of `graph`."""
    for node in graph.nodes:
        if node.op is ops.moe:
            experts, hidden, _ = (sizes.evaluate(n, {}) for n in node.required_operand("up").shape)
            yield experts, hidden, get_experts_path(node)
