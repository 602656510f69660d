"""The parser of the text form that ``str(graph)`` returns. Errors name file, line and column."""

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
from ..lexer import Lexer, compile_language
from ..op import Attr, lookup
from ..recipes.readers import EMPTY, TensorReader
from ..recipes.recipe import REGISTRY, Recipe, order_fields
from ..storage.documents import MOST_DIGITS, parse_json_at
from ..types import TensorType, dtypes, sizes
from ..types.sizes import Size

MOST_BYTES = 16 << 20  # of the text form of a graph; the largest models take 3 MB
DEEPEST = 64  # nested lists and recipes; weft writes about a dozen levels
T = TypeVar("T")
_LANGUAGE = compile_language(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
      | (?P<value>%[A-Za-z0-9_.\-/]+)
      | (?P<name>[A-Za-z_][A-Za-z0-9_.\-/]*)
      | (?P<punct>[{}\[\]():,=^*+\-])"""
)


@functools.cache
def _list_fields(recipe: str) -> dict[str, Attr]:
    return {key: Attr(key, kind, MISSING) for key, kind in typing.get_type_hints(REGISTRY[recipe]).items()}


def parse(text: str, source: str = "<text>", reader: TensorReader = EMPTY) -> Graph:
    """Return the graph in `text`. `source` is the file name for errors; `reader` becomes the reader of the graph.

    Raises:
        WeftError: on a syntax or type error, as ``source:line:column: message``.
    """
    return _GraphParser(text, source).graph(reader)


def parse_step(text: str) -> Step:
    """Return the `Step` in `text`; raise WeftError on a syntax or type error."""
    parser = _GraphParser(text, "<step>")
    step = parser.step()
    if parser.token.kind != "end":
        parser.fail("unexpected text after the step")
    return step


# Graphs are linked lists, too deep to pickle: a step is copied and pickled as its text form.
copyreg.pickle(Step, lambda step: (parse_step, (step.text,)))


class _GraphParser(Lexer):
    def __init__(self, text: str, source: str) -> None:
        def where(at: int) -> str:
            return f"{source}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"

        super().__init__(text, _LANGUAGE, where, MOST_DIGITS)
        self.types: dict[str, tuple[TensorType, int]] = {}  # by spelling, with the number of its tokens
        self.depth = 0  # of nested lists and recipes

    def check(self, at: int, call: Callable[[], T]) -> T:
        """Return ``call()``; convert WeftError, ValueError and TypeError to a WeftError located at the offset `at`."""
        try:
            return call()
        except (WeftError, ValueError, TypeError) as e:
            self.fail(str(e), at)

    # -- values and types

    def enter_nesting(self) -> None:
        """Increment `depth`, which the caller decrements later; fail if it exceeds `DEEPEST`."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"values are nested more than {DEEPEST} deep", self.token.at)

    def parse_list(self, item: Callable[[], Any]) -> tuple[Any, ...]:
        self.enter_nesting()
        self.expect("[")
        items = []
        while not self.accept("]"):
            items.append(item())
            if self.token.text != "]":
                self.expect(",")
        self.depth -= 1
        return tuple(items)

    def tensor_type(self) -> TensorType:
        """Parse a type such as f32[batch, 8]. Layers repeat types, so each spelling is parsed only once."""
        at, first = self.token.at, self.pos
        end = self.text.find("]", at)
        spelled = self.text[at : end + 1]
        if spelled in self.types:
            kind, count = self.types[spelled]
            self.goto(self.pos + count)
            return kind
        name = self.expect_kind("name", "a dtype")
        dtype = self.check(at, lambda: dtypes.parse(name))
        kind = TensorType(dtype, self.parse_list(self.size))
        if self.tokens[self.pos - 1].at == end:  # a comment may hold a bracket
            self.types[spelled] = kind, self.pos - first
        return kind

    def attr(self) -> Any:
        """Parse an attribute value: number, string, true, false, none, list, dtype, step, recipe or size expression."""
        t = self.token
        if t.kind == "string":
            return self.check(t.at, lambda: parse_json_at(self.next().text, 0)[0])
        if t.text == "[":
            return self.parse_list(self.attr)
        if t.text == "{":
            return self.step()
        if t.kind == "name":
            after = self.tokens[self.pos + 1].text
            if after == "(" and t.text in REGISTRY:
                return self.recipe()
            # A single name; followed by an operator it begins a size, such as seq + 1.
            if after in (",", ")", "]"):
                self.next()
                words = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
                return words[t.text] if t.text in words else dtypes.ALL.get(t.text) or sizes.sym(t.text)
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
        """Parse a step (the graph of a recurrence at one token), in braces."""
        at, graph = self.token.at, Graph("step")
        values: dict[str, Value] = {}
        initial: dict[str, float] = {}
        tokens: list[str] = []
        self.enter_nesting()
        self.expect("{")
        while not self.accept("}"):
            start = self.token.at
            if kind := next((k for k in ("state", "token", "constant") if self.accept(k)), ""):
                name, type = self.typed_name("")
                self.define(values, start, name, self.check(start, partial(graph.add_input, name, type)))
                if kind == "state":
                    initial[name] = self.number() if self.accept("=") else 0.0
                elif kind == "token":
                    tokens.append(name)
            elif self.accept("next"):
                state = self.expect_kind("value", "a state such as %h")[1:]
                self.expect("=")
                if state not in initial:
                    self.fail(f"%{state} is not a state", start)
                self.check(start, partial(graph.add_output, NEXT + state, self.use(values, "")))
            elif self.accept("output"):
                name = self.expect_kind("name", "an output name")
                self.expect("=")
                self.check(start, partial(graph.add_output, name, self.use(values, "")))
            elif self.token.kind == "value":
                self.node(graph, values, "")
            else:
                self.fail(f"expected state, token, constant, next, output or a node, found {self.spelling}", start)
        self.depth -= 1
        return self.check(at, lambda: Step(graph, initial, tokens))

    def number(self) -> float:
        """Parse a float or inf, with an optional minus sign."""
        sign = -1.0 if self.accept("-") else 1.0
        text = self.expect("number", "inf").text
        return sign * float(text)

    def size(self) -> Size:
        """Parse a size expression, up to the comma or closing bracket after it, which is not consumed."""
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
            int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else self.check(start, lambda: sizes.parse(text))
        )

    def recipe(self) -> Recipe:
        at = self.token.at
        name = self.expect_kind("name", "a recipe")
        cls = REGISTRY.get(name)
        if cls is None:
            self.fail(f"unknown recipe {name!r}; known are {', '.join(REGISTRY)}", at)
        self.enter_nesting()
        self.expect("(")
        parameters, attrs = order_fields(cls), _list_fields(name)
        values: dict[str, Any] = {}
        while not self.accept(")"):
            if self.token.kind == "name" and self.tokens[self.pos + 1].text == "=":
                key = self.next().text
                self.expect("=")
            elif len(values) < len(parameters):
                key = parameters[len(values)].name
            else:
                self.fail(f"too many arguments for recipe {name}", self.token.at)
            start = self.token.at
            if key not in attrs or key in values:
                self.fail(f"recipe {name} takes no {'second ' if key in values else ''}argument {key!r}", start)
            value = self.attr()
            values[key] = self.check(start, partial(attrs[key].check, value, name))
            if self.token.text != ")":
                self.expect(",")
        self.depth -= 1
        missing = [f.name for f in parameters if f.name not in values and f.default is MISSING]
        if missing:
            self.fail(f"recipe {name} needs {', '.join(missing)}", at)
        return self.check(at, lambda: cls(**values))

    def json_value(self) -> Any:
        start = self.token.at
        try:
            value, end = parse_json_at(self.text, start)
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
        self.expect("graph")
        graph = Graph(self.expect_kind("name", "the name of the graph"), reader)
        values: dict[str, Value] = {}
        scope = ""
        self.expect("{")
        while not self.accept("}"):
            at = self.token.at
            if self.accept("meta"):
                key = self.expect_kind("name", "a key")
                self.expect("=")
                graph.meta[key] = self.json_value()
            elif self.accept("input"):
                name, type = self.typed_name("")
                key = self.expect_kind("name", "an input name") if self.accept("as") else name
                self.define(values, at, name, self.check(at, partial(graph.add_input, key, type, name)))
            elif self.accept("param"):
                name, type = self.typed_name("")
                self.expect("=")
                recipe = self.recipe()
                self.define(values, at, name, graph.add_param(name, type, recipe))
            elif self.accept("scope"):
                scope = self.expect_kind("name", "a scope")
                scope = "" if scope == "_" else scope
            elif self.accept("output"):
                name = self.expect_kind("name", "an output name")
                self.expect("=")
                value = self.use(values, "")
                self.check(at, partial(graph.add_output, name, value))
            elif self.token.kind == "value":
                self.node(graph, values, scope)
            else:
                self.fail(f"expected meta, input, param, scope, output or a node, found {self.spelling}", at)
        if self.token.kind != "end":
            self.fail("unexpected text after the graph", self.token.at)
        return graph

    def full_name(self, text: str, scope: str) -> str:
        return scope + text[1:] if text.startswith("%.") else text[1:]

    def typed_name(self, scope: str) -> tuple[str, TensorType]:
        name = self.full_name(self.expect_kind("value", "a value such as %x"), scope)
        self.expect(":")
        return name, self.tensor_type()

    def define(self, values: dict[str, Value], at: int, name: str, value: Value) -> None:
        if name in values:
            self.fail(f"value %{name} is defined twice", at)
        values[name] = value

    def use(self, values: dict[str, Value], scope: str) -> Value:
        at = self.token.at
        name = self.full_name(self.expect_kind("value", "a value such as %x"), scope)
        if name not in values:
            self.fail(f"value %{name} is not defined before its use", at)
        return values[name]

    def node(self, graph: Graph, values: dict[str, Value], scope: str) -> None:
        start = self.token.at
        outs = [self.typed_name(scope)]
        while self.accept(","):
            outs.append(self.typed_name(scope))
        self.expect("=")
        at = self.token.at
        name = self.expect_kind("name", "an op")
        op = self.check(at, lambda: lookup(name))
        self.expect("(")
        operands: list[Value | None] = []
        attrs: dict[str, Any] = {}
        while not self.accept(")"):
            if self.token.kind == "value":
                operands.append(self.use(values, scope))
            elif self.accept("_"):
                operands.append(None)
            else:
                key = self.expect_kind("name", "an operand or attribute")
                self.expect("=")
                attrs[key] = self.attr()
            if self.token.text != ")":
                self.expect(",")
        inputs = self.check(at, lambda: op.check_operands(operands))
        full = self.check(at, lambda: op.check_attrs(attrs))
        types = self.check(at, lambda: op.types([None if v is None else v.type for v in inputs], full))
        if len(types) != len(outs):
            self.fail(f"the number of outputs of op {name} is {len(types)}, but the statement names {len(outs)}", start)
        for (out, declared), inferred in zip(outs, types, strict=True):
            if declared != inferred:
                self.fail(f"%{out} is declared as {declared}, but op {name} gives {inferred}", start)
        node = graph.add_node(op, inputs, full, types, [n for n, _ in outs], scope)
        for (out, _), value in zip(outs, node.outputs, strict=True):
            self.define(values, start, out, value)
