"""Compare graphs up to names, fusions, and parameters without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.errors import WeftError
from weft.ir.op import Trait
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.spelling import spell

# What a parameter that is not there would hold, by op and operand.
_NEUTRAL = {
    **{(norm, "weight"): 1.0 for norm in (ops.rms_norm, ops.layer_norm)},
    **{(op, "bias"): 0.0 for op in (ops.linear, ops.layer_norm, ops.causal_conv)},
    **{(ops.moe, f"{which}_bias"): 0.0 for which in ("up", "gate", "down")},
}
_CLOSE = 1e-6  # relative, of computed numbers: they are float32 somewhere


@dataclass(frozen=True)
class Difference:
    """First difference of two graphs: `at` is the value's name in the second, `ours` and `theirs` the two sides."""

    at: str
    ours: str
    theirs: str


@dataclass
class Match:
    """Result of matching a graph with a second one.

    It maps each parameter of the second graph to a parameter (or to one number everywhere) of the first, counts the
    matched nodes, and lists the differences in the order of the second.
    """

    params: dict[str, Param | float] = field(default_factory=dict)
    nodes: int = 0
    differences: list[Difference] = field(default_factory=list)


def match(ours: Graph, theirs: Graph) -> Match:
    """Compare two `canonical` graphs from their outputs backwards."""
    return _Matcher(ours, theirs).run()


class _Matcher:
    def __init__(self, ours: Graph, theirs: Graph) -> None:
        self.ours, self.theirs = ours, theirs
        self.place = {node: i for graph in (ours, theirs) for i, node in enumerate(graph.nodes)}
        self.met: dict[Value, Value] = {}
        self.parted: list[tuple[int, Difference]] = []
        self.found = Match()

    def run(self) -> Match:
        for name in self.ours.outputs.keys() ^ self.theirs.outputs.keys():
            has = name in self.ours.outputs
            self.part(None, name, f"an output {name}" if has else "none", "none" if has else f"an output {name}")
        stack = [(self.ours.outputs[n], v) for n, v in self.theirs.outputs.items() if n in self.ours.outputs]
        while stack:
            stack += self.values(*stack.pop())
        self.found.differences = [d for _, d in sorted(self.parted, key=lambda pair: pair[0])]
        return self.found

    def part(self, node: Node | None, at: str, ours: str, theirs: str) -> None:
        self.parted.append((-1 if node is None else self.place[node], Difference(at, ours, theirs)))

    def values(self, ours: Value, theirs: Value, reader: Node | None = None) -> Iterator[tuple[Value, Value]]:
        """Compare two values; yields those that must be the same besides."""
        if theirs in self.met:
            if self.met[theirs] is not ours:
                self.part(reader, theirs.name, f"%{ours.name}", f"%{theirs.name} once more")
            return
        self.met[theirs] = ours
        if isinstance(theirs, Param):
            if (difference := self.param(ours, theirs)) is not None:
                self.part(reader, theirs.name, *difference)
        elif theirs.producer is None or ours.producer is None:
            kinds = [_input(self.ours, ours), _input(self.theirs, theirs)]
            if kinds[0] != kinds[1]:
                self.part(reader, theirs.name, *kinds)
        elif (ours.producer.op, ours.index) != (theirs.producer.op, theirs.index):
            self.part(theirs.producer, theirs.name, ours.producer.op.name, theirs.producer.op.name)
        else:
            self.found.nodes += 1
            yield from self.nodes(ours.producer, theirs.producer)

    def nodes(self, ours: Node, theirs: Node) -> Iterator[tuple[Value, Value]]:
        at = theirs.output.name
        for name in theirs.attrs:
            mine, other = _attribute(ours, name), _attribute(theirs, name)
            if not _same(mine, other):
                self.part(theirs, at, f"{name}={spell(mine)}", f"{name}={spell(other)}")
        pair, operands = (self.operands(ours), self.operands(theirs)), [o.name for o in theirs.op.operands]
        if len(pair[0]) != len(pair[1]):  # of an op that takes any number
            self.part(theirs, at, *(f"{len(found)} operands" for found in pair))
            return
        for i, (mine, other) in enumerate(zip(*pair, strict=True)):
            name = operands[min(i, len(operands) - 1)]
            neutral = _NEUTRAL.get((theirs.op, name))
            if mine is not None and other is not None:
                yield from self.through(mine, other, theirs)
            elif isinstance(other, Param) and neutral is not None:
                if self.found.params.setdefault(other.name, neutral) != neutral:
                    self.part(theirs, other.name, f"no {name}", "one that is shared")
            elif mine is not other:
                self.part(theirs, at, *(f"{'no' if v is None else 'a'} {name}" for v in (mine, other)))

    def through(self, ours: Value, theirs: Value, reader: Node) -> Iterator[tuple[Value, Value]]:
        """Parameters are compared at once, so that a difference is told of the node that reads them."""
        if isinstance(theirs, Param) or theirs in self.met:
            yield from self.values(ours, theirs, reader)
        else:
            yield ours, theirs

    def operands(self, node: Node) -> list[Value | None]:
        """The operands, absent ones at the end included; what commutes in the order it is made in."""
        found = [*node.inputs, *[None] * (len(node.op.operands) - len(node.inputs))]
        if Trait.COMMUTATIVE in node.op.traits:
            found.sort(key=lambda v: -1 if v is None or v.producer is None else self.place[v.producer])
        return found

    def param(self, ours: Value, theirs: Param) -> tuple[str, str] | None:
        """Return the difference between a value and the parameter that it should be; None if they match."""
        if not isinstance(ours, Param):
            return f"%{ours.name}, which is computed", f"the parameter {theirs.name}"
        if ours.shape != theirs.shape:
            return str(list(ours.shape)), str(list(theirs.shape))
        if any(True for _ in theirs.recipe.sources()):
            known = self.found.params.setdefault(theirs.name, ours)
            return None if known is ours else (f"%{ours.name}", "what nothing stands for elsewhere")
        mine, other = (_numbers(p) for p in (ours, theirs))
        # atol=0: low rotary frequencies are small, and have to agree as closely as others.
        if mine.shape == other.shape and np.allclose(mine, other, rtol=_CLOSE, atol=0):
            return None
        return "other numbers", f"those of its {theirs.name}"


