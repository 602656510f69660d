"""The Op record: all that weft knows of one operation.

An op is declared by its reference: a numpy function in float64 that *is* the definition. Its positional parameters are
the operands (``Array``, optional ``Array | None = None``, or variadic ``*xs: Array``), its keyword-only parameters are
the attributes with their types and defaults, its docstring is the documentation::

    @op(cases=[case(normal(2, 3, 8), normal(8), eps=1e-5)])
    def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6) -> Array: ...

What else there is to say reads one application of the op, a `Bound`: its operands and attributes, by name. ::

    @rms_norm.infer  # operand types -> output type(s), or None: that of the first operand; raise WeftError on a misfit
    def _(n: Bound) -> None: ...

    @rms_norm.cost  # operand types -> FLOPs, or a Cost; bytes default to every operand and output once
    def _(n: Bound) -> Size: ...

    @rms_norm.body  # values -> value(s) in simpler ops: specification and fallback
    def _(n: Bound) -> Value: ...

Calling an op on values emits a node at the insertion point of their graph, and returns its value, or a named tuple of
several. Operands may be given by name; arithmetic and comparisons also take numbers (`numbers` says what they become).
The same call on pattern variables builds a pattern, because any operand type may take over emission through
``__emit__``.
"""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import WeftError, unknown
from ..graph import Graph, Node, Value
from ..recipes.readers import Array
from ..types import Shape, TensorType, sizes
from ..types.dtypes import DType
from ..types.sizes import Poly, Size
from . import calls
from .attributes import Attr, type_name
from .cases import Case, Sample, bools, case, ints, normal, positive
from .checks import axis_of, broadcast, fixed, show, total, want

OPS: dict[str, Op] = {}


class Trait(enum.Enum):
    """Facts about an op that passes ask for."""

    ELEMENTWISE = "elementwise"  # output element depends on the operands' elements at the same (broadcast) place
    COMMUTATIVE = "commutative"  # the two operands may be swapped
    VIEW = "view"  # moves no data: the bytes of the operand in the same order
    COPY = "copy"  # moves data and computes nothing
    ROWWISE = "rowwise"  # every row (last axis) of the first operand is treated alone


@dataclass(frozen=True)
class Cost:
    """Work of one node, as polynomials: floating-point operations, bytes read, bytes written."""

    flops: Size
    read: Size
    written: Size

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.written + other.written)


@dataclass(frozen=True)
class Operand:
    name: str
    optional: bool = False
    variadic: bool = False


