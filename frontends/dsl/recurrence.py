"""Custom recurrences: a function from states and the inputs at one token to new states and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.graph.step import BATCH, trace_step
from weft.ir.types import TensorType, dtypes


@dataclass(frozen=True)
class State:
    """A state of `scan`: its `shape` without the batch axis, and its `initial` value before the first token."""

    shape: tuple[int, ...]
    initial: float = 0.0


Declared = State | Sequence[int]


def scan(
    step: Callable[..., Any], *inputs: Value, state: Declared | Mapping[str, Declared], name: str | None = None
) -> Any:
    """Run ``step(state, *inputs)`` on one token after the other, and return its outputs for all tokens.

    `inputs` are [batch, seq, ...]; the step receives each as [batch, ...], and the state [batch, ...] after the
    previous token. The step returns a pair: the new state, and an output [batch, ...] or a tuple of outputs. It may use
    any ops and modules; its parameters are created once, in the scope of the caller. `state` is the shape of the state
    without the batch axis, such as ``(heads, d)``, which then starts as zeros, or a `State`. With a dict of states by
    name, the step receives and returns a tuple of states. States are f32. `name` is the name of the scan node.

    The result is an output [batch, seq, ...], or a tuple of outputs. Generation caches the state between steps. ::

        def step(h, a, b):
            h = a * h + b
            return h, h

        y = scan(step, gate, x, state=(x.width,))

    Raises:
        WeftError: if inputs or states are missing or have invalid shapes, the step does not return such a pair, the new
            state differs from the old in shape or type, or the step reads values of all tokens besides `inputs`.
    """
    states = _parse_states(state)
    if not inputs or not all(isinstance(x, Value) for x in inputs):
        raise WeftError("scan: inputs must be one or more values [batch, seq, ...]")
    if short := next((x for x in inputs if len(x.shape) < 2 or x.shape[:2] != inputs[0].shape[:2]), None):
        raise WeftError(f"scan: input {short!r} must have the axes [batch, seq] of the first input, {inputs[0]!r}")
    names = _name_operands(step, [*states], len(inputs), isinstance(state, Mapping))
    returns_tuple, seq = list[bool](), inputs[0].shape[1]

    def run(previous: Sequence[Value], tokens: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
        try:
            returned = step(tuple(previous) if isinstance(state, Mapping) else previous[0], *tokens)
        except WeftError as e:
            if isinstance(seq, int) or str(seq) not in str(e):
                raise
            raise WeftError(f"{e}; the step reads one token: give values with axis {seq} as inputs of scan") from None
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise WeftError("scan: the step must return a pair (new state, output)")
        new, outputs = returned
        returns_tuple.append(isinstance(outputs, (tuple, list)))
        returned_values = _list_values(new, "new state"), _list_values(outputs, "output")
        if len(returned_values[0]) != len(previous):
            raise WeftError(f"scan: the step returns {len(returned_values[0])} new states, not {len(previous)}")
        return returned_values

    named_states = zip(names, states.values(), strict=False)
    states_by_name = {name: (TensorType(dtypes.f32, (BATCH, *s.shape)), s.initial) for name, s in named_states}
    tokens = {n: x.type.with_shape(BATCH, *x.shape[2:]) for n, x in zip(names[len(states) :], inputs, strict=True)}
    scan_step, constants = trace_step(inputs[0].graph, run, states_by_name, tokens)
    results = ops.scan.emit(*inputs, *constants, step=scan_step, name=name)
    return results if returns_tuple[0] else results[0]


def _parse_states(state: Declared | Mapping[str, Declared]) -> dict[str, State]:
    """Return the states by name; a single state has the name ""."""
    if isinstance(state, Mapping):
        if not state:
            raise WeftError("scan: state is empty, but needs at least one state")
        return {str(name): _parse_state(declared) for name, declared in state.items()}
    return {"": _parse_state(state)}


def _parse_state(declared: Declared) -> State:
    shape, initial = (declared.shape, declared.initial) if isinstance(declared, State) else (declared, 0.0)
    if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise WeftError(
            f"scan: the state {declared!r} must be a shape without the batch axis, such as (heads, d), or a State"
        )
    return State(tuple(shape), float(initial))


def _name_operands(step: Callable[..., Any], states: list[str], count: int, several: bool) -> list[str]:
    """Return names of the states (`states` if `several`), then of `count` inputs: the parameters of `step` if their
    number fits, else state, x0, x1, …. An input with the name of a state gets the suffix _in."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [p.name for p in inspect.signature(step).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        parameters = []
    has_names = len(parameters) == count + 1
    inputs = parameters[1:] if has_names else [f"x{i}" for i in range(count)]
    state_names = states if several else [parameters[0] if has_names else "state"]
    return [*state_names, *(f"{name}_in" if name in state_names else name for name in inputs)]


def _list_values(result: Any, role: str) -> list[Value]:
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    if wrong := next((v for v in values if not isinstance(v, Value)), None):
        raise WeftError(f"scan: the {role} of the step is a {type(wrong).__name__}, not a value")
    return values
