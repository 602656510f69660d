"""The interpreter: run the references of all nodes in float64. It defines the semantics of the IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import WeftError
from .graph import Graph, Node, Value
from .op import Op
from .recipes.readers import Array
from .types import TensorType, sizes
from .types.sizes import Poly

Watch = Callable[[Node, tuple[Array, ...]], None]


def interpret(
    graph: Graph,
    inputs: Mapping[str, Array],
    *,
    params: Mapping[str, Array] | None = None,
    watch: Watch | None = None,
    convert: Callable[[Array], Array] | None = None,
) -> dict[str, Array]:
    """Run `graph` on `inputs` (by input name) and return its outputs by name; floats are computed in float64.

    `params` has arrays for parameters by name; other parameters are computed by their recipes. `watch(node, outputs)`
    is called after every node. Values are dropped after their last use. `convert` replaces `widen`, the conversion of
    every array.

    Raises:
        WeftError: if an input is missing or unknown, or its shape does not fit its type.
    """
    for name in inputs:
        if name not in graph.inputs:
            raise WeftError(f"graph {graph.name} has no input {name!r}; it has {', '.join(graph.inputs)}")
    env, convert = dict[Value, Array](), convert or widen
    for name, value in graph.inputs.items():
        if name not in inputs:
            raise WeftError(f"graph {graph.name} needs a value for input {name!r}: {value.type}")
        env[value] = convert(np.asarray(inputs[name]))
    binding = bind_inputs(graph, {name: env[value].shape for name, value in graph.inputs.items()})
    # Later nodes overwrite earlier ones. Outputs count as uses: one without readers is dropped by its own node.
    last_use: dict[Value, Node] = {
        v: node for node in graph.nodes for v in (*node.outputs, *node.inputs) if v is not None
    }
    dying: dict[Node, list[Value]] = {}
    for value, node in last_use.items():
        if not value.is_output:
            dying.setdefault(node, []).append(value)
    overrides = params or {}

    def fetch(v: Value | None) -> Array | None:
        if v is None or v in env:
            return None if v is None else env[v]
        # Not stored in `env`: the weights of one node are in memory at a time.
        param = graph.params[v.name]
        return convert(np.asarray(overrides[v.name] if v.name in overrides else param.recipe.evaluate(graph.reader)))

    for node in graph.nodes:
        results = run_node(node.op, [fetch(v) for v in node.inputs], node.attrs, binding)
        for value, array in zip(node.outputs, results, strict=True):
            env[value] = convert(array)
        if watch:
            watch(node, tuple(env[v] for v in node.outputs))
        for v in dying.get(node, ()):
            env.pop(v, None)
    outputs = {name: fetch(v) for name, v in graph.outputs.items()}
    return {name: array for name, array in outputs.items() if array is not None}


def run_node(op: Op, operands: list[Array | None], attrs: Mapping[str, Any], binding: Mapping[str, int]) -> Any:
    """Run the reference of `op` and return a tuple of outputs; `binding` has the symbolic sizes in `attrs`."""
    concrete = {k: _evaluate_sizes(v, binding) for k, v in attrs.items()}
    return op.run_reference(operands, concrete)


def _evaluate_sizes(value: Any, binding: Mapping[str, int]) -> Any:
    if isinstance(value, Poly):
        return sizes.evaluate(value, binding)
    if isinstance(value, tuple):
        return tuple(_evaluate_sizes(v, binding) for v in value)
    return value


def widen(array: Array) -> Array:
    """Return `array` with floats as float64 and integers as int64; booleans stay."""
    if array.dtype == np.bool_:
        return array
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64, copy=False)
    return array.astype(np.float64, copy=False)


def bind_inputs(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the symbolic sizes that the `shapes` of the inputs determine; raise WeftError if one does not fit."""
    binding: dict[str, int] = {}
    solved = -1
    while solved < len(binding):  # `past + seq` gives past once seq is known, in any order of inputs
        solved = len(binding)
        for name, value in graph.inputs.items():
            bind_sizes(value.type, shapes[name], binding, name)
    return binding


def bind_sizes(type: TensorType, shape: tuple[int, ...], binding: dict[str, int], name: str) -> None:
    """Match the concrete `shape` of the input `name` with `type`, and add to `binding` the symbolic sizes that the
    shape determines. A size is neither bound nor checked if it has several unknown names, or a multiple or power of
    one.

    Raises:
        WeftError: if the shape does not match the type under `binding`.
    """
    fits = len(shape) == type.rank
    for size, actual in zip(type.shape, shape, strict=False):
        size = sizes.substitute(size, binding)
        if isinstance(size, Poly):
            unknown, *rest = sizes.list_names(size)
            # One unknown with coefficient 1 can be solved for: past in past + seq once seq is known.
            if not rest and isinstance(offset := size - sizes.sym(unknown), int):
                binding[unknown] = actual - offset
        else:
            fits = fits and size == actual
    if not fits:
        raise WeftError(f"input {name!r} has shape {list(shape)}, but the graph expects {type}")


def list_named_sizes(graph: Graph) -> list[str]:
    """Return the names of the symbolic sizes in the shapes of the graph inputs, each once, in order of appearance."""
    axes = (size for value in graph.inputs.values() for size in value.type.shape)
    return list(dict.fromkeys(name for size in axes for name in sorted(sizes.list_names(size))))
