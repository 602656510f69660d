"""How an op is called: operands by place or by name, numbers among them, and what the call returns."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import WeftError

if TYPE_CHECKING:
    from .op import Op


def bind(op: Op, operands: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split a call into its operands, in the order of the signature, and its attributes.

    Raises:
        WeftError: if an operand is given twice, by place and by name.
    """
    names = [o.name for o in op.operands if not o.variadic]
    by_name = {name: keywords[name] for name in names if name in keywords}
    if not by_name:
        return tuple(operands), dict(keywords)
    if twice := [name for name in by_name if names.index(name) < len(operands)]:
        raise WeftError(f"op {op.name} is given operand {twice[0]} twice")
    rest = (by_name.get(name) for name in names[len(operands) :])
    return (*operands, *rest), {k: v for k, v in keywords.items() if k not in by_name}


def is_number(operand: object) -> bool:
    """Tell a number from a value; numpy's numbers count."""
    return isinstance(operand, numbers.Real)


def results(op: Op, operands: Sequence[Any]) -> tuple[str, ...]:
    """Name what `op` makes of `operands`: a present state (`present_k`) only where its past (`past_k`) is given."""
    given = {o.name for o, v in zip(op.operands, operands, strict=False) if v is not None}
    states = (name.replace("present", "past", 1) if name.startswith("present") else None for name in op.output_names)
    return tuple(name for name, past in zip(op.output_names, states, strict=True) if past is None or past in given)


def packed(op: Op, outputs: tuple[Any, ...]) -> Any:
    """Return the only one of `outputs`, or a tuple of all of them, named where the op names its outputs."""
    if op.several:
        return outputs
    if len(outputs) == 1:
        return outputs[0]
    return record(
        op.name, op.output_names if len(outputs) == len(op.output_names) else op.output_names[: len(outputs)]
    )(*outputs)


@functools.cache
def record(name: str, fields: tuple[str, ...]) -> Any:
    """The named tuple of what the op called `name` returns: ``TopKResults(values, indices)``."""
    return namedtuple(record_name(name), fields)


def record_name(name: str) -> str:
    """`top_k` as TopKResults."""
    return "".join(word.capitalize() for word in name.split("_")) + "Results"


def signature(op: Op) -> inspect.Signature:
    """The signature for `inspect`, `help` and the stubs: operands, `name` of the outputs, attributes."""
    ordinary, star, keyword = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
    )
    empty = inspect.Parameter.empty
    operands = [
        inspect.Parameter(o.name, star if o.variadic else ordinary, default=None if o.optional else empty)
        for o in op.operands
    ]
    attrs = [inspect.Parameter(a.name, keyword, default=a.default, annotation=a.type) for a in op.attrs.values()]
    return inspect.Signature([*operands, *attrs, inspect.Parameter("name", keyword, default=None)])
