"""Patterns: functions that call ops, traced into trees of terms that match nodes of a graph.

::

    def residual(x: Value, y: Value, weight: Param | None) -> tuple[Value, ...]:
        total = ops.add(x, y)
        return ops.rms_norm(total, weight, eps=ANY("eps")), total

- The parameters of the function are variables: ``Param`` matches parameters only, ``| None`` also an absent operand. A
  variable used twice must be the same value both times.
- Returned values may have readers outside the match; other values may not, because a rewrite removes them.
- The root, where matching starts, is the node that computes the first returned value.
- Attributes not mentioned must have their default; `ANY` captures one. Operands of commutative ops match in any order.
- `either` lists alternatives for a value; only the names in the alternative that matched are bound.
- `value`, `maybe` and `param` return variables that need not be parameters of the function, for helper functions.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.ir import Node, Op, Param, Value
from weft.ir.graph.operators import Operators
from weft.ir.op import Trait
from weft.ir.recipes.spelling import spell

from ..core.trace import Miss


@dataclass(frozen=True)
class ANY:
    """A wildcard for an attribute: matches any value for which `where` is true, and captures it as `name` unless "".

    `length` is the length that a tuple must have (0: any): for `sizes` of a split, its number of outputs.
    """

    name: str = ""
    where: Callable[[Any], bool] | None = None
    length: int = 0


def capture(*names: str) -> dict[str, Any]:
    """Return {name: ANY(name)} for `names`: keyword arguments of an op that match any value and capture it by name."""
    return {name: ANY(name) for name in names}


class Term(Operators["Term"]):
    """The base class of terms, the values of a pattern; an op called on terms returns terms."""

    # Above the 0 of graph values: an op on a term and a value emits a term.
    __emit_priority__ = 1

    def __emit__(
        self, op: Op, operands: tuple[Any, ...], attrs: dict[str, Any], name: str | Sequence[str] | None
    ) -> tuple[OutputTerm, ...]:
        apply = Apply(op, operands, _check_attrs(op, attrs))
        pieces = attrs.get("sizes")
        # The sizes are known only when a node matches, so `ANY.length` gives the number of outputs.
        if isinstance(pieces, ANY):
            count = pieces.length
        else:
            count = len(pieces) if isinstance(pieces, tuple) else len(op.result_names(operands))
        return tuple(OutputTerm(apply, i) for i in range(max(1, count)))


@dataclass(frozen=True, eq=False)
class Variable(Term):
    """A term that matches any value and binds it to `name`.

    `param` restricts it to parameters; `optional` also accepts an absent operand.
    """

    name: str
    param: bool
    optional: bool


# eq=False: hashed by identity. `attrs` is a dict, and equal parts of a pattern match different nodes.
@dataclass(frozen=True, eq=False)
class Apply:
    """A node in a pattern: matches a node with the op `op`, operands that match `operands`, and attributes `attrs`."""

    op: Op
    operands: tuple[Term | None, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class OutputTerm(Term):
    """Output `index` of the node `apply` in a pattern."""

    apply: Apply
    index: int


@dataclass(frozen=True, eq=False)
class Either(Term):
    """A term that matches a value if one of `terms` does, tried in order."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Binding(Term):
    """A term that matches a value if `term` does, and binds it to `name`."""

    name: str
    term: Term


def bind_name(name: str, term: Value) -> Value:
    """Return a term that matches whatever `term` does and passes the matched value to the rewrite as `name`."""
    return typing.cast(Value, Binding(name, typing.cast(Term, term)))  # patterns are typed as functions of values


def value(name: str) -> Value:
    """Return a variable that matches any value, like a parameter `name: Value` of the pattern's function."""
    return typing.cast(Value, Variable(name, param=False, optional=False))


def maybe(name: str) -> Value:
    """Return a variable that matches any value or an absent operand (bound as None)."""
    return typing.cast(Value, Variable(name, param=False, optional=True))


def param(name: str, *, optional: bool = False) -> Value:
    """Return a variable that matches a parameter, and also an absent operand if `optional`."""
    return typing.cast(Value, Variable(name, param=True, optional=optional))


def either(*terms: Value) -> Value:
    """Return a term that matches whatever one of `terms` does, tried in order."""
    return typing.cast(Value, Either(typing.cast(tuple[Term, ...], terms)))


