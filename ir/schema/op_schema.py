"""The schema of an op: the complete description of one operation.

An op is declared by its reference: a NumPy function in float64 that defines its results. Its positional parameters are
the operands (``Array``, optional ``Array | None = None``, or variadic ``*xs: Array``), its keyword-only parameters are
the attributes with their types and defaults, its docstring is the documentation::

    @op(cases=[case(normal(2, 3, 8), normal(8), eps=1e-5)])
    def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-6) -> Array: ...

The remaining declarations are functions of one call of the op, an `OpCall` with operands and attributes by name::

    @rms_norm.infer  # operand types -> output type(s), or None: that of the first operand; raise WeftError on a misfit
    def _(n: OpCall) -> None: ...

    @rms_norm.cost  # operand types -> a Cost; or FLOPs: then all operands are read once and all outputs written once
    def _(n: OpCall) -> Size: ...

    @rms_norm.body  # values -> output value(s), computed by simpler ops: for backends without this op
    def _(n: OpCall) -> Value: ...

    @ssd.states  # operand types -> the states that a node keeps between calls; none by default
    def _(n: OpCall) -> tuple[StateSpec, ...]: ...

    @scan.names  # attributes -> names of operands and outputs, for an op whose variadic operand has named parts
    def _(attrs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]: ...

Calling an op on values emits a node at the insertion point of their graph and returns its output, or a named tuple of
several. Operands may be passed by name; arithmetic and comparisons also accept Python numbers (see `numbers`). Calling
the op on pattern variables builds a pattern: the method ``__emit__`` of an operand builds the result.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import WeftError
from ..recipes.readers import Array
from ..registry import Registry
from ..types import TensorType
from ..types.sizes import Size, sum_sizes
from .cases import Case
from .signature import OpCall, Signature, is_number
from .states import StateSpec

V = TypeVar("V")  # the values that an op is called on


class Trait(enum.Enum):
    """Properties of ops, by which passes and analyses select them."""

    ELEMENTWISE = "elementwise"  # an output element depends on the operand elements at the same (broadcast) index
    COMMUTATIVE = "commutative"  # the two operands may be swapped
    VIEW = "view"  # moves no data: the bytes of the operand in the same order
    COPY = "copy"  # moves data and computes nothing
    ROWWISE = "rowwise"  # each row (last axis) of the first operand is processed independently
    ATTENTION = "attention"  # a softmax over keys: operands q, k and v, attribute heads
    RECURRENT = "recurrent"  # depends on all earlier tokens, through states of constant size
    NORM = "norm"  # the first output is the first operand, or a sum of two, normalized and times `weight`
    FUSED = "fused"  # computed by one kernel of a decode step; the body defines it in simpler ops
    COMPARES = "compares tokens"  # the result for a token depends on the other tokens of the forward pass


@dataclass(frozen=True)
class Cost:
    """The work of a node: floating-point operations, bytes read and bytes written; sizes may be symbolic."""

    flops: Size
    read: Size
    written: Size

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.written + other.written)


TypeFn = Callable[[OpCall], TensorType | tuple[TensorType, ...] | None]
CostFn = Callable[[OpCall], Size | Cost]
BodyFn = Callable[[OpCall], Any]  # a value, or several
StatesFn = Callable[[OpCall], tuple[StateSpec, ...]]
NumbersFn = Callable[..., Any]  # the operands, and `name`
NamesFn = Callable[[Mapping[str, Any]], tuple[tuple[str, ...], tuple[str, ...]]]
AnyTypeFn = TypeVar("AnyTypeFn", bound=TypeFn)
AnyCostFn = TypeVar("AnyCostFn", bound=CostFn)
AnyBodyFn = TypeVar("AnyBodyFn", bound=BodyFn)
AnyStatesFn = TypeVar("AnyStatesFn", bound=StatesFn)
AnyNumbersFn = TypeVar("AnyNumbersFn", bound=NumbersFn)
AnyNamesFn = TypeVar("AnyNamesFn", bound=NamesFn)


class OpSchema(Signature, Generic[V]):
    """One operation on values of type V (see the module docstring), declared by the decorator `weft.ir.op.op`."""

    def __init__(self, reference: Callable[..., Any], outputs: str, traits: Sequence[Trait], cases: Sequence[Case]):
        super().__init__(reference, tuple(outputs.split()))
        self.doc = self.__doc__ = inspect.cleandoc(reference.__doc__ or "")
        self.reference = reference
        self.traits = frozenset(traits)
        self.cases = list(cases)
        self.module = reference.__module__
        self._infer: TypeFn | None = None
        self._cost: CostFn | None = None
        self._body: BodyFn | None = None
        self._states: StatesFn | None = None
        self._numbers: NumbersFn | None = None
        self._names: NamesFn | None = None

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # -- declaration

    def infer(self, fn: AnyTypeFn) -> AnyTypeFn:
        """Register and return `fn`, the type function. Without one the output has the type of the first operand."""
        self._infer = fn
        return fn

    def cost(self, fn: AnyCostFn) -> AnyCostFn:
        """Register and return `fn`, whose result is FLOPs or a full `Cost`. Without one see `cost_of`."""
        self._cost = fn
        return fn

    def body(self, fn: AnyBodyFn) -> AnyBodyFn:
        """Register and return `fn`, which emits the op in simpler ops and returns the output, or a tuple of outputs."""
        self._body = fn
        return fn

    def states(self, fn: AnyStatesFn) -> AnyStatesFn:
        """Register and return `fn`, which maps the `OpCall` of a node to its `StateSpec`s; the default is none."""
        self._states = fn
        return fn

    def numbers(self, fn: AnyNumbersFn) -> AnyNumbersFn:
        """Register and return `fn`, which emits the op if an operand is a number. Without one, numbers are an error."""
        self._numbers = fn
        return fn

    def names(self, fn: AnyNamesFn) -> AnyNamesFn:
        """Register and return `fn`, which maps attributes to (operand names, output names). It is for ops whose
        signature does not have these names."""
        self._names = fn
        return fn

    def call_names(self, attrs: Mapping[str, Any] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return super().call_names(attrs) if self._names is None or attrs is None else self._names(attrs)

    @property
    def takes_numbers(self) -> bool:
        return self._numbers is not None

    @property
    def has_body(self) -> bool:
        return self._body is not None

    def types(self, operands: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Return the types of all outputs for operand types `operands` (None if absent) and complete `attrs`.

        Raises:
            WeftError: if operand types or attributes do not fit; the message begins with the name of the op.
        """
        try:
            inferred = self._infer(OpCall(self, operands, attrs)) if self._infer else None
        except WeftError as e:
            raise WeftError(str(e) if str(e).startswith(f"{self.name}:") else f"{self.name}: {e}") from None
        except ArithmeticError as e:  # from sizes or attributes that are 0 or too large
            raise WeftError(f"{self.name}: a size or attribute is out of range: {e}") from None
        if inferred is None:
            assert operands[0] is not None
            return (operands[0],)
        return inferred if isinstance(inferred, tuple) else (inferred,)

    # -- use

    def emit(self, *operands: Any, name: str | Sequence[str] | None = None, **attrs: Any) -> tuple[V, ...]:
        """Apply the op to values of one graph, or to pattern variables; return a tuple of all outputs.

        Operands may be Python scalars if the op `takes_numbers`. `name` suggests output names: one string for
        all outputs, or a string for each. The current scope becomes their prefix. WeftError if operands or
        attributes do not fit.
        """
        operands, attrs = self.split_call(operands, attrs)
        values = self.check_operands(operands)
        if any(map(is_number, values)):
            return (self._emit_with_numbers(values, name, attrs),)
        for operand, v in zip(self.operand_names(values), values, strict=True):
            if v is not None and not hasattr(v, "__emit__"):
                raise WeftError(f"op {self.name}: operand {operand} must be a value of a graph, not {type(v).__name__}")
        first = max((v for v in values if v is not None), key=lambda v: v.__emit_priority__)  # patterns before values
        return tuple(first.__emit__(self, values, attrs, name))

    def __call__(self, *operands: Any, name: str | None = None, **attrs: Any) -> V:
        """Apply the op as `emit` does; return its output, or a tuple of several (a named tuple if the op names them).
        The annotation fits most ops; the stubs of `weft.ops` have precise ones."""
        value: V = self.pack_outputs(self.emit(*operands, name=name, **attrs))
        return value

    def _emit_with_numbers(
        self, operands: Sequence[Any], name: str | Sequence[str] | None, attrs: Mapping[str, Any]
    ) -> V:
        if self._numbers is None:
            at = next(n for n, v in zip(self.operand_names(operands), operands, strict=True) if is_number(v))
            raise WeftError(
                f"op {self.name}: operand {at} is a number, which only arithmetic and comparisons accept; pass a value"
            )
        if all(map(is_number, operands)):
            raise WeftError(f"op {self.name}: all operands are numbers; one must be a value of a graph")
        self.check_attrs(attrs)
        value: V = self._numbers(*operands, name=name)
        return value

    def run_reference(self, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> tuple[Array, ...]:
        """Run the reference on arrays (floats as float64; None if absent) and return a tuple of its outputs."""
        outputs = self.reference(*operands, **attrs)
        return tuple(np.asarray(v) for v in (outputs if isinstance(outputs, tuple) else (outputs,)))

    def cost_of(
        self, operands: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Mapping[str, Any]
    ) -> Cost:
        """Return the cost of a call with these operand types (None if absent), output types and complete attributes.

        A VIEW costs nothing. By default operands are read and outputs written once, with one FLOP per output element,
        or none for a COPY.
        """
        written = sum_sizes([t.bytes for t in outputs])
        read = sum_sizes([t.bytes for t in operands if t is not None])
        if Trait.VIEW in self.traits:
            return Cost(0, 0, 0)
        if self._cost is None:
            computed = 0 if Trait.COPY in self.traits else sum_sizes([t.elements for t in outputs])
            return Cost(computed, read, written)
        cost = self._cost(OpCall(self, operands, attrs))
        return cost if isinstance(cost, Cost) else Cost(cost, read, written)

    def states_of(self, operands: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Return the specs of the states that a call with these operand types and attributes keeps; () if none."""
        return self._states(OpCall(self, operands, attrs)) if self._states else ()

    def emit_body(self, operands: Sequence[V | None], attrs: Mapping[str, Any]) -> tuple[V, ...]:
        """Emit the body for `operands`; return one value per output. WeftError if the op has no body."""
        if self._body is None:
            raise WeftError(f"op {self.name} has no body in simpler ops")
        outputs = self._body(OpCall(self, operands, attrs))
        return outputs if isinstance(outputs, tuple) else (outputs,)


OPS: Registry[OpSchema[Any]] = Registry("op", "weft.ir.ops", "see `weft ops`")