class Bound:
    """One application of an op: its attributes, and its operands (types or values; None if absent, a tuple if variadic)
    by name."""

    def __init__(self, op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        for i, o in enumerate(op.operands):
            found = tuple(operands[i:]) if o.variadic else operands[i] if i < len(operands) else None
            setattr(self, o.name, found)
        self.__dict__.update(attrs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no operand or attribute is called {name!r}, only {', '.join(self.__dict__)}")


TypeFn = Callable[[Bound], TensorType | tuple[TensorType, ...] | None]
CostFn = Callable[[Bound], Size | Cost]
BodyFn = Callable[[Bound], Value | tuple[Value, ...]]
NumbersFn = Callable[..., Value]  # the operands, and `name`
AnyTypeFn = TypeVar("AnyTypeFn", bound=TypeFn)
AnyCostFn = TypeVar("AnyCostFn", bound=CostFn)
AnyBodyFn = TypeVar("AnyBodyFn", bound=BodyFn)
AnyNumbersFn = TypeVar("AnyNumbersFn", bound=NumbersFn)


class Op:
    """One operation; see the module docstring. Create with the `op` decorator."""

    def __init__(self, reference: Callable[..., Any], outputs: str, traits: Sequence[Trait], cases: Sequence[Case]):
        self.name = reference.__name__.rstrip("_")
        self.doc = self.__doc__ = inspect.cleandoc(reference.__doc__ or "")
        self.reference = reference
        self.output_names = tuple(outputs.split())
        self.traits = frozenset(traits)
        self.cases = list(cases)
        self.module = reference.__module__
        self._infer: TypeFn | None = None
        self._cost: CostFn | None = None
        self._body: BodyFn | None = None
        self._numbers: NumbersFn | None = None
        hints = typing.get_type_hints(reference)
        self.several = hints.get("return") == tuple[Array, ...]  # as many results as an attribute says
        operands, attrs = [], []
        for p in inspect.signature(reference).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                attrs.append(Attr(p.name, hints[p.name], p.default))
            else:
                operands.append(Operand(p.name, p.default is None, p.kind is p.VAR_POSITIONAL))
        self.operands: tuple[Operand, ...] = tuple(operands)
        self.attrs: dict[str, Attr] = {a.name: a for a in attrs}
        self.__signature__ = calls.signature(self)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # -- declaration

    def infer(self, fn: AnyTypeFn) -> AnyTypeFn:
        """Register the type function; without one the output has the type of the first operand."""
        self._infer = fn
        return fn

    def cost(self, fn: AnyCostFn) -> AnyCostFn:
        """Register the cost function (FLOPs, or a whole Cost)."""
        self._cost = fn
        return fn

    def body(self, fn: AnyBodyFn) -> AnyBodyFn:
        """Register the definition in simpler ops."""
        self._body = fn
        return fn

    def numbers(self, fn: AnyNumbersFn) -> AnyNumbersFn:
        """Register what the op is where some operands are numbers; without it an op takes none."""
        self._numbers = fn
        return fn

    @property
    def takes_numbers(self) -> bool:
        return self._numbers is not None

    @property
    def has_body(self) -> bool:
        return self._body is not None

    # -- signature

    def operand_index(self, name: str) -> int:
        for i, o in enumerate(self.operands):
            if o.name == name:
                return i
        raise KeyError(f"op {self.name} has no operand {name}")

    def check_attrs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes in canonical form, defaults filled in.

        Raises:
            WeftError: on an unknown, missing or ill-typed attribute.
        """
        for name in given:
            if name not in self.attrs:
                known = ", ".join(self.attrs) or "none"
                raise WeftError(f"op {self.name} has no attribute {name!r}; it has {known}")
        full = {}
        for attr in self.attrs.values():
            if attr.required and attr.name not in given:
                raise WeftError(f"op {self.name} needs attribute {attr.name}")
            full[attr.name] = attr.check(given[attr.name], self.name) if attr.name in given else attr.default
        return full

    def check_operands(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Operands with trailing absent ones dropped.

        Raises:
            WeftError: if there are too few or too many.
        """
        given = list(values)
        while given and given[-1] is None:
            given.pop()
        if not given:
            raise WeftError(f"op {self.name} needs operands")
        variadic = bool(self.operands) and self.operands[-1].variadic
        needed = [o for o in self.operands if not o.optional and not o.variadic]
        if len(given) > len(self.operands) and not variadic:
            raise WeftError(f"op {self.name} takes at most {len(self.operands)} operands, not {len(given)}")
        for i, o in enumerate(self.operands):
            if o in needed and (i >= len(given) or given[i] is None):
                raise WeftError(f"op {self.name} needs operand {o.name}")
        if variadic and any(v is None for v in given[len(self.operands) - 1 :]):
            raise WeftError(f"op {self.name} takes no absent operands among {self.operands[-1].name}")
        return tuple(given)

    def types(self, operands: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Output types.

        Raises:
            WeftError: if the operand types do not fit.
        """
        try:
            found = self._infer(Bound(self, operands, attrs)) if self._infer else None
        except WeftError as e:
            raise WeftError(str(e) if str(e).startswith(f"{self.name}:") else f"{self.name}: {e}") from None
        if found is None:
            assert operands[0] is not None
            return (operands[0],)
        return found if isinstance(found, tuple) else (found,)

    # -- use

    def emit(self, *operands: Any, name: str | Sequence[str] | None = None, **attrs: Any) -> tuple[Value, ...]:
        """Apply the op to values of one graph and return all outputs.

        `name` hints at the names of the outputs: the last component, put behind the current scope.
        """
        operands, attrs = calls.bind(self, operands, attrs)
        given = self.check_operands(operands)
        if any(v is not None and not isinstance(v, Value) for v in given):
            return self._of_others(given, name, attrs)
        full = self.check_attrs(attrs)
        graph: Graph = next(v for v in given if v is not None).graph
        outs = self.types([None if v is None else v.type for v in given], full)
        hints = [name] * len(outs) if isinstance(name, str) else list(name or self.names_for(len(outs)))
        prefix = graph.insertion_scope
        names = [f"{prefix}.{h}" if prefix else h for h in hints]
        return graph.add_node(self, given, full, outs, names).outputs

    def __call__(self, *operands: Any, name: str | None = None, **attrs: Any) -> Value:
        """Apply the op and return its value; of several, a tuple, named where the op names its outputs.

        The annotation is that of most ops. `weft.ops` has precise ones; `emit` always returns a tuple.
        """
        value: Value = calls.packed(self, self.emit(*operands, name=name, **attrs))
        return value

    def _names(self, given: Sequence[Any]) -> list[str]:
        """The name of every operand in `given`."""
        names = [o.name for o in self.operands]
        return [names[min(i, len(names) - 1)] for i in range(len(given))]

    def _of_others(
        self, given: Sequence[Any], name: str | Sequence[str] | None, attrs: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Apply the op where some operands are numbers, or the variables of a pattern."""
        if any(map(calls.is_number, given)):
            return (self._with_numbers(given, name, attrs),)
        for operand, v in zip(self._names(given), given, strict=True):
            if v is not None and not isinstance(v, Value) and not hasattr(v, "__emit__"):
                raise WeftError(f"op {self.name}: operand {operand} is a {type(v).__name__}, not a value")
        other = next(v for v in given if v is not None and not isinstance(v, Value))
        return tuple(other.__emit__(self, given, attrs))

    def _with_numbers(self, given: Sequence[Any], name: str | Sequence[str] | None, attrs: Mapping[str, Any]) -> Value:
        if self._numbers is None:
            at = next(n for n, v in zip(self._names(given), given, strict=True) if calls.is_number(v))
            raise WeftError(
                f"op {self.name}: operand {at} is a number; arithmetic takes numbers, other ops take values"
            )
        if all(map(calls.is_number, given)):
            raise WeftError(f"op {self.name}: all operands are numbers, so Python can compute it; one must be a value")
        self.check_attrs(attrs)
        return self._numbers(*given, name=name)

    def names_for(self, count: int) -> list[str]:
        """Default names of `count` outputs."""
        if not self.output_names or count > len(self.output_names):
            return [self.name] * count
        return list(self.output_names[:count])

    def run_reference(self, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> tuple[Array, ...]:
        """The reference on arrays (floats in float64)."""
        found = self.reference(*operands, **attrs)
        return tuple(np.asarray(v) for v in (found if isinstance(found, tuple) else (found,)))

    def node_cost(self, node: Node) -> Cost:
        """The cost of one node of this op; every operand is read once unless the op says otherwise."""
        operands = [None if v is None else v.type for v in node.inputs]
        return self.cost_of(operands, [v.type for v in node.outputs], node.attrs)

    def cost_of(
        self, operands: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Mapping[str, Any]
    ) -> Cost:
        """The cost of the op from these types to these, with all its attributes."""
        written = total([t.bytes for t in outputs])
        read = total([t.bytes for t in operands if t is not None])
        if Trait.VIEW in self.traits:
            return Cost(0, 0, 0)
        if self._cost is None:
            computed = 0 if Trait.COPY in self.traits else total([t.elements for t in outputs])
            return Cost(computed, read, written)
        found = self._cost(Bound(self, operands, attrs))
        return found if isinstance(found, Cost) else Cost(found, read, written)

    def expand(self, node: Node) -> tuple[Value, ...]:
        """Emit the body in place of `node` (at the current insertion point) and return the values it defines."""
        if self._body is None:
            raise WeftError(f"op {self.name} has no body in simpler ops")
        found = self._body(Bound(self, node.inputs, node.attrs))
        return found if isinstance(found, tuple) else (found,)


def op(
    *, outputs: str = "", traits: Sequence[Trait] = (), cases: Sequence[Case] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function is its reference. `outputs` names the outputs, separated by spaces."""

    def declare(reference: Callable[..., Any]) -> Op:
        new = Op(reference, outputs, traits, cases)
        if new.name in OPS:
            raise ValueError(f"op {new.name} is declared twice: in {OPS[new.name].module} and {new.module}")
        OPS[new.name] = new
        return new

    return declare


def lookup(name: str) -> Op:
    """The op called `name`.

    Raises:
        WeftError: if there is none, with the nearest names.
    """
    from .. import ops as _all  # noqa: F401 - importing the package fills the registry

    if name not in OPS:
        raise unknown("op", name, OPS, "see `weft ops`")
    return OPS[name]


__all__ = [
    "OPS",
    "Array",
    "Attr",
    "Bound",
    "Case",
    "Cost",
    "DType",
    "Op",
    "Operand",
    "Poly",
    "Sample",
    "Shape",
    "Size",
    "TensorType",
    "Trait",
    "Value",
    "axis_of",
    "bools",
    "broadcast",
    "case",
    "fixed",
    "ints",
    "lookup",
    "normal",
    "op",
    "positive",
    "show",
    "sizes",
    "total",
    "type_name",
    "want",
]