def _check_attrs(op: Op, attrs: Mapping[str, Any]) -> dict[str, Any]:
    for name in attrs:
        if name not in op.attrs:
            raise ValueError(f"pattern: op {op.name} has no attribute {name!r}")
    for a in op.attrs.values():
        if a.required and a.name not in attrs:
            raise ValueError(f"pattern: op {op.name} needs attribute {a.name}, perhaps ANY({a.name!r})")
    full = {a.name: attrs.get(a.name, a.default) for a in op.attrs.values()}
    return {k: v if isinstance(v, ANY) else op.attrs[k].check(v, op.name) for k, v in full.items()}


@dataclass
class Match:
    """A successful match.

    bindings: name -> value of a variable, or captured attribute.
    nodes: node of the pattern -> node of the graph.
    exposed: the values that match the results of the pattern, in their order.
    """

    bindings: dict[str, Any] = field(default_factory=dict)
    nodes: dict[Apply, Node] = field(default_factory=dict)
    exposed: tuple[Value, ...] = ()

    def copy(self) -> Match:
        # Without `exposed`: it is set once the match is complete.
        return Match(dict(self.bindings), dict(self.nodes))


# (term, the value it has to match, the node that reads the value, the name of its operand)
Goal = tuple[Term | None, Value | None, Node, str]


