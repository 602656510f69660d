"""The verifier: the invariants of graphs. Each rule, ``check_…(graph)``, yields a message for every violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import WeftError
from ..schema.op_schema import OPS
from .graph import Graph, Value

Rule = Callable[[Graph], Iterator[str]]


def verify(graph: Graph, recipes: bool = False) -> None:
    """Check that `graph` meets all `RULES`; with `recipes`, also that every recipe has the shape of its parameter.

    Raises:
        WeftError: describing the first violation.
    """
    for rule in [*RULES, *([check_recipe_shapes] if recipes else [])]:
        for complaint in rule(graph):
            raise WeftError(f"graph {graph.name}: {complaint}")


def check_definition_order(graph: Graph) -> Iterator[str]:
    defined: set[Value] = {*graph.inputs.values(), *graph.params.values()}
    for node in graph.nodes:
        for v in node.inputs:
            if v is not None and v not in defined:
                yield f"{node!r} reads {v!r}, which is defined later or not at all"
        defined.update(node.outputs)
    for name, v in graph.outputs.items():
        if v not in defined:
            yield f"output {name} is {v!r}, which no node, input or parameter defines"


def check_use_lists(graph: Graph) -> Iterator[str]:
    counted: dict[Value, set[tuple[object, int]]] = {}
    for node in graph.nodes:
        for i, v in enumerate(node.inputs):
            if v is not None:
                counted.setdefault(v, set()).add((node, i))
        for i, v in enumerate(node.outputs):
            if v.producer is not node or v.index != i:
                yield f"{v!r} is an output of {node!r}, but records another producer"
    for v in [*graph.inputs.values(), *graph.params.values(), *(o for n in graph.nodes for o in n.outputs)]:
        if set(v.uses) != counted.get(v, set()):
            yield f"{v!r} records other uses than the nodes that read it"


def check_unique_names(graph: Graph) -> Iterator[str]:
    seen: set[str] = set()
    for v in [*graph.inputs.values(), *graph.params.values(), *(o for n in graph.nodes for o in n.outputs)]:
        if v.name in seen:
            yield f"two values are called %{v.name}"
        seen.add(v.name)
    for name, p in graph.params.items():
        if p.name != name:
            yield f"parameter {name} has the name {p.name}"


def check_registered_ops(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if OPS.get(node.op.name) is not node.op:
            yield f"{node!r} applies an op that is not registered"


def check_types(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        try:
            node.op.check_operands(node.inputs)
            attrs = node.op.check_attrs(node.attrs)
            types = node.op.types([None if v is None else v.type for v in node.inputs], attrs)
        except WeftError as e:
            yield f"{node!r}: {e}"
            continue
        declared = tuple(v.type for v in node.outputs)
        if declared != types:
            yield f"{node!r} makes {', '.join(map(str, types))} but declares {', '.join(map(str, declared))}"


def check_recipe_shapes(graph: Graph) -> Iterator[str]:
    for p in graph.params.values():
        shape = p.recipe.shape(graph.reader)
        if shape != p.type.shape:
            yield f"parameter {p!r} is computed in another shape: its recipe gives {list(shape)}"


RULES: tuple[Rule, ...] = (
    check_definition_order,
    check_use_lists,
    check_unique_names,
    check_registered_ops,
    check_types,
)
