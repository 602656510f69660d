"""Comparison of graphs up to names, fusions, and parameters without effect."""

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

# The value of a missing parameter, by op and operand.
_NEUTRAL = {
    **{(norm, "weight"): 1.0 for norm in (ops.rms_norm, ops.layer_norm)},
    **{(op, "bias"): 0.0 for op in (ops.linear, ops.layer_norm, ops.causal_conv)},
    **{(ops.moe, f"{which}_bias"): 0.0 for which in ("up", "gate", "down")},
}
_CLOSE = 1e-6  # relative tolerance of computed values: they are float32 somewhere


@dataclass(frozen=True)
class Difference:
    """A difference of two graphs: `at` names a value of the second graph, `ours` and `theirs` describe both values."""

    at: str
    ours: str
    theirs: str


@dataclass
class GraphMatch:
    """The correspondence of a first graph (`ours`) to a second (`theirs`).

    params: name of a parameter of the second graph → parameter of the first, or constant if the first has none.
    nodes: number of nodes with equal ops. differences: in the order of the second graph.
    """

    params: dict[str, Param | float] = field(default_factory=dict)
    nodes: int = 0
    differences: list[Difference] = field(default_factory=list)


def match_graphs(ours: Graph, theirs: Graph) -> GraphMatch:
    """Return the match of two canonical graphs (`weft.passes.forms.canonicalize`), compared from their outputs
    backwards."""
    return _GraphMatcher(ours, theirs).run()


class _GraphMatcher:
    def __init__(self, ours: Graph, theirs: Graph) -> None:
        self.ours, self.theirs = ours, theirs
        self.position = {node: i for graph in (ours, theirs) for i, node in enumerate(graph.nodes)}
        self.pairs: dict[Value, Value] = {}
        self.differences: list[tuple[int, Difference]] = []
        self.result = GraphMatch()

    def run(self) -> GraphMatch:
        for name in self.ours.outputs.keys() ^ self.theirs.outputs.keys():
            has = name in self.ours.outputs
            self.report(None, name, f"an output {name}" if has else "none", "none" if has else f"an output {name}")
        stack = [(self.ours.outputs[n], v) for n, v in self.theirs.outputs.items() if n in self.ours.outputs]
        while stack:
            stack += self.compare_values(*stack.pop())
        self.result.differences = [d for _, d in sorted(self.differences, key=lambda pair: pair[0])]
        return self.result

    def report(self, node: Node | None, at: str, ours: str, theirs: str) -> None:
        self.differences.append((-1 if node is None else self.position[node], Difference(at, ours, theirs)))

    def compare_values(self, ours: Value, theirs: Value, reader: Node | None = None) -> Iterator[tuple[Value, Value]]:
        """Compare two values and record a difference; yield the pairs of operands to compare next."""
        if theirs in self.pairs:
            if self.pairs[theirs] is not ours:
                self.report(reader, theirs.name, f"%{ours.name}", f"%{theirs.name} once more")
            return
        self.pairs[theirs] = ours
        if isinstance(theirs, Param):
            if (difference := self.compare_params(ours, theirs)) is not None:
                self.report(reader, theirs.name, *difference)
        elif theirs.producer is None or ours.producer is None:
            kinds = [_describe_input(self.ours, ours), _describe_input(self.theirs, theirs)]
            if kinds[0] != kinds[1]:
                self.report(reader, theirs.name, *kinds)
        elif (ours.producer.op, ours.index) != (theirs.producer.op, theirs.index):
            self.report(theirs.producer, theirs.name, ours.producer.op.name, theirs.producer.op.name)
        else:
            self.result.nodes += 1
            yield from self.compare_nodes(ours.producer, theirs.producer)

    def compare_nodes(self, ours: Node, theirs: Node) -> Iterator[tuple[Value, Value]]:
        at = theirs.output.name
        for name in theirs.attrs:
            actual, expected = _read_attribute(ours, name), _read_attribute(theirs, name)
            if not _is_close(actual, expected):
                self.report(theirs, at, f"{name}={spell(actual)}", f"{name}={spell(expected)}")
        pair, operands = (self.operands(ours), self.operands(theirs)), [o.name for o in theirs.op.operands]
        if len(pair[0]) != len(pair[1]):  # of an op with any number of operands
            self.report(theirs, at, *(f"{len(operand_list)} operands" for operand_list in pair))
            return
        for i, (actual, expected) in enumerate(zip(*pair, strict=True)):
            name = operands[min(i, len(operands) - 1)]
            neutral = _NEUTRAL.get((theirs.op, name))
            if actual is not None and expected is not None:
                if isinstance(expected, Param) or expected in self.pairs:  # at once: a difference names the reader
                    yield from self.compare_values(actual, expected, theirs)
                else:
                    yield actual, expected
            elif isinstance(expected, Param) and neutral is not None:
                if self.result.params.setdefault(expected.name, neutral) != neutral:
                    self.report(theirs, expected.name, f"no {name}", f"a shared {name}")
            elif actual is not expected:
                self.report(theirs, at, *(f"{'no' if v is None else 'a'} {name}" for v in (actual, expected)))

    def operands(self, node: Node) -> list[Value | None]:
        """Return the operands, with None for omitted ones; those of commutative ops are sorted by node order."""
        operands = [*node.inputs, *[None] * (len(node.op.operands) - len(node.inputs))]
        if Trait.COMMUTATIVE in node.op.traits:
            operands.sort(key=lambda v: -1 if v is None or v.producer is None else self.position[v.producer])
        return operands

    def compare_params(self, ours: Value, theirs: Param) -> tuple[str, str] | None:
        """Return descriptions of `ours` and the parameter `theirs` if they do not match, else None. Parameters of a
        checkpoint match by shape, each with a single partner, which `result` records; constants match by value."""
        if not isinstance(ours, Param):
            return f"%{ours.name}, which is computed", f"the parameter {theirs.name}"
        if ours.shape != theirs.shape:
            return str(list(ours.shape)), str(list(theirs.shape))
        if any(True for _ in theirs.recipe.sources()):
            partner = self.result.params.setdefault(theirs.name, ours)
            return None if partner is ours else (f"%{ours.name}", "another parameter elsewhere")
        actual, expected = (_param_values(p) for p in (ours, theirs))
        # atol=0: low rotary frequencies are small, and have to agree as closely as the rest.
        if actual.shape == expected.shape and np.allclose(actual, expected, rtol=_CLOSE, atol=0):
            return None
        return "other values", f"those of its {theirs.name}"