class Pattern:
    """A pattern, traced by calling the function `fn` on variables; the docstring of the module has the grammar."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(fn) if hasattr(fn, "__annotations__") else {}
        self.variables = [_make_variable(name, hints.get(name, Value)) for name in inspect.signature(fn).parameters]
        traced = fn(*self.variables)
        results = traced if isinstance(traced, tuple) else (traced,)
        results = tuple(r.term if isinstance(r, Binding) else r for r in results)
        if not all(isinstance(r, OutputTerm) for r in results):
            raise ValueError(f"pattern {fn} must return results of ops, not its own parameters")
        self.results: tuple[OutputTerm, ...] = results
        self.root = self.results[0].apply

    def match(self, node: Node) -> Match | Miss:
        """Return the first match with `node` as the root; if there is none, the miss with the most matched nodes."""
        search = _Search()
        for state in search.match_node(self.root, node, Match(), ()):
            state.exposed = tuple(state.nodes[r.apply].outputs[r.index] for r in self.results)
            # A value with outside readers rules out this match only: another operand order may still fit.
            escape = self._find_escape(state)
            if escape is None:
                return state
            search.record_miss(state, node, escape)
        # Every path that yields no match has noted a miss.
        assert search.deepest is not None
        return search.deepest

    def _find_escape(self, match: Match) -> str | None:
        inside = set(match.nodes.values())
        for apply, node in match.nodes.items():
            for value in node.outputs:
                if value in match.exposed:
                    continue
                outside = [n for n in value.users if n not in inside]
                if outside:
                    return f"%{value.name} is also read by {outside[0].op.name} (%{outside[0].output.name})"
                if value.is_output:
                    return f"%{value.name}, made by {apply.op.name}, is an output of the graph"
        return None


def _make_variable(name: str, hint: Any) -> Variable:
    options = typing.get_args(hint) or (hint,)
    return Variable(name, Param in options and Value not in options, type(None) in options)


class _Search:
    """A backtracking search for a match; `deepest` is the miss with the most matched nodes so far."""

    def __init__(self) -> None:
        self.deepest: Miss | None = None

    def record_miss(self, state: Match, at: Node, reason: str, bonus: float = 0.0) -> None:
        miss = Miss(len(state.nodes) + bonus, f"{at.op.name} (%{at.output.name})", reason)
        # Of equally deep misses the first is kept: it comes from operands in the order of the pattern.
        if self.deepest is None or miss.depth > self.deepest.depth:
            self.deepest = miss

    def solve(self, goals: tuple[Goal, ...], state: Match) -> Iterator[Match]:
        if not goals:
            yield state
            return
        # `rest` is passed down and solved last, so that its failure backtracks into the choices made for `term`.
        (term, value, reader, role), rest = goals[0], goals[1:]
        if isinstance(term, Binding):
            bound = state.copy()
            bound.bindings[term.name] = value
            yield from self.solve(((term.term, value, reader, role), *rest), bound)
            return
        if isinstance(term, Either):
            for way in term.terms:
                yield from self.solve(((way, value, reader, role), *rest), state)
            return
        if isinstance(term, OutputTerm):
            yield from self.match_output(term, value, reader, role, rest, state)
            return
        if term is None or value is None:
            if isinstance(term, Variable) and not term.optional:
                self.record_miss(state, reader, f"operand {role} is absent")
            elif term is None and value is not None:
                self.record_miss(state, reader, f"operand {role} is %{value.name}, and the pattern has none")
            elif isinstance(term, Variable):
                yield from self.bind(term, None, reader, rest, state)
            else:
                yield from self.solve(rest, state)
            return
        assert isinstance(term, Variable)
        if term.param and not isinstance(value, Param):
            self.record_miss(state, reader, f"operand {role}, %{value.name}, is not a parameter")
            return
        yield from self.bind(term, value, reader, rest, state)

    def bind(
        self, term: Variable, value: Value | None, reader: Node, rest: tuple[Goal, ...], state: Match
    ) -> Iterator[Match]:
        bound = state.bindings.get(term.name, value)
        if term.name in state.bindings and bound is not value:
            names = " and ".join("nothing" if v is None else f"%{v.name}" for v in (bound, value))
            self.record_miss(state, reader, f"{term.name} is both {names}")
            return
        # A copy: other branches of the search must not see this binding.
        state = state.copy()
        state.bindings[term.name] = value
        yield from self.solve(rest, state)

    def match_output(
        self, term: OutputTerm, value: Value | None, reader: Node, role: str, rest: tuple[Goal, ...], state: Match
    ) -> Iterator[Match]:
        op = term.apply.op
        if value is None:
            self.record_miss(state, reader, f"operand {role} is absent, not made by {op.name}")
            return
        node = value.producer
        if node is None:
            kind = "a parameter" if isinstance(value, Param) else "a graph input"
            self.record_miss(state, reader, f"operand {role}, %{value.name}, is {kind}, not made by {op.name}")
        elif node.op is not op:
            one_step_back = any(v is not None and v.producer and v.producer.op is op for v in node.inputs)
            between = f" ({node.op.name} is between it and {op.name})" if one_step_back else ""
            # The bonus of half a node: the right op one step further back is a nearer miss than an unrelated op.
            reason = f"operand {role}, %{value.name}, is made by {node.op.name}, not by {op.name}{between}"
            self.record_miss(state, reader, reason, bonus=0.5 if one_step_back else 0.0)
        elif value.index != term.index:
            self.record_miss(state, reader, f"operand {role}, %{value.name}, is another output of {op.name}")
        elif state.nodes.get(term.apply, node) is not node:
            # Two results of one pattern node must come from one graph node.
            self.record_miss(state, reader, f"operand {role}, %{value.name}, is made by a second {op.name}")
        elif term.apply in state.nodes:
            # This node was matched before, through another reader.
            yield from self.solve(rest, state)
        else:
            yield from self.match_node(term.apply, node, state, rest)

    def match_node(self, pattern: Apply, node: Node, state: Match, rest: tuple[Goal, ...]) -> Iterator[Match]:
        if node.op is not pattern.op:
            self.record_miss(state, node, f"it is not {pattern.op.name}")
            return
        state = state.copy()
        state.nodes[pattern] = node
        for name, expected in pattern.attrs.items():
            value = node.attrs[name]
            if isinstance(expected, ANY):
                pieces = len(value) if expected.length else 0
                if (expected.where and not expected.where(value)) or pieces != expected.length:
                    self.record_miss(state, node, f"{name}={spell(value)} does not satisfy the pattern")
                    return
                bound = state.bindings.setdefault(expected.name, value) if expected.name else value
                if bound != value:
                    self.record_miss(state, node, f"{name}={spell(value)} differs from {spell(bound)} elsewhere")
                    return
            elif expected != value:
                self.record_miss(state, node, f"{name}={spell(value)}, not {spell(expected)}")
                return
        for operands in _list_operand_orders(pattern, node):
            # Operands beyond the signature belong to its last operand, which is variadic.
            last = len(node.op.operands) - 1
            goals = tuple((*pair, node, node.op.operands[min(i, last)].name) for i, pair in enumerate(operands))
            yield from self.solve(goals + rest, state)


def _list_operand_orders(pattern: Apply, node: Node) -> Iterator[Sequence[tuple[Term | None, Value | None]]]:
    # Nodes drop absent operands at the end, so either side may be shorter.
    pairs = list(itertools.zip_longest(pattern.operands, node.inputs))
    yield pairs
    if Trait.COMMUTATIVE in node.op.traits:
        # The swap is enough: commutative ops have two operands.
        yield list(zip(pattern.operands, reversed(node.inputs), strict=True))
