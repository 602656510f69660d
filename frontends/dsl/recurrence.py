"""Recurrences of one's own: a function of states and of the inputs at one token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.graph.step import BATCH, traced_step
from weft.ir.types import TensorType, dtypes


@dataclass(frozen=True)
class State:
    """A state of `scan`: the `shape` of a row, and the number that fills it before the first token."""

    shape: tuple[int, ...]
    initial: float = 0.0


Declared = State | Sequence[int]


def scan(
    step: Callable[..., Any], *inputs: Value, state: Declared | Mapping[str, Declared], name: str | None = None
) -> Any:
    """Run ``step(state, *inputs)`` on one token after the other; return its outputs of all tokens.

    `inputs` are [batch, seq, ...], and a step gets each as [batch, ...], with the state [batch, ...] that the token
    before left. It returns the new state and an output [batch, ...], or a tuple of several, made with any ops and
    modules; parameters that it asks for are made once, in the scope of the caller. `state` is the shape of a row, such
    as ``(heads, d)``, which starts as zeros, or a `State`; a dict of several by name makes the step take and return a
    tuple of them. States are f32.

    The result is an output [batch, seq, ...], or a tuple of them. The state is kept from call to call of a model that
    generates. ::

        def step(h, a, b):
            h = a * h + b
            return h, h

        y = scan(step, gate, x, state=(x.width,))

    Raises:
        WeftError: if the new state differs from the old in shape or type, or the step reads a value of all tokens that
            it is not given.
    """
    states = _declared(state)
    if not inputs or not all(isinstance(x, Value) for x in inputs):
        raise WeftError("scan: inputs are values [batch, seq, ...], at least one")
    if short := next((x for x in inputs if len(x.shape) < 2 or x.shape[:2] != inputs[0].shape[:2]), None):
        raise WeftError(f"scan: the input {short!r} must be [batch, seq, ...] like the first, {inputs[0]!r}")
    names = _names(step, [*states], len(inputs), isinstance(state, Mapping))
    several, seq = list[bool](), inputs[0].shape[1]

    def run(before: Sequence[Value], tokens: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
        try:
            returned = step(tuple(before) if isinstance(state, Mapping) else before[0], *tokens)
        except WeftError as e:
            if isinstance(seq, int) or str(seq) not in str(e):
                raise
            raise WeftError(f"{e}; a step sees one token: values with an axis {seq} must be inputs of scan") from None
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise WeftError("scan: the step must return a pair, the new state and the output")
        new, outputs = returned
        several.append(isinstance(outputs, (tuple, list)))
        made = _values(new, "new state"), _values(outputs, "output")
        if len(made[0]) != len(before):
            raise WeftError(f"scan: the step returns {len(made[0])} new states, not {len(before)}")
        return made

    before = zip(names, states.values(), strict=False)
    carried = {name: (TensorType(dtypes.f32, (BATCH, *s.shape)), s.initial) for name, s in before}
    tokens = {n: x.type.with_shape(BATCH, *x.shape[2:]) for n, x in zip(names[len(states) :], inputs, strict=True)}
    found, read = traced_step(inputs[0].graph, run, carried, tokens)
    made = ops.scan.emit(*inputs, *read, step=found, name=name)
    return made if several[0] else made[0]


def _declared(state: Declared | Mapping[str, Declared]) -> dict[str, State]:
    """The states by name."""
    if isinstance(state, Mapping):
        if not state:
            raise WeftError("scan: a recurrence needs a state")
        return {str(name): _state(each) for name, each in state.items()}
    return {"": _state(state)}


def _state(declared: Declared) -> State:
    shape, initial = (declared.shape, declared.initial) if isinstance(declared, State) else (declared, 0.0)
    if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise WeftError(
            f"scan: the state {declared!r} must be the shape of a row, such as (heads, d), or a State of it"
        )
    return State(tuple(shape), float(initial))


def _names(step: Callable[..., Any], states: list[str], count: int, several: bool) -> list[str]:
    """The names of states, then of `count` inputs: those of the parameters of `step`."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [p.name for p in inspect.signature(step).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        parameters = []
    named = len(parameters) == count + 1
    inputs = parameters[1:] if named else [f"x{i}" for i in range(count)]
    own = states if several else [parameters[0] if named else "state"]
    return [*own, *(f"{name}_in" if name in own else name for name in inputs)]


def _values(made: Any, what: str) -> list[Value]:
    found = list(made) if isinstance(made, (tuple, list)) else [made]
    if wrong := next((v for v in found if not isinstance(v, Value)), None):
        raise WeftError(f"scan: the {what} of the step is a {type(wrong).__name__}, not a value")
    return found