def _describe_input(graph: Graph, value: Value) -> str:
    if value.producer is not None:
        return value.producer.op.name
    name = next((name for name, v in graph.inputs.items() if v is value), None)
    return f"the input {name}" if name else f"the parameter {value.name}"


def _param_values(param: Param) -> np.ndarray[Any, Any]:
    """Return the values of a computed parameter; rotary frequencies in full precision and independent of `length`."""
    recipe = param.recipe
    if isinstance(recipe, RopeFrequencies):
        arrays = [recipe.frequencies()]
        if "length" in recipe.used_settings:  # parameters of the growth beyond the original context
            settings = [recipe.original, recipe.factor, recipe.theta, *recipe.factors, *recipe.long_factors]
            arrays.append(np.array(settings))
        return np.concatenate(arrays)
    return np.asarray(recipe.evaluate(param.graph.reader))


def _read_attribute(node: Node, name: str) -> Any:
    value = node.attrs.get(name)
    if name == "scale" and value is None and node.op is ops.attention:
        query = node.operand("q")
        return None if query is None else (query.width / node.attrs["heads"]) ** -0.5
    return value


def _is_close(a: Any, b: Any) -> bool:
    are_numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
    return math.isclose(a, b, rel_tol=_CLOSE) if are_numbers else bool(a == b)


def check_exportable(graph: Graph) -> None:
    """Check that a graph is a complete model over one sequence.

    Raises:
        WeftError: if it has caches, or only the logits of one token.
    """
    if any(name.startswith(("past", "present", "state")) for name in (*graph.inputs, *graph.outputs)):
        raise WeftError("a graph with caches cannot be exported: export before the pass kv-cache")
    logits = graph.outputs.get("logits")
    if logits is not None and logits.shape[1:2] == (1,) and "task" not in graph.meta:
        raise WeftError("the graph has logits of the last token only: export before the pass last-token-logits")
