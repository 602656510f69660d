"""Rotary positions in a graph: the rotations of an attention, and the parameters of their frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.ir import Graph, Node, Param, TensorType, WeftError, ops
from weft.ir.op import Trait
from weft.ir.recipes.frequencies import RopeFrequencies, RopeScaling
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes

from ..core import oracle
from ..core.trace import Trace
from ..edits.edit import require_param, set_recipe
from .projections import TOKENWISE_TRAITS

MAX_THETA, MAX_FACTOR = 1e30, 1e6  # base and factor: float32 cannot represent the frequencies of larger ones
_SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")  # that `oracle.compute_frequencies` knows
_KEEP_HEADS = (ops.concat, ops.transpose, ops.split)  # these keep the features of a head together also


def find_ropes(attention: Node) -> list[Node]:
    """Return all `rope` nodes before operands 0 and 1 (q and k) of `attention`, each once. The search goes back to
    linears, and to ops that do not keep the features of a head together."""
    ropes = dict[Node, None]()
    stack = [v for v in attention.inputs[:2] if v is not None]
    while stack:
        node = stack.pop().producer
        if node is None or node.op in (ops.linear, ops.norm_linear):
            continue
        if node.op is ops.rope:
            ropes[node] = None
        elif TOKENWISE_TRAITS & node.op.traits or node.op in _KEEP_HEADS:
            stack += [v for v in node.inputs if v is not None]
    return list(ropes)


def explain_difference(q: Node | None, k: Node | None) -> str | None:
    """Return a reason (str) why the ropes `q` and `k` rotate differently; None if they do not, or if both are None."""
    if q is None or k is None:
        return None if q is k else f"only its {'queries' if k is None else 'keys'} are rotated"
    if q.inputs[1:] != k.inputs[1:]:
        return "queries and keys are rotated by different positions or frequencies"
    for name in ("interleaved", "amplitude"):
        if q.attrs[name] != k.attrs[name]:
            return f"queries and keys are rotated with {name} {q.attrs[name]} and {k.attrs[name]}"
    return None


def match_ropes(attention: Node) -> tuple[Node, Node] | str:
    """Return the rope nodes (of q, of k) in attention(rope(q), rope(k), v, …), for a kernel that also rotates. Return a
    reason (str) if there are none, if they differ in angles, if their heads are not those of `attention`, if it has no
    operand v, or if its cache is written at other positions than those of the ropes."""
    producers = (None if v is None else v.producer for v in map(attention.operand, "qk"))
    q, k = (node if node is not None and node.op is ops.rope else None for node in producers)
    if (reason := explain_difference(q, k)) is not None:
        return reason
    if q is None or k is None:
        return "its queries and keys are not rotated"
    if attention.operand("v") is None:
        return "its values are part of the rotated keys"
    if (q.attrs["heads"], k.attrs["heads"]) != (attention.attrs["heads"], attention.attrs["kv_heads"]):
        return "it has other heads than the rotations"
    if attention.operand("positions") not in (None, q.operand("positions")):
        return "its cache is written at other positions than those it is rotated by"
    return q, k


def get_frequencies(rope: Node) -> RopeFrequencies | None:
    """Return the recipe of the frequencies of `rope`; None unless it is a parameter's recipe `RopeFrequencies`."""
    param = rope.inputs[2]
    return param.recipe if isinstance(param, Param) and isinstance(param.recipe, RopeFrequencies) else None


