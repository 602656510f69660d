"""Small edits that passes share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from weft.ir import Graph, Node, Param, Recipe, TensorType, Value, ops
from weft.ir.types import sizes

# Weak keys: an entry goes with its parameter once that is erased.
_derived: WeakKeyDictionary[Param, dict[tuple[Recipe, TensorType], Param]] = WeakKeyDictionary()


def replace_uses(old: Value, new: Value, *, rename: bool = True) -> None:
    """Replace `old` by `new` in readers and graph outputs; with `rename` they swap names if a node computes `new`."""
    old.replace_uses(new)
    if rename and new.producer is not None:
        old.name, new.name = new.name, old.name


def erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase, repeatedly, the nodes of `nodes` whose outputs are all unused, and parameters that only they read."""
    waiting = [node for node in dict.fromkeys(nodes) if not node.erased]
    # `nodes` may list a node before its readers: repeat until a round erases nothing.
    while unused := [node for node in waiting if not any(v.uses or v.is_output for v in node.outputs)]:
        for node in unused:
            operands = node.inputs
            graph.erase(node)
            erase_unused_params(graph, operands)
        waiting = [node for node in waiting if not node.erased]


def erase_unused_params(graph: Graph, values: Iterable[Value | None]) -> None:
    """Erase the parameters among `values` that have no readers and are not graph outputs."""
    for v in dict.fromkeys(values):
        if isinstance(v, Param) and graph.params.get(v.name) is v and not v.uses and not v.is_output:
            graph.erase_param(v)


def derive_param(old: Param, recipe: Recipe, shape: tuple[int, ...] | None = None, name: str = "") -> Param:
    """Return a parameter with `recipe`, the dtype of `old`, and `shape` (None: the shape of `old`).

    A later call with the same `old`, `recipe` and shape returns the same parameter, so that shared layers stay shared.
    A new one is called `name` ("": as `old`), made unique; `replace_param` can give it the name of `old` later.
    """
    graph, type = old.graph, old.type if shape is None else TensorType(old.type.dtype, shape)
    cached = _derived.setdefault(old, {})
    param = cached.get((recipe, type))
    # The cached parameter may have been erased since.
    if param is None or graph.params.get(param.name) is not param:
        param = cached[recipe, type] = graph.add_param(name or old.name, type, recipe)
    return param


def derive_bias(weight: Param, recipe: Recipe, rows: int | None = None) -> Param:
    """Return a bias with `recipe`, named after `weight` [.., out, in]. Its shape is [rows], or [.., out] if None."""
    stem = weight.name.removesuffix("weight")
    shape = tuple(weight.shape[:-1]) if rows is None else (rows,)
    return derive_param(weight, recipe, shape, f"{stem}bias" if stem != weight.name else f"{stem}.bias")


def add_common_prefix(params: Sequence[Param], name: str) -> str:
    """Return `name` prefixed by the longest dotted prefix that the names of all `params` share."""
    columns = zip(*(param.name.split(".") for param in params), strict=False)
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)]
    return ".".join([*shared, name])


def add_scope(graph: Graph, name: str) -> str:
    """Return `name` prefixed by the insertion scope of `graph` and a dot; `name` alone if the scope is empty."""
    return f"{graph.insertion_scope}.{name}" if graph.insertion_scope else name


def replace_param(old: Value | None, new: Value | None) -> None:
    """Erase the parameter `old`; if `new` is a parameter, rename it to the name of `old`.

    Do nothing if `old` still has readers, is a graph output, is `new`, or is not a parameter of the graph.
    """
    if not isinstance(old, Param) or old is new or old.uses or old.is_output:
        return
    graph = old.graph
    if graph.params.get(old.name) is not old:
        return
    if isinstance(new, Param):
        # `graph.params` is keyed by name, so both entries move with the names.
        old.name, new.name = new.name, old.name
        graph.params[old.name], graph.params[new.name] = old, new
    graph.erase_param(old)


def set_recipe(node: Node, index: int, recipe: Recipe, shape: tuple[int, ...] | None = None) -> None:
    """Replace operand `index` of `node`, a parameter, by one with `recipe`, and with `shape` unless None; other readers
    keep the old parameter."""
    old = node.inputs[index]
    assert isinstance(old, Param)
    new = derive_param(old, recipe, shape)
    node.set_input(index, new)
    replace_param(old, new)


def swap_names(param: Param, old: Value) -> None:
    """Swap the names of `param` and of `old`, a value that is not a parameter."""
    graph = param.graph
    del graph.params[param.name]
    param.name, old.name = old.name, param.name
    graph.params[param.name] = param


def rename_all(
    graph: Graph,
    names: Mapping[str, str],
    scopes: Mapping[str, str],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
) -> None:
    """Rename all values, scopes, inputs and outputs of `graph` in place, by maps from old to new names.

    All names of values, inputs and outputs must be keys, and new names unique; a scope not in `scopes` becomes "".
    """
    values = [*graph.inputs.values(), *graph.params.values(), *(v for node in graph.nodes for v in node.outputs)]
    for value in values:
        graph.release_name(value)
    for value in values:
        value.name = names[value.name]
        graph.reserve_name(value.name)  # it is taken from now on
    for node in graph.nodes:
        node.scope = scopes.get(node.scope, "")
    graph.inputs = {inputs[name]: value for name, value in graph.inputs.items()}
    graph.params = {param.name: param for param in graph.params.values()}
    old_outputs = list(graph.outputs.items())
    graph.outputs.clear()
    for name, value in old_outputs:
        graph.add_output(outputs[name], value)


