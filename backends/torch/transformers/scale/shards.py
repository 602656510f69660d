"""Degrees of parallelism, checks that they can divide a model, and the parts of a model on one device: its shard of
each weight, by the plans of a config, and its pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
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


COLUMNS, ROWS, TABLE, EXPERTS = ("colwise", "packed_colwise"), "rowwise", "embedding_rowwise", "grouped_gemm"
PREFIX = "model."  # of keys of the base model in a model with a head


def count_shard_elements(key: str, shape: Sequence[int], split: Split, plans: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the number of elements of the weight `key` of `shape` on the device with its largest shard. `plans` maps
    config fields such as base_model_tp_plan to plans."""
    degree, axis = find_divided_axis(key, len(shape), split, plans)
    return math.prod(-(-n // degree) if i == axis else n for i, n in enumerate(shape))


def find_divided_axis(
    key: str, rank: int, split: Split, plans: Mapping[str, Mapping[str, Any]]
) -> tuple[int, int | None]:
    """Return (number of devices, axis along which they divide the weight `key`, or None if each stores all of it)."""
    path = LAYER.sub(".*", key)
    module, _, name = path.rpartition(".")
    whole_experts = plans.get("base_model_ep_plan", {}) if split.ep > 1 else {}
    if whole_experts.get(path) == EXPERTS:
        return split.ep, 0
    if split.tp == 1:
        return 1, None
    tensor = plans.get("base_model_tp_plan", {})
    style = tensor.get(path) or tensor.get(module)
    if style in COLUMNS:
        return split.tp, max(rank - 2, 0)
    if style == ROWS:
        return split.tp, None if name == "bias" else rank - 1
    return split.tp, 0 if style == TABLE else None


def add_vocabulary_plan(plans: Mapping[str, Mapping[str, Any]], lowered: LoweredModel) -> dict[str, dict[str, Any]]:
    """Return a copy of `plans`. A tensor-parallel plan in it also gets the entry that transformers adds for a token
    embedding called embed_tokens, unless it has its own."""
    extended = {name: dict(plan) for name, plan in plans.items()}
    tensor = extended.get("base_model_tp_plan", {})
    if tensor and lowered.emitter.embedding == "embed_tokens":
        extended["base_model_tp_plan"] = {"embed_tokens": TABLE, **tensor}
    return extended


@dataclass(frozen=True)
class Stages:
    """A model cut into `count` pipeline stages of consecutive layers: ⌊layers / count⌋ each, and one more in each of
    the first layers mod `count` stages, as in transformers from 5.24 on."""

    lowered: LoweredModel
    base: BaseModel
    count: int

    def get_layers(self, stage: int) -> range:
        """Return the indices of the layers of `stage`; both are counted from 0."""
        number = len(self.base.stack or ())
        each, rest = divmod(number, self.count)
        start = stage * each + min(stage, rest)
        return range(start, start + each + (stage < rest))

    def find_stage(self, path: str) -> int:
        """Return the stage (from 0) of the module at `path` in the base model: the stage of its layer; outside of
        layers, the first stage for the token embedding, else the last."""
        layer = self._find_layer(path)
        if layer is not None:
            return next(s for s in range(self.count) if layer in self.get_layers(s))
        embedding = self.lowered.emitter.embedding
        return 0 if embedding and (path == embedding or path.startswith(f"{embedding}.")) else self.count - 1

    def list_stages(self, key: str) -> list[int]:
        """Return the stages that store the weight `key`, ascending: the stage of its module, the last for a weight of
        the head. If it is tied to the head, the last stage also stores it."""
        path = key.removeprefix(PREFIX) if self.lowered.head is not None else key
        if path == key and self.lowered.head is not None:
            return [self.count - 1]
        last = {self.count - 1} if path in self.lowered.tied_keys.values() else set()
        return sorted({self.find_stage(path)} | last)

    def map_nodes(self) -> dict[Node, int]:
        """Map each node of the graph to a stage: a node of a layer to the layer's, a node of the head to the last, any
        other node to the stage of the last layer before it, or the first stage if there is none."""
        stages, current, head = {}, 0, self.lowered.head
        for node in self.lowered.graph.nodes:
            layer = self._find_layer(node.scope)
            current = current if layer is None else self.find_stage(node.scope)
            in_head = layer is None and head is not None and node in head.nodes
            stages[node] = self.count - 1 if in_head else current
        return stages

    def _find_layer(self, path: str) -> int | None:
        stack = self.base.stack
        if stack is None or not path.startswith(f"{stack.path}."):
            return None
        return int(path.removeprefix(f"{stack.path}.").partition(".")[0])