def find_or_add_frequencies(graph: Graph, recipe: RopeFrequencies) -> Param:
    """Return a parameter of `graph` with `recipe`; without one, add ``rope.frequencies``, f32 [recipe.dim / 2]."""
    for param in reversed(graph.params.values()):  # the previous layer has just added it
        if param.recipe == recipe:
            return param
    return graph.add_param("rope.frequencies", TensorType(dtypes.f32, (recipe.dim // 2,)), recipe)


def set_frequencies(rope: Node, recipe: RopeFrequencies, amplitude: float | None = None) -> None:
    """Set the frequencies of the node `rope` to `recipe`, and its attribute `amplitude` unless None, in place."""
    set_recipe(rope, 2, recipe)
    if amplitude is not None:
        rope.attrs["amplitude"] = float(amplitude)


@dataclass(frozen=True, kw_only=True)
class ScalingArguments:
    """The arguments of passes that scale rotary frequencies.

    original: the context length before scaling; None for the context in the graph's metadata.
    beta_fast, beta_slow, truncate: settings of YaRN.
    low_freq, high_freq: settings of Llama 3.
    """

    original: int | None = None
    beta_fast: float = RopeScaling.beta_fast
    beta_slow: float = RopeScaling.beta_slow
    low_freq: float = RopeScaling.low_freq
    high_freq: float = RopeScaling.high_freq
    truncate: bool = RopeScaling.truncate

    def find_context(self, graph: Graph) -> int:
        """Return the context length before scaling: `original`, else that in the metadata of `graph`, else 0."""
        return int(graph.meta.get("context") or 0) if self.original is None else self.original

    def scale_recipe(self, recipe: RopeFrequencies, scaling: str, factor: float, original: int) -> RopeFrequencies:
        """Return `recipe` with `scaling` and the settings that `scaling` uses, from `factor`, `original` and `self`."""
        settings = {**vars(self), "factor": factor, "original": original}
        scaled = replace(recipe, scaling=scaling)
        return replace(scaled, **{name: settings[name] for name in scaled.used_settings})


def check_scaling(recipe: RopeFrequencies, name: str) -> None:
    """Raise a WeftError that names the pass `name` if a setting of `recipe` is missing or out of range."""
    if recipe.dim < 2 or recipe.dim % 2:
        raise WeftError(f"{name}: {recipe.dim} features of a head do not form pairs; choose an even rotary_dim")
    if not 1 < recipe.theta <= MAX_THETA:
        raise WeftError(f"{name}: theta={recipe.theta} must be above 1, and at most {MAX_THETA:g}")
    for field in ("factor", "beta_fast", "beta_slow", "low_freq", "high_freq"):
        if not (getattr(recipe, field) > 0 and math.isfinite(getattr(recipe, field))):
            raise WeftError(f"{name}: {field}={getattr(recipe, field)} must be positive")
    if not 1 <= recipe.factor <= MAX_FACTOR:
        raise WeftError(f"{name}: factor={recipe.factor} must be from 1 to {MAX_FACTOR:g}")
    if recipe.scaling == "ntk" and recipe.dim < 4:
        raise WeftError(f"{name}: ntk needs at least two pairs, and heads have {recipe.dim // 2}")
    if "original" in recipe.used_settings and recipe.original < 1:
        raise WeftError(f"{name}: {recipe.scaling} needs original=, the context length before scaling")
    if recipe.scaling == "llama3" and recipe.low_freq >= recipe.high_freq:
        raise WeftError(f"{name}: low_freq={recipe.low_freq} must be below high_freq={recipe.high_freq}")


def make_rope_reference(recipe: RopeFrequencies, rope: Node, **settings: Any) -> Callable[..., Array]:
    """Return a NumPy reference function rotate(x, positions, …, heads=) of the node `rope`.

    It is that of the op, with the stored frequencies of `rope` and `settings` (interleaved, amplitude).

    Raises:
        WeftError: if the stored frequencies differ relatively by 1e-6 or more from the published formula of `recipe`.
    """
    param = require_param(rope, "frequencies")
    exact = oracle.compute_frequencies(recipe.dim, recipe.theta, **recipe.settings)
    stored = param.recipe.evaluate(param.graph.reader).astype(np.float64)
    error = float(np.max(np.abs(stored / exact - 1)))
    if not error < 1e-6:
        raise WeftError(f"frequencies %{param.name} must be those of {recipe.scaling}, but differ by {error:.1e}")

    def rotate(x: Array, at: Array, *_: Array, heads: int, **__: Any) -> Array:
        return np.asarray(ops.rope.reference(x, at, stored, heads=heads, **settings))

    return rotate


def find_exclusive_ropes(graph: Graph, layers: Sequence[Node], name: str, trace: Trace) -> dict[Node, RopeFrequencies]:
    """Return the `rope` nodes of the attentions `layers`, each with the recipe of its frequencies.
    Leave out a node, and record it as a refusal of pass `name` in `trace`, if an attention outside `layers` also uses
    it, or if its frequencies are computed or have a scaling other than none, linear, ntk, yarn and llama3."""
    readers: dict[Node, set[Node]] = {}
    for attention in graph.nodes:
        if Trait.ATTENTION in attention.op.traits:
            for rope in find_ropes(attention):
                readers.setdefault(rope, set()).add(attention)
    recipes = {}
    for rope in dict.fromkeys(rope for attention in layers for rope in find_ropes(attention)):
        recipe = get_frequencies(rope)
        if not readers[rope] <= set(layers):
            trace.refuse(name, rope.output.name, "layers that are not selected also use it")
        elif recipe is None or recipe.scaling not in _SCALINGS:
            how = "computed" if recipe is None else f"scaled by {recipe.scaling}, which is not supported"
            trace.refuse(name, rope.output.name, f"its frequencies are {how}")
        else:
            recipes[rope] = recipe
    return recipes