def replace_weights(
    linear: Node, weight: Recipe, bias: Recipe | Literal["same"] | None = "same", rows: int | None = None
) -> Node:
    """Replace `linear` by one with the recipes `weight` [rows, in] and `bias` [rows]; return the new node.

    `bias` "same" keeps the old bias or its absence; None removes it. `rows` defaults to the old number of rows; if it
    changes, the caller has to adapt the readers. Names stay.
    """
    old, old_bias = linear.operand("weight"), linear.operand("bias")
    assert isinstance(old, Param)
    count = int(old.shape[0]) if rows is None else rows
    new, vector = derive_param(old, weight, (count, *old.shape[1:])), old_bias if bias == "same" else None
    if isinstance(bias, Recipe) and isinstance(old_bias, Param):
        vector = derive_param(old_bias, bias, (count,))
    elif isinstance(bias, Recipe):
        vector = derive_bias(old, bias, count)
    linear = rebuild_node(linear, {"weight": new, "bias": vector})
    # After `rebuild_node`: only a parameter without readers is erased.
    replace_param(old, new)
    replace_param(old_bias, vector)
    return linear


def rebuild_node(node: Node, operands: Mapping[str, Value | None] | None = None, **attrs: Any) -> Node:
    """Replace `node` by one with other `operands` (by their names in the op) and `attrs`; return the new node.

    The other operands and attributes stay, and so do the names of outputs. The new node may have more outputs; if
    outputs change their type, the caller has to adapt the readers.
    """
    inputs = list(node.inputs)
    for name, value in (operands or {}).items():
        index = node.op.operand_index(name, node.attrs)
        # Nodes drop absent operands at the end.
        inputs += [None] * (index + 1 - len(inputs))
        inputs[index] = value
    with node.graph.inserting(before=node):
        outs = node.op.emit(*inputs, **{**node.attrs, **attrs})
    node.graph.replace(node, *outs[: len(node.outputs)])
    replacement = outs[0].producer
    assert replacement is not None
    return replacement


def substitute_size(graph: Graph, name: str, size: sizes.Size) -> None:
    """Replace the named size `name` by `size` in the types of all inputs and results of `graph`, and in attributes."""

    def substitute(value: Any) -> Any:
        if isinstance(value, sizes.Poly):
            return sizes.substitute(value, {name: size})
        return tuple(map(substitute, value)) if isinstance(value, tuple) else value

    for value in [*graph.inputs.values(), *(v for node in graph.nodes for v in node.outputs)]:
        value.type = value.type.with_shape(*(substitute(s) for s in value.type.shape))
    for node in graph.nodes:
        node.attrs = {key: substitute(value) for key, value in node.attrs.items()}


def are_params(values: Iterable[Value | None]) -> bool:
    """Return whether every one of `values` is a parameter or None."""
    return all(v is None or isinstance(v, Param) for v in values)


def require_param(node: Node, name: str) -> Param:
    """Return the operand called `name` of `node`, which must be a parameter (otherwise an AssertionError)."""
    param = node.operand(name)
    assert isinstance(param, Param), name
    return param


def is_feature_split(split: Node) -> bool:
    """Return whether the `split` node splits the last axis of its operand."""
    x = split.inputs[0]
    return x is not None and bool(split.attrs["axis"] % len(x.shape) == len(x.shape) - 1)


def backward_slice(values: Iterable[Value], stops: Iterable[Value | None]) -> list[Node]:
    """Return the nodes that `values` depend on, in no particular order; the search stops at the values `stops`."""
    stop_set, reached, stack = set(stops), dict[Node, None](), list(values)
    while stack:
        value = stack.pop()
        if value in stop_set or value.producer is None or value.producer in reached:
            continue
        reached[value.producer] = None
        stack += [v for v in value.producer.inputs if v is not None]
    return list(reached)


def find_sums(graph: Graph) -> Iterator[Node]:
    """Yield the last add or add_norm of each chain of additions. `graph` may be edited between yields."""
    for node in list(graph.nodes):
        if not node.erased and (node.op is ops.add_norm or (node.op is ops.add and not _is_inner_sum(node))):
            yield node


def find_summands(total: Node) -> list[Value]:
    """Return the summands of the sum that ends at the node `total`, except those of another type (they broadcast).

    An inner sum with several readers counts as one summand.
    """
    values: list[Value] = []
    for v in total.inputs[:2]:
        assert v is not None
        inner = v.producer is not None and v.producer.op is ops.add and _is_inner_sum(v.producer)
        values += find_summands(v.producer) if inner and v.producer else [v] if v.type == total.outputs[-1].type else []
    return values


def has_add_norm_reader(value: Value) -> bool:
    """Return whether an add_norm reads the summand `value`, which then cannot be removed: add_norm needs two."""
    return any(n.op is ops.add_norm for n in value.users)


def remove_summand(value: Value) -> None:
    """Remove the summand `value` from its sum: replace its only reader, an add, by the add's other operand."""
    (reader,) = value.users
    rest = next(v for v in reader.inputs if v is not value)
    assert rest is not None
    reader.output.replace_uses(rest)
    value.graph.erase(reader)


def _is_inner_sum(node: Node) -> bool:
    if node.output.is_output or len(node.output.uses) != 1:
        return False
    reader, index = node.output.uses[0]
    return reader.op is ops.add or (reader.op is ops.add_norm and index < 2)
