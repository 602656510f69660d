"""Rotary positions in a graph: which rotations an attention has, and the parameters of their frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, TensorType, WeftError, dtypes
from weft.ir.frequencies import RopeFrequencies
from weft.ir.op import Trait

from . import oracle
from .edit import drop_params

_THROUGH = {Trait.ELEMENTWISE, Trait.ROWWISE, Trait.VIEW}
_NAMES = {"concat", "transpose", "split"}  # these, too, keep a head's numbers together


def rotations(attention: Node) -> list[Node]:
    """The nodes `rope` on the way to q and k of `attention`, no linear behind them."""
    found = dict[Node, None]()
    stack = [v for v in attention.inputs[:2] if v is not None]
    while stack:
        node = stack.pop().producer
        if node is None or node.op.name == "linear":
            continue
        if node.op.name == "rope":
            found[node] = None
        elif _THROUGH & node.op.traits or node.op.name in _NAMES:
            stack += [v for v in node.inputs if v is not None]
    return list(found)


def recipe_of(rope: Node) -> RopeFrequencies:
    """The frequencies of the node `rope`.

    Raises:
        WeftError: if something else than `RopeFrequencies` makes them.
    """
    param = rope.operand("frequencies")
    if isinstance(param, Param) and isinstance(param.recipe, RopeFrequencies):
        return param.recipe
    name = "" if param is None else param.name
    raise WeftError(f"the frequencies %{name} of %{rope.output.name} come from no recipe rope_frequencies")


def frequencies(graph: Graph, recipe: RopeFrequencies) -> Param:
    """The parameter made by `recipe`, one for the whole graph."""
    for known in graph.params.values():
        if known.recipe == recipe:
            return known
    return graph.add_param("rope.frequencies", TensorType(dtypes.f32, (recipe.dim // 2,)), recipe)


def retune(rope: Node, recipe: RopeFrequencies, amplitude: float | None = None) -> None:
    """Make the node `rope` turn by the frequencies of `recipe`, with `amplitude` if it is given."""
    old = rope.inputs[2]
    rope.set_input(2, frequencies(rope.graph, recipe))
    if amplitude is not None:
        rope.attrs["amplitude"] = float(amplitude)
    drop_params(rope.graph, [old])


def check_scaling(recipe: RopeFrequencies, name: str) -> None:
    """Raise WeftError in the name of the pass `name` if the numbers of `recipe` make no frequencies."""
    if recipe.dim < 2 or recipe.dim % 2:
        raise WeftError(f"{name}: {recipe.dim} numbers of a head are no pairs; choose an even rotary_dim")
    if not recipe.theta > 1:
        raise WeftError(f"{name}: theta={recipe.theta} must be above 1")
    for field in ("factor", "beta_fast", "beta_slow", "low_freq", "high_freq"):
        if not (getattr(recipe, field) > 0 and math.isfinite(getattr(recipe, field))):
            raise WeftError(f"{name}: {field}={getattr(recipe, field)} must be positive")
    if recipe.factor < 1:
        raise WeftError(f"{name}: factor={recipe.factor} must be at least 1")
    if recipe.scaling == "ntk" and recipe.dim < 4:
        raise WeftError(f"{name}: ntk needs at least two pairs, and heads have {recipe.dim // 2}")
    if recipe.scaling in ("yarn", "llama3") and recipe.original < 1:
        raise WeftError(f"{name}: {recipe.scaling} needs original=, the context before it: the model says none")
    if recipe.scaling == "llama3" and recipe.low_freq >= recipe.high_freq:
        raise WeftError(f"{name}: low_freq={recipe.low_freq} must be below high_freq={recipe.high_freq}")


def expected(recipe: RopeFrequencies, rope: Node) -> dict[str, Any]:
    """The settings with which `oracle.turned` turns as the node `rope` should, whose frequencies are to be `recipe`.

    The numbers are those of its parameter, rounded to float32 as they are.

    Raises:
        WeftError: if they differ from the formulas of the papers by more than that rounding.
    """
    param, amplitude = rope.inputs[2], rope.attrs["amplitude"]
    assert isinstance(param, Param)
    fields = ("beta_fast", "beta_slow", "low_freq", "high_freq", "truncate")
    wanted = oracle.frequencies(
        *(recipe.dim, recipe.theta, recipe.scaling, recipe.factor, recipe.original),
        **{name: getattr(recipe, name) for name in fields},
    )
    found = param.recipe.evaluate(param.graph.archive).astype(np.float64)
    error = float(np.max(np.abs(found / wanted - 1)))
    if not error < 1e-6:
        raise WeftError(f"frequencies %{param.name} differ by {error:.1e} from those of {recipe.scaling}")
    if recipe.scaling == "yarn" and abs(amplitude - (1 + math.log(recipe.factor) / 10)) > 1e-12:
        raise WeftError(f"the amplitude {amplitude} is not that of yarn for factor={recipe.factor}")
    return {"frequencies": found, "amplitude": amplitude, "interleaved": rope.attrs["interleaved"]}
