"""Parser of the text form that `printer` writes. Errors name file, line and column."""

from __future__ import annotations

import copyreg
import functools
import json
import math
import typing
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from typing import Any, TypeVar

from ..errors import WeftError
from ..graph import Graph, Value
from ..graph.step import NEXT, Step
from ..lexer import Lexer, language
from ..op import Attr, lookup
from ..recipes.readers import EMPTY, TensorReader
from ..recipes.recipe import REGISTRY, Recipe, call_order
from ..storage.documents import MOST_DIGITS, json_at
from ..types import TensorType, dtypes, sizes
from ..types.sizes import Size

MOST_BYTES = 16 << 20  # of a text; that of the largest models takes 3 MB
DEEPEST = 64  # lists and recipes in each other; what weft writes has a dozen
T = TypeVar("T")
_LANGUAGE = language(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
      | (?P<value>%[A-Za-z0-9_.\-/]+)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.\-/]*)
      | (?P<punct>[{}\[\]():,=^*+\-])"""
)


@functools.cache
def _fields(recipe: str) -> dict[str, Attr]:
    """The fields of a recipe, by name."""
    return {key: Attr(key, kind, MISSING) for key, kind in typing.get_type_hints(REGISTRY[recipe]).items()}


def parse(text: str, source: str = "<text>", reader: TensorReader = EMPTY) -> Graph:
    """The graph that `text` spells; `source` is what errors call it, `reader` what `source(...)` recipes refer to.

    Raises:
        WeftError: on a syntax or type error, as ``file:line:column: message``.
    """
    return _Parser(text, source).graph(reader)


def parse_step(text: str) -> Step:
    """The step that `text` spells.

    Raises:
        WeftError: on a syntax or type error.
    """
    parser = _Parser(text, "<step>")
    step = parser.step()
    if parser.token.kind != "end":
        parser.fail("unexpected text after the step")
    return step


# Graphs are linked lists, too deep to pickle: a step is copied and pickled as its text.
copyreg.pickle(Step, lambda step: (parse_step, (step.text,)))


class _Parser(Lexer):
    def __init__(self, text: str, source: str) -> None:
        def where(at: int) -> str:
            return f"{source}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"

        super().__init__(text, _LANGUAGE, where, MOST_DIGITS)
        self.types: dict[str, tuple[TensorType, int]] = {}  # by spelling, with how many tokens it takes
        self.depth = 0  # of lists and recipes in each other

    def checked(self, at: int, call: Callable[[], T]) -> T:
        """The result of `call`, with its errors placed at `at`."""
        try:
            return call()
        except (WeftError, ValueError, TypeError) as e:
            self.fail(str(e), at)

    # -- values and types

    def deeper(self) -> None:
        """Note that the value at hand is inside another one, or fail where too many are in each other."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"values are nested more than {DEEPEST} deep", self.token.at)

    def listed(self, item: Callable[[], Any]) -> tuple[Any, ...]:
        self.deeper()
        self.take("[")
        items = []
        while not self.accept("]"):
            items.append(item())
            if self.token.text != "]":
                self.take(",")
        self.depth -= 1
        return tuple(items)

    def tensor_type(self) -> TensorType:
        """A type, made once of each spelling: layers have the same types over and over."""
        at, first = self.token.at, self.pos
        end = self.text.find("]", at)
        spelled = self.text[at : end + 1]
        if spelled in self.types:
            kind, count = self.types[spelled]
            self.goto(self.pos + count)
            return kind
        name = self.of_kind("name", "a dtype")
        dtype = self.checked(at, lambda: dtypes.parse(name))
        kind = TensorType(dtype, self.listed(self.size))
        if self.tokens[self.pos - 1].at == end:  # a comment may hold a bracket
            self.types[spelled] = kind, self.pos - first
        return kind

    def attr(self) -> Any:
        """A literal: number, string, true, false, none, list, dtype, recipe call or size expression."""
        t = self.token
        if t.kind == "string":
            return self.checked(t.at, lambda: json_at(self.next().text, 0)[0])
        if t.text == "[":
            return self.listed(self.attr)
        if t.text == "{":
            return self.step()
        if t.kind == "name":
            after = self.tokens[self.pos + 1].text
            if after == "(" and t.text in REGISTRY:
                return self.recipe()
            # A name alone; followed by an operator it begins a size, such as seq + 1.
            if after in (",", ")", "]"):
                self.next()
                known = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
                return known[t.text] if t.text in known else dtypes.ALL.get(t.text) or sizes.sym(t.text)
        negative = t.text == "-"
        number = self.tokens[self.pos + negative]
        if (number.kind == "number" or number.text == "inf") and self.tokens[self.pos + negative + 1].text in ",)]":
            self.next()
            if negative:
                self.next()
            text = ("-" if negative else "") + number.text
            return int(text) if number.text.isdecimal() else float(text)
        return self.size()

    def step(self) -> Step:
        """The body of a recurrence, in braces."""
        at, graph = self.token.at, Graph("step")
        values: dict[str, Value] = {}
        initial: dict[str, float] = {}
        tokens: list[str] = []
        self.deeper()
        self.take("{")
        while not self.accept("}"):
            start = self.token.at
            if kind := next((k for k in ("state", "token", "constant") if self.accept(k)), ""):
                name, type = self.typed_name("")
                self.define(values, start, name, self.checked(start, partial(graph.add_input, name, type)))
                if kind == "state":
                    initial[name] = self.number() if self.accept("=") else 0.0
                elif kind == "token":
                    tokens.append(name)
            elif self.accept("next"):
                state = self.of_kind("value", "a state such as %h")[1:]
                self.take("=")
                if state not in initial:
                    self.fail(f"%{state} is no state", start)
                self.checked(start, partial(graph.add_output, NEXT + state, self.use(values, "")))
            elif self.accept("output"):
                name = self.of_kind("name", "an output name")
                self.take("=")
                self.checked(start, partial(graph.add_output, name, self.use(values, "")))
            elif self.token.kind == "value":
                self.node(graph, values, "")
            else:
                self.fail(f"expected state, token, constant, next, output or a node, found {self.found}", start)
        self.depth -= 1
        return self.checked(at, lambda: Step(graph, initial, tokens))

    def number(self) -> float:
        """A number, which may have a sign or be infinite."""
        sign = -1.0 if self.accept("-") else 1.0
        text = self.take("number", "inf").text
        return sign * float(text)

    def size(self) -> Size:
        """A size expression: everything up to the comma or bracket that ends it."""
        start, depth = self.token.at, 0
        while not (depth == 0 and self.token.text in (",", "]", ")")):
            token = self.next()
            if token.kind == "end":
                self.fail("expected a value", start)
            if token.text == "(":
                depth += 1
            elif token.text == ")":
                depth -= 1
        text = self.text[start : self.token.at].strip()
        return (
            int(text)
            if text.isdecimal() and len(text) <= MOST_DIGITS
            else self.checked(start, lambda: sizes.parse(text))
        )

    def recipe(self) -> Recipe:
        at = self.token.at
        name = self.of_kind("name", "a recipe")
        cls = REGISTRY.get(name)
        if cls is None:
            self.fail(f"unknown recipe {name!r}; known are {', '.join(REGISTRY)}", at)
        self.deeper()
        self.take("(")
        known, attrs = call_order(cls), _fields(name)
        given: dict[str, Any] = {}
        while not self.accept(")"):
            if self.token.kind == "name" and self.tokens[self.pos + 1].text == "=":
                key = self.next().text
                self.take("=")
            elif len(given) < len(known):
                key = known[len(given)].name
            else:
                self.fail(f"too many arguments for recipe {name}", self.token.at)
            start = self.token.at
            if key not in attrs or key in given:
                self.fail(f"recipe {name} takes no {'second ' if key in given else ''}argument {key!r}", start)
            value = self.attr()
            given[key] = self.checked(start, partial(attrs[key].check, value, name))
            if self.token.text != ")":
                self.take(",")
        self.depth -= 1
        missing = [f.name for f in known if f.name not in given and f.default is MISSING]
        if missing:
            self.fail(f"recipe {name} needs {', '.join(missing)}", at)
        return self.checked(at, lambda: cls(**given))

    def json_value(self) -> Any:
        start = self.token.at
        try:
            value, end = json_at(self.text, start)
        except json.JSONDecodeError as e:
            self.fail(f"not JSON: {e.msg}", e.pos)
        except WeftError as e:
            self.fail(f"not JSON: {e}", start)
        # JSON is read from the text itself: skip the tokens that it covers.
        while self.token.at < end and self.token.kind != "end":
            self.next()
        return value

    # -- statements

    def graph(self, reader: TensorReader) -> Graph:
        self.take("graph")
        graph = Graph(self.of_kind("name", "the name of the graph"), reader)
        values: dict[str, Value] = {}
        scope = ""
        self.take("{")
        while not self.accept("}"):
            at = self.token.at
            if self.accept("meta"):
                key = self.of_kind("name", "a key")
                self.take("=")
                graph.meta[key] = self.json_value()
            elif self.accept("input"):
                name, type = self.typed_name("")
                key = self.of_kind("name", "an input name") if self.accept("as") else name
                self.define(values, at, name, self.checked(at, partial(graph.add_input, key, type, name)))
            elif self.accept("param"):
                name, type = self.typed_name("")
                self.take("=")
                recipe = self.recipe()
                self.define(values, at, name, graph.add_param(name, type, recipe))
            elif self.accept("scope"):
                scope = self.of_kind("name", "a scope")
                scope = "" if scope == "_" else scope
            elif self.accept("output"):
                name = self.of_kind("name", "an output name")
                self.take("=")
                value = self.use(values, "")
                self.checked(at, partial(graph.add_output, name, value))
            elif self.token.kind == "value":
                self.node(graph, values, scope)
            else:
                self.fail(f"expected meta, input, param, scope, output or a node, found {self.found}", at)
        if self.token.kind != "end":
            self.fail("unexpected text after the graph", self.token.at)
        return graph

    def full_name(self, text: str, scope: str) -> str:
        return scope + text[1:] if text.startswith("%.") else text[1:]

    def typed_name(self, scope: str) -> tuple[str, TensorType]:
        name = self.full_name(self.of_kind("value", "a value such as %x"), scope)
        self.take(":")
        return name, self.tensor_type()

    def define(self, values: dict[str, Value], at: int, name: str, value: Value) -> None:
        if name in values:
            self.fail(f"value %{name} is defined twice", at)
        values[name] = value

    def use(self, values: dict[str, Value], scope: str) -> Value:
        at = self.token.at
        name = self.full_name(self.of_kind("value", "a value such as %x"), scope)
        if name not in values:
            self.fail(f"value %{name} is not defined before its use", at)
        return values[name]

    def node(self, graph: Graph, values: dict[str, Value], scope: str) -> None:
        start = self.token.at
        outs = [self.typed_name(scope)]
        while self.accept(","):
            outs.append(self.typed_name(scope))
        self.take("=")
        at = self.token.at
        name = self.of_kind("name", "an op")
        op = self.checked(at, lambda: lookup(name))
        self.take("(")
        operands: list[Value | None] = []
        attrs: dict[str, Any] = {}
        while not self.accept(")"):
            if self.token.kind == "value":
                operands.append(self.use(values, scope))
            elif self.accept("_"):
                operands.append(None)
            else:
                key = self.of_kind("name", "an operand or attribute")
                self.take("=")
                attrs[key] = self.attr()
            if self.token.text != ")":
                self.take(",")
        inputs = self.checked(at, lambda: op.check_operands(operands))
        full = self.checked(at, lambda: op.check_attrs(attrs))
        types = self.checked(at, lambda: op.types([None if v is None else v.type for v in inputs], full))
        if len(types) != len(outs):
            self.fail(f"op {name} defines {len(types)} values, not {len(outs)}", start)
        for (out, declared), inferred in zip(outs, types, strict=True):
            if declared != inferred:
                self.fail(f"%{out} is declared {declared} but {name} makes {inferred}", start)
        node = graph.add_node(op, inputs, full, types, [n for n, _ in outs], scope)
        for (out, _), value in zip(outs, node.outputs, strict=True):
            self.define(values, start, out, value)
