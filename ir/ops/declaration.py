"""The declaration of ops by their bodies, which then are their references, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..graph import Graph, Op, Value
from ..interpreter import interpret
from ..op import Array, Case, Cost, OpCall, StateSpec, TensorType, Trait, op, total
from ..types import dtypes


def composed(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op by its body, which the decorated function emits; its parameters are read as those of a reference.

    The reference of the op runs the body. Types, cost and states are declared as those of other ops.
    """

    def declare(body: Callable[..., Any]) -> Op:
        @functools.wraps(body)
        def reference(*operands: Array | None, **attrs: Any) -> Any:
            arrays = [None if a is None else np.asarray(a) for a in operands]
            graph = _bodied(body, [None if a is None else _type_of(a) for a in arrays], attrs)
            found = interpret(graph, {str(i): a for i, a in enumerate(arrays) if a is not None})
            return tuple(found.values()) if len(found) > 1 else found["0"]

        new = op(outputs=outputs, traits=traits, cases=cases)(reference)
        new.body(lambda n: body(*_operands(new, n), **{name: vars(n)[name] for name in new.attrs}))
        return new

    return declare


def fused(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Declare a fused op; the decorated function emits its body. Its parameters are read as those of a reference.

    An op reads its operands and writes its results once, whatever its body moves in between, but for rows and experts
    that its body does not read. It keeps the states that its body does, under the same names: a recurrence takes its
    `past` and returns its `present`.
    """

    def declare(body: Callable[..., Any]) -> Op:
        new = composed(outputs=outputs, traits=[*traits, Trait.FUSED], cases=cases)(body)
        graph_of = functools.lru_cache(maxsize=1024)(
            lambda types, attrs: _bodied(body, types, dict(attrs))  # layers have nodes of the same types
        )

        def typed(n: OpCall) -> Graph:
            found: Graph = graph_of(_operands(new, n), tuple((name, vars(n)[name]) for name in new.attrs))
            return found

        @new.infer
        def _(n: OpCall) -> tuple[TensorType, ...]:
            return tuple(v.type for _, v in typed(n).outputs.items())

        @new.cost
        def _(n: OpCall) -> Cost:
            graph = typed(n)
            read, written = (total([v.type.bytes for _, v in part.items()]) for part in (graph.inputs, graph.outputs))
            costs = {node: node.op.node_cost(node) for node in graph.nodes if Trait.VIEW not in node.op.traits}
            unread = [  # rows of a table, and experts, that nobody asks for
                total([v.type.bytes for v in node.inputs if v is not None]) - cost.read for node, cost in costs.items()
            ]
            return Cost(total([cost.flops for cost in costs.values()]), read - total(unread), written)

        def kept(n: OpCall) -> tuple[StateSpec, ...]:
            nodes = typed(n).nodes
            given = [(node, [None if v is None else v.type for v in node.inputs]) for node in nodes]
            return tuple(spec for node, types in given for spec in node.op.states_of(types, node.attrs))

        if Trait.RECURRENT in traits:
            new.states(kept)

        return new

    return declare


def _operands(declared: Op, n: OpCall) -> tuple[Any, ...]:
    *first, last = (vars(n)[o.name] for o in declared.operands)
    return (*first, *last) if declared.operands[-1].variadic else (*first, last)


def _type_of(array: Array) -> TensorType:
    kind = dtypes.bool_ if array.dtype == bool else dtypes.f32 if array.dtype.kind == "f" else dtypes.i64
    return TensorType(kind, array.shape)


def _bodied(body: Callable[..., Any], types: Sequence[TensorType | None], attrs: dict[str, Any]) -> Graph:
    """Return the graph of a body whose inputs, of these types, and whose outputs are called by their numbers."""
    graph = Graph("body")
    given = [None if t is None else graph.add_input(str(i), t) for i, t in enumerate(types)]
    made = body(*given, **attrs)
    for i, value in enumerate((made,) if isinstance(made, Value) else made):
        graph.add_output(str(i), value)
    return graph
