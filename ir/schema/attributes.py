"""Attributes of ops and passes: checking values against a declared type, and formatting that type."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import WeftError
from ..types import Shape


@dataclass(frozen=True)
class Attr:
    """An attribute of an op or a pass; its `default` is ``inspect.Parameter.empty`` if it is required."""

    name: str
    type: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def check(self, value: Any, op: str) -> Any:
        """Return `value` in canonical form: lists become tuples, NumPy scalars become Python ones, and ints become
        floats for a float attribute.

        Raises:
            WeftError: if the value is not of the declared type; the message names the op (or pass) `op`.
        """
        canonical = _conform(value, self.type)
        if canonical is _MISFIT:
            raise WeftError(f"{op}: attribute {self.name}={value!r} is not of type {format_type(self.type)}")
        return canonical


_MISFIT = object()


def format_type(t: Any) -> str:
    """Return the attribute type `t` as documentation prints it, such as ``int | none`` or ``[int]``."""
    if t is type(None):
        return "none"
    if t == Shape:
        return "shape"
    if typing.get_origin(t) in (types.UnionType, typing.Union):
        return " | ".join(format_type(a) for a in typing.get_args(t))
    if typing.get_origin(t) is tuple:
        return f"[{format_type(typing.get_args(t)[0])}]"
    name: str = t.__name__
    return {"DType": "dtype", "Poly": "size"}.get(name, name)


@functools.cache  # signatures have few types, and splitting one takes longer than checking a value
def _split_type(t: Any) -> tuple[tuple[Any, ...], Any]:
    origin, arguments = typing.get_origin(t), typing.get_args(t)
    if origin in (types.UnionType, typing.Union):
        # float also accepts integers and would convert them, so it is tried last.
        return tuple(sorted(arguments, key=lambda a: a is float)), None
    return (), arguments[0] if origin is tuple else None


def _conform(value: Any, t: Any) -> Any:
    options, item = _split_type(t)
    if options:
        for option in options:
            converted = _conform(value, option)
            if converted is not _MISFIT:
                return converted
        return _MISFIT
    if item is not None:
        if not isinstance(value, (tuple, list)):
            return _MISFIT
        items = tuple(_conform(v, item) for v in value)
        return _MISFIT if any(v is _MISFIT for v in items) else items
    if t is type(None):
        return None if value is None else _MISFIT
    # Before float and int: bool is a subclass of int.
    if isinstance(value, (bool, np.bool_)):
        return bool(value) if t is bool else _MISFIT
    if t is float and isinstance(value, (int, float, np.floating, np.integer)):
        return float(value)
    if t is int and isinstance(value, (int, np.integer)):
        return int(value)
    return value if isinstance(t, type) and t is not int and isinstance(value, t) else _MISFIT
