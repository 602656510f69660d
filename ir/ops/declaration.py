"""Decorators that declare an op by its body: the graph of simpler ops that is also its reference."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..graph import Graph, Op, Value
from ..interpreter import interpret
from ..op import Array, Case, Cost, OpCall, StateSpec, TensorType, Trait, op, sum_sizes
from ..types import dtypes


def composed_op(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes a function the body of a new op, and registers and returns the op.

    The function emits the op in simpler ops. Its positional parameters are the operands, its keyword-only parameters
    the attributes. The reference interprets the emitted graph, in the precision of the operands. ``.infer``, ``.cost``
    and ``.states`` declare the rest.
    """

    def declare(body: Callable[..., Any]) -> Op:
        graph_of, signature = _cache_graphs(body), inspect.signature(body)

        @functools.wraps(body)
        def reference(*operands: Array | None, **attrs: Any) -> Any:
            bound = signature.bind(*operands, **attrs)
            bound.apply_defaults()
            arrays = [None if a is None else np.asarray(a) for a in bound.args]
            kinds = {"b": dtypes.bool_, "f": dtypes.f32}
            types = tuple(
                None if a is None else TensorType(kinds.get(a.dtype.kind, dtypes.i64), a.shape) for a in arrays
            )
            graph = graph_of(types, tuple(bound.kwargs.items()))
            inputs = {str(i): a for i, a in enumerate(arrays) if a is not None}
            results = interpret(graph, inputs, convert=np.asarray)
            return tuple(results.values()) if len(results) > 1 else results["0"]

        new = op(outputs=outputs, traits=traits, cases=cases)(reference)
        new.body(lambda n: body(*_list_operands(new, n), **{name: vars(n)[name] for name in new.attrs}))
        return new

    return declare


def fused_op(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator like `composed_op` that also derives types, cost and states of the op from its body.

    The cost counts the bytes of operands and outputs once, but only the table rows and experts that the body selects;
    values inside the body cost no bytes. The trait FUSED is added. A RECURRENT op has the states of its body, under the
    same names.
    """

    def declare(body: Callable[..., Any]) -> Op:
        new = composed_op(outputs=outputs, traits=[*traits, Trait.FUSED], cases=cases)(body)
        graph_of = _cache_graphs(body)

        def body_of(n: OpCall) -> Graph:
            return graph_of(_list_operands(new, n), tuple((name, vars(n)[name]) for name in new.attrs))

        @new.infer
        def _(n: OpCall) -> tuple[TensorType, ...]:
            return tuple(v.type for v in body_of(n).outputs.values())

        @new.cost
        def _(n: OpCall) -> Cost:
            graph = body_of(n)
            read, written = (sum_sizes(v.type.bytes for v in part.values()) for part in (graph.inputs, graph.outputs))
            costs = {node: node.op.node_cost(node) for node in graph.nodes if Trait.VIEW not in node.op.traits}
            # Bytes of table rows and experts that no token selects are not read.
            operand_bytes = sum_sizes(v.type.bytes for node in costs for v in node.inputs if v is not None)
            unread = operand_bytes - sum_sizes(cost.read for cost in costs.values())
            return Cost(sum_sizes(cost.flops for cost in costs.values()), read - unread, written)

        def list_states(n: OpCall) -> tuple[StateSpec, ...]:
            nodes = body_of(n).nodes
            operand_types = [(node, [None if v is None else v.type for v in node.inputs]) for node in nodes]
            return tuple(spec for node, types in operand_types for spec in node.op.states_of(types, node.attrs))

        if Trait.RECURRENT in traits:
            new.states(list_states)

        return new

    return declare


def _list_operands(declared: Op, n: OpCall) -> tuple[Any, ...]:
    *first, last = (vars(n)[o.name] for o in declared.operands)
    return (*first, *last) if declared.operands[-1].variadic else (*first, last)


def _cache_graphs(body: Callable[..., Any]) -> Callable[[tuple[TensorType | None, ...], tuple[Any, ...]], Graph]:
    """Return the cached function (types of operands, attributes) → graph; layers repeat nodes of the same types."""
    return functools.lru_cache(maxsize=1024)(lambda types, attrs: _build_body(body, types, dict(attrs)))


def _build_body(body: Callable[..., Any], types: Sequence[TensorType | None], attrs: dict[str, Any]) -> Graph:
    """Return the graph that `body` emits for operands of `types` (None: absent), with inputs and outputs "0", "1", …"""
    graph = Graph("body")
    inputs = [None if t is None else graph.add_input(str(i), t) for i, t in enumerate(types)]
    results = body(*inputs, **attrs)
    for i, value in enumerate((results,) if isinstance(results, Value) else results):
        graph.add_output(str(i), value)
    return graph
