"""Another activation in every feed-forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, Value, interpret, ops
from weft.ir.ops.activation import activate, known_activation
from weft.ir.recipes.readers import Array

from ...analysis.feed_forward import Gate, activated, gated, projected
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import changed, drop, replace_uses


@dataclass(frozen=True)
class ReplaceActivation(Pass):
    """Use the activation `to` in every feed-forward: relu, relu2, gelu, gelu_tanh, gelu_quick, silu, sigmoid, tanh,
    elu, identity, or swish(β).

    Gated units keep their gates, clamps and shifts; experts are changed alike. ReLU makes hidden numbers zero, which
    runtimes can skip; a tanh-GELU or a quick one is cheaper than the exact. None equals another: models want a little
    training afterwards.

    Condition: an activation counts as one of a feed-forward if it follows a linear, and a linear, or a product with
    another projection of the same value, reads it. Those of poolers, convolutions and of gates in attention and state
    spaces stay.

    Source: ReLUfication (Mirzadeh 2023, 2310.04564); Shazeer 2020 (2002.05202) on gated units.

    Example replace-activation{to=relu}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %hidden: f32[batch, seq, 6] = gelu(%up, approximate="tanh")
          %down: f32[batch, seq, 4] = linear(%hidden, %down.weight)
          output y = %down
        }
    """

    name = "replace-activation"
    effect = "changing"
    purpose = "Exchange parts and grow"
    to: str

    def run(self, graph: Graph, trace: Trace) -> None:
        known_activation(self.to)
        for node, unit in list(_sites(graph)):
            at = node.output.name
            if isinstance(unit, Gate):
                if unit.activation == self.to:
                    continue
                with graph.inserting(before=node):
                    y = ops.glu(unit.gate, unit.up, **(unit.attrs | {"activation": self.to}))
                replace_uses(node.output, y)
                drop(graph, unit.nodes)
            elif isinstance(unit, tuple):
                name, x, nodes = unit
                if name == self.to:
                    continue
                with graph.inserting(before=node):
                    y = activate(x, self.to)
                replace_uses(node.output, y, rename=y is not x)
                drop(graph, nodes)
            elif node.attrs["activation"] == self.to:
                continue
            else:
                changed(node, activation=self.to)
            trace.fired(self.name, at)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no feed-forward has another activation than {self.to}")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Equals the graph before, run with the results of its feed-forwards' activations computed anew."""
        inputs = equivalence.inputs(before)
        staged = equivalence.stage(before)
        sites = dict(_sites(staged))
        seen: dict[Value, Array] = {}

        def read(value: Value | None) -> Array | None:
            if isinstance(value, Param):
                return np.asarray(value.recipe.evaluate(staged.reader), np.float64)
            return None if value is None else seen[value]

        def watch(node: Node, outputs: tuple[Array, ...]) -> None:
            seen.update(zip(node.outputs, outputs, strict=True))
            if node not in sites:
                return
            unit = sites[node]
            if isinstance(unit, Gate):
                outputs[0][...] = _opened(self.to, seen[unit.gate], seen[unit.up], unit.limit, unit.shift)
            elif isinstance(unit, tuple):
                outputs[0][...] = _formula(self.to, seen[unit[1]])
            else:
                outputs[0][...] = _mixed(self.to, node, {o.name: read(node.operand(o.name)) for o in node.op.operands})

        seen.update((staged.inputs[name], x) for name, x in inputs.items())
        equivalence.same(interpret(staged, inputs, watch=watch), equivalence.run(after, inputs), EXACT)


def _sites(graph: Graph) -> Iterator[tuple[Node, Gate | tuple[str, Value, tuple[Node, ...]] | None]]:
    """The last nodes of activations in feed-forwards, with what they are; None for experts."""
    for node in graph.nodes:
        if node.op is ops.moe:
            yield node, None
            continue
        unit = gated(node)
        if isinstance(unit, Gate):
            yield node, unit
            continue
        found = activated(node.output)
        read = [n.op is ops.linear and i == 0 for n, i in node.output.uses]
        if found is not None and read and all(read) and not node.output.is_output and projected(found[1]):
            yield node, found


def _formula(name: str, x: Array) -> Array:
    """The activation called `name`, by its definition."""
    if name.startswith("swish("):
        return np.asarray(x / (1 + np.exp(-float(name[6:-1]) * x)))
    return np.asarray(_FORMULAS[name](x))


# Independent of the ops' references, so that `check` does not compare an op with itself.
_FORMULAS: dict[str, Callable[[Any], Any]] = {  # of arrays, whose operators cost a type checker seconds
    "identity": lambda x: x,
    "relu": lambda x: np.where(x > 0, x, 0),
    "relu2": lambda x: np.where(x > 0, x * x, 0),
    "gelu": lambda x: x * np.array([math.erfc(-t / math.sqrt(2)) / 2 for t in x.flat]).reshape(x.shape),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": lambda x: 2 / (1 + np.exp(-2 * x)) - 1,
    "elu": lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1),
}


def _opened(name: str, gate: Array, up: Array, limit: float | None, shift: float) -> Array:
    """A gated unit: clamps, activation, shift."""
    bound = math.inf if limit is None else limit
    clamped = np.sign(up) * np.minimum(abs(up), bound)
    return np.asarray(_formula(name, np.where(gate > bound, bound, gate)) * (clamped + shift))


def _mixed(name: str, node: Node, given: dict[str, Array | None]) -> Array:
    """Experts, each token and expert by itself."""
    x, combine, up, down = (given[k] for k in ("x", "combine", "up", "down"))
    assert x is not None and combine is not None and up is not None and down is not None
    y = np.zeros_like(x)
    for at in zip(*np.nonzero(combine), strict=True):
        token, e = at[:-1], at[-1]

        def made(weight: Array, bias: Array | None, vector: Array, e: int = e) -> Array:
            return np.asarray(weight[e] @ vector + (0 if bias is None else bias[e]))

        hidden = made(up, given["up_bias"], x[token])
        if (gate := given["gate"]) is None:
            hidden = _formula(name, hidden)
        else:
            opened = made(gate, given["gate_bias"], x[token])
            hidden = _opened(name, opened, hidden, node.attrs["limit"], node.attrs["shift"])
        y[token] += combine[at] * made(down, given["down_bias"], hidden)
    return y