def _input(graph: Graph, value: Value) -> str:
    """Describe a value: an input, a parameter, or the op that makes it."""
    if value.producer is not None:
        return value.producer.op.name
    name = next((name for name, v in graph.inputs.items() if v is value), None)
    return f"the input {name}" if name else f"the parameter {value.name}"


def _numbers(param: Param) -> np.ndarray[Any, Any]:
    """The values of a computed parameter, those of rotary frequencies in full precision; `length` decides nothing."""
    recipe = param.recipe
    if isinstance(recipe, RopeFrequencies):
        both = [recipe.frequencies()]
        if "length" in recipe.used:  # how they grow beyond the original context
            both.append(np.array([recipe.original, recipe.factor, recipe.theta, *recipe.factors, *recipe.long_factors]))
        return np.concatenate(both)
    return np.asarray(recipe.evaluate(param.graph.reader))


def _attribute(node: Node, name: str) -> Any:
    value = node.attrs.get(name)
    if name == "scale" and value is None and node.op is ops.attention:
        query = node.operand("q")
        return None if query is None else (query.width / node.attrs["heads"]) ** -0.5
    return value


def _same(a: Any, b: Any) -> bool:
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
    return math.isclose(a, b, rel_tol=_CLOSE) if numbers else bool(a == b)


def require(graph: Graph) -> None:
    """Refuse graphs that are no whole model over one text.

    Raises:
        WeftError: if it has caches, or the logits of one token only.
    """
    if any(name.startswith(("past", "present", "state")) for name in (*graph.inputs, *graph.outputs)):
        raise WeftError("the graph has caches, which no checkpoint has: export it before kv-cache")
    logits = graph.outputs.get("logits")
    if logits is not None and logits.shape[1:2] == (1,) and "task" not in graph.meta:
        raise WeftError("the graph makes the logits of the last token only: export it before last-token-logits")
