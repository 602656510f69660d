"""Checks of module settings, which raise errors of one sentence with the module and the values."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.activation import check_activation
from weft.ir.storage.documents import quote_value


def need(module: object, condition: bool, message: str) -> None:
    """Raise WeftError("<class of module>: <message>") unless `condition`."""
    if not condition:
        raise WeftError(f"{type(module).__name__}: {message}")


MAX_PARTS = 1 << 12  # the graph has nodes for every layer, head or state; published models have hundreds
COUNTS = (  # names of fields that count such parts; a block of `BlockSparse` gathers the keys of sides, first and last
    *("layers", "times", "heads", "kv_heads", "experts", "zero_experts", "state", "norm_groups", "streams"),
    *("sides", "first", "last"),
)


FROM_ZERO = ("token", "start", "skip", "sides", "first", "last", "prefix_tokens", "projection")
POSITIVE = ("eps", "limit", "clip", "cap", "softcap", "logit_softcap", "decay", "max_bias", "least_step", "capacity")
REMEDIES = {"position_bias": "give other biases to Attention(bias=...)"}


def check_fields(module: object) -> None:
    """Raise WeftError unless the fields of `module` are None, or fit their types: numbers, modules, other classes.

    Integers are at least 1, or 0 if that is their default or they are in `FROM_ZERO`. Floats are finite, and positive
    if they are in `POSITIVE` and their default is not negative. For a norm or a layer, any module fits.
    """
    cls: Any = type(module)
    for name, kinds, default in _list_kinds(cls):
        value = getattr(module, name)
        if kinds == (int,):
            need_int(module, name, least=0 if default == 0 or name in FROM_ZERO else 1)
        elif kinds in ((float,), (int, float)):
            is_positive = name in POSITIVE and not (isinstance(default, float) and default < 0)
            (need_positive if is_positive else need_finite)(module, name)
        elif name == "activation" and isinstance(value, str):
            need_activation(module, value)
        elif any(typing.get_args(kind)[-1:] == (Value,) or hasattr(kind, "plain") for kind in kinds):
            if not isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type))):
                need_modules(module, name)
        elif kinds not in ((bool,), (str,), (Any,)) and all(isinstance(kind, type) for kind in kinds):
            need_type(module, name, *kinds, otherwise=REMEDIES.get(name, ""))


@functools.cache
def _list_kinds(cls: type) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Return (name, alternatives of its type except None, default) for each field of the dataclass `cls`."""
    kinds = typing.get_type_hints(cls)
    for name, hint in kinds.items():
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds[name] = tuple(k for k in (typing.get_args(hint) if is_union else (hint,)) if k is not types.NoneType)
    return [(f.name, kinds[f.name], f.default) for f in fields(cls)]


def need_int(module: object, *names: str, least: int = 1) -> None:
    """Raise WeftError unless each field of `names` in `module` is None or an integer from `least` to 2^63 − 1.
    A field in `COUNTS` is at most `MAX_PARTS`."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    _need_each(module, names, fits, f"a whole number of at least {least}")
    _need_each(module, names, lambda value: value < 1 << 63, "a number below 2^63")
    for name in filter(COUNTS.__contains__, names):
        value = getattr(module, name)
        small = value is None or value <= MAX_PARTS
        need(module, small, f"{name}={quote_value(value)} exceeds the maximum of {MAX_PARTS}")


def need_positive(module: object, *names: str) -> None:
    """Raise WeftError unless each field of `names` in `module` is None or a positive finite number."""
    _need_each(module, names, lambda value: _is_finite(value) and value > 0, "a positive number")


def need_finite(module: object, *names: str) -> None:
    """Raise WeftError unless each field of `names` in `module` is None or a finite number."""
    _need_each(module, names, _is_finite, "a finite number")


def _need_each(module: object, names: Iterable[str], fits: Callable[[Any], bool], expected: str) -> None:
    for name in names:
        value = getattr(module, name)
        need(module, value is None or fits(value), f"{name}={quote_value(value)} must be {expected}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def need_divisor(module: object, part: str, whole: str) -> None:
    """Raise WeftError unless the field `part` of `module` divides its field `whole`."""
    pieces, size = getattr(module, part), getattr(module, whole)
    need(module, size % pieces == 0, f"{part}={pieces} does not divide {whole}={size}")


def need_modules(module: object, *names: str) -> None:
    """Raise WeftError unless each field of `names` in `module` is None or a module instance, not a class."""
    for name in names:
        value = getattr(module, name)
        fits = value is None or (callable(value) and not isinstance(value, type))
        need(module, fits, f"{name}={value!r} is not a module" + (": call it" if isinstance(value, type) else ""))


def need_type(module: object, name: str, *kinds: type, otherwise: str = "") -> None:
    """Raise WeftError, with the remedy `otherwise`, unless the field `name` of `module` is None or one of `kinds`."""
    value = getattr(module, name)
    expected = " or ".join(kind.__name__ for kind in kinds)
    fits = value is None or isinstance(value, kinds)
    need(module, fits, f"{name}={value!r} must be {expected}" + (f": {otherwise}" if otherwise else ""))


def need_choice(module: object, name: str, known: Iterable[str]) -> None:
    """Raise WeftError unless the field `name` of `module` is one of `known`."""
    value, choices = getattr(module, name), tuple(known)
    need(module, value in choices, f"{name}={value!r} is unknown; known are {', '.join(choices)}")


def need_activation(module: object, activation: str) -> None:
    """Raise WeftError unless `activate` supports the function `activation`, a setting of `module`."""
    try:
        check_activation(activation)
    except WeftError as e:
        raise WeftError(f"{type(module).__name__}: {e}") from None
