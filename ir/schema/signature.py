"""The signature of an op (operands, attributes, outputs), and calls of the op."""

from __future__ import annotations

import functools
import inspect
import numbers
import typing
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WeftError
from .attributes import Attr


@dataclass(frozen=True)
class Operand:
    """An operand of an op; a `variadic` one collects all further positional arguments."""

    name: str
    optional: bool = False
    variadic: bool = False


class Signature:
    """The operands, attributes and outputs of an op, derived from the parameters of its reference."""

    def __init__(self, reference: Callable[..., Any], output_names: tuple[str, ...]) -> None:
        # References such as `slice_` end in _ where Python has the name.
        self.name = reference.__name__.rstrip("_")
        self.output_names = output_names
        hints = typing.get_type_hints(reference)
        returned = hints.get("return")
        several = typing.get_origin(returned) is tuple and typing.get_args(returned)[1:] == (Ellipsis,)
        self.returns_tuple = several and not output_names  # an attribute determines the number of results
        self.operands: tuple[Operand, ...] = ()
        self.attrs: dict[str, Attr] = {}
        parameters = []
        for p in inspect.signature(reference).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                self.attrs[p.name] = Attr(p.name, hints[p.name], p.default)
                parameters.append(p.replace(annotation=hints[p.name]))
            else:
                self.operands += (Operand(p.name, p.default is None, p.kind is p.VAR_POSITIONAL),)
                parameters.append(p.replace(annotation=p.empty))
        name = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None)  # of the outputs
        self.__signature__ = inspect.Signature([*parameters, name])  # for inspect, help and stubs

    def call_names(self, attrs: Mapping[str, Any] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (operand names, output names) of a call with the attributes `attrs`, on which they depend for ops such
        as `scan`; None: the names in the signature."""
        return tuple(o.name for o in self.operands), self.output_names

    def operand_index(self, name: str, attrs: Mapping[str, Any] | None = None) -> int:
        """Return the position of the operand called `name`; KeyError if there is none."""
        names, _ = self.call_names(attrs)
        if name not in names:
            raise KeyError(f"op {self.name} has no operand {name}")
        return names.index(name)

    def check_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes by name, in canonical form (see `Attr.check`), with defaults for absent ones.

        Raises:
            WeftError: on an unknown, missing or ill-typed attribute.
        """
        for name in attrs:
            if name not in self.attrs:
                names = ", ".join(self.attrs) or "none"
                raise WeftError(f"op {self.name} has no attribute {name!r}; it has {names}")
        full = {}
        for attr in self.attrs.values():
            if attr.required and attr.name not in attrs:
                raise WeftError(f"op {self.name} needs attribute {attr.name}")
            full[attr.name] = attr.check(attrs[attr.name], self.name) if attr.name in attrs else attr.default
        return full

    def check_operands(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the operands `values` without absent ones (None) at the end.

        Raises:
            WeftError: if a required operand is missing, a variadic one is None, or there are none or too many.
        """
        operands = list(values)
        while operands and operands[-1] is None:
            operands.pop()
        if not operands:
            raise WeftError(
                f"op {self.name} got no operands; it needs {self.operands[0].name if self.operands else 'one'}"
            )
        variadic = bool(self.operands) and self.operands[-1].variadic
        if len(operands) > len(self.operands) and not variadic:
            raise WeftError(f"op {self.name} takes at most {len(self.operands)} operands, not {len(operands)}")
        for i, o in enumerate(self.operands):
            if (i >= len(operands) or operands[i] is None) and not o.optional and not o.variadic:
                raise WeftError(f"op {self.name} needs operand {o.name}")
        if variadic and any(v is None for v in operands[len(self.operands) - 1 :]):
            raise WeftError(f"op {self.name}: an operand {self.operands[-1].name} is None, but each must be a value")
        return tuple(operands)

    def operand_names(self, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> list[str]:
        """Return a name for each of `operands`; variadic ones share a name, unless `attrs` determine their names."""
        names, _ = self.call_names(attrs)
        return [names[min(i, len(names) - 1)] for i in range(len(operands))]

    def default_output_names(self, count: int, attrs: Mapping[str, Any] | None = None) -> list[str]:
        """Return default names for `count` outputs: the first output names of the op; if it has fewer, its own name
        `count` times."""
        _, names = self.call_names(attrs)
        if not names or count > len(names):
            return [self.name] * count
        return list(names[:count])

    def split_call(
        self, operands: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (operands in the order of the signature, attributes) of a call with positional and keyword arguments.

        Raises:
            WeftError: if an operand is passed both by position and by name.
        """
        names = [o.name for o in self.operands if not o.variadic]
        by_name = {name: keywords[name] for name in names if name in keywords}
        if not by_name:
            return tuple(operands), dict(keywords)
        if twice := [name for name in by_name if names.index(name) < len(operands)]:
            raise WeftError(f"op {self.name}: operand {twice[0]} is passed twice, by position and by name")
        rest = (by_name.get(name) for name in names[len(operands) :])
        return (*operands, *rest), {k: v for k, v in keywords.items() if k not in by_name}

    def result_names(self, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Return the output names of a call with `operands`, without a `present_…` whose operand `past_…` is absent."""
        names, outputs = self.call_names(attrs)
        present = {name for name, v in zip(names, operands, strict=False) if v is not None}
        states = [n.replace("present", "past", 1) if n.startswith("present") else None for n in outputs]
        return tuple(name for name, past in zip(outputs, states, strict=True) if past is None or past in present)

    def pack_outputs(self, outputs: tuple[Any, ...]) -> Any:
        """Return the only element of `outputs`, or a named tuple of several. If an attribute determines their number,
        as for `split`, return `outputs` itself."""
        if self.returns_tuple:
            return outputs
        if len(outputs) == 1:
            return outputs[0]
        return results_class(self.name, self.output_names[: len(outputs)])(*outputs)


class OpCall:
    """One call of an op: its attributes and operands (types or values; None: absent; tuple: variadic) by name."""

    def __init__(self, op: Signature, operands: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        for i, o in enumerate(op.operands):
            operand = tuple(operands[i:]) if o.variadic else operands[i] if i < len(operands) else None
            setattr(self, o.name, operand)
        self.__dict__.update(attrs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no operand or attribute is called {name!r}, only {', '.join(self.__dict__)}")


def is_number(operand: object) -> bool:
    """Return whether `operand` is a real number of Python or numpy."""
    return isinstance(operand, numbers.Real)


@functools.cache
def results_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return the named tuple class for the outputs of the op called `name`: ``TopKResults(values, indices)``."""
    return namedtuple(results_class_name(name), fields)


def results_class_name(name: str) -> str:
    """Return the name of the named tuple class for the outputs of the op called `name`: TopKResults for top_k."""
    return "".join(word.capitalize() for word in name.split("_")) + "Results"
