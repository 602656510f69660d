"""Constant tables: formulas in Python for RoPE frequencies and ALiBi slopes, and the dtypes of stored tensors."""

from __future__ import annotations

from weft.ir.graph import Param
from weft.ir.recipes.blocks import Stored
from weft.ir.recipes.frequencies import AlibiSlopes, RopeFrequencies
from weft.ir.recipes.recipe import Recipe
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType


def write_formula(recipe: Recipe) -> str | None:
    """Return a Python expression that computes `recipe` on the device of operand ``{0}``. Return None for recipes other
    than ALiBi slopes and RoPE frequencies whose scaling is none, linear, ntk, dynamic, llama3 or truncated yarn."""
    if isinstance(recipe, AlibiSlopes):
        return f"alibi_slopes({recipe.heads}, {recipe.max_bias!r}, {{0}}.device)"
    if not isinstance(recipe, RopeFrequencies):
        return None
    r = recipe
    if r.scaling in ("none", "linear", "ntk", "dynamic"):
        divisor = f" / {_format_number(r.factor)}" if r.scaling == "linear" else ""
        return f"rope_frequencies({r.dim}, {_format_number(r.base(r.dim, r.theta))}, {{0}}.device){divisor}"
    if r.scaling == "llama3":
        settings = (r.factor, r.low_freq, r.high_freq, r.original)
    elif r.scaling == "yarn" and r.truncate:
        settings = (r.factor, r.beta_fast, r.beta_slow, r.original)
    else:
        return None
    arguments = ", ".join(map(_format_number, settings))
    theta = _format_number(r.theta)
    return f"{r.scaling}_frequencies(rope_frequencies({r.dim}, {theta}, {{0}}.device), {theta}, {arguments})"


def get_stored_dtype(param: Param, dtype: DType) -> DType:
    """Return the dtype of a parameter in a model of `dtype`: integers and block data keep their dtype, constant tables
    are f32, and all other parameters have `dtype`."""
    kind = param.type.dtype
    if not kind.is_float or param.recipe.has(Stored):
        return kind
    return dtypes.f32 if param.recipe.is_constant else dtype


def _format_number(x: float) -> str:
    return str(int(x)) if float(x).is_integer() and abs(x) < 1e15 else repr(x)
