"""Pipelines as text: ``"mha-to-gqa{kv_heads=4, method=svd}, default, -last-token-logits"``.

Passes are separated by commas, with arguments in braces. ``default`` means the default pipeline of the graph,
``decode-torch`` the pipeline of a decode step of target torch; ``-name`` removes every earlier pass of that name.
``fuse: a, b; cache: c`` groups passes into named phases.
Values are integers, floats, ``true``, ``false``, ``none``, plain words, "quoted text", and lists in brackets.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from weft.ir import WeftError
from weft.ir.lexer import Lexer, compile_language
from weft.ir.storage.documents import parse_json_at

from .base import Pass, lookup
from .pipeline import PIPELINES, Phase, Pipeline

_LANGUAGE = compile_language(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?![\w.]))
      | (?P<name>[A-Za-z_0-9./~][A-Za-z0-9_.\-/]*)
      | (?P<punct>[{}\[\],:;=\-])"""
)
_CONSTANTS = {"true": True, "false": False, "none": None}


def parse_pipeline(text: str, default: Pipeline | None = None) -> Pipeline:
    """Parse `text` into a pipeline; the word ``default`` means the pipeline `default` (None: an unknown pass).

    Raises:
        WeftError: on a syntax error (with its column), an unknown pass, or an argument that does not fit.
    """
    return _PipelineParser(text, default).parse()


class _PipelineParser(Lexer):
    def __init__(self, text: str, default: Pipeline | None) -> None:
        super().__init__(text, _LANGUAGE, lambda at: f"pipeline {text!r}, column {at + 1}")
        self.default = default

    def parse(self) -> Pipeline:
        phases = [Phase(self.parse_label(), ())]  # passes are added to the last one; empty ones are dropped at the end
        while self.token.kind != "end":
            if self.accept("-"):
                phases = self.remove_pass(phases)
            elif self.default is not None and self.accept("default"):
                phases += (*self.default.phases, Phase("", ()))
            elif self.token.text in PIPELINES:
                phases += (*PIPELINES[self.next().text].phases, Phase("", ()))
            else:
                phases[-1] = replace(phases[-1], passes=(*phases[-1].passes, self.parse_pass()))
            if self.accept(";"):
                phases.append(Phase(self.parse_label(), ()))
            elif self.token.kind != "end":
                self.expect(",", ";")
                if self.token.kind == "end":
                    self.fail("expected a pass after the comma")
        return Pipeline(tuple(phase for phase in phases if phase.passes))

    def parse_label(self) -> str:
        if self.peek().text != ":" or self.token.kind != "name":
            return ""
        name = self.next().text
        self.expect(":")
        return name

    def remove_pass(self, phases: list[Phase]) -> list[Phase]:
        """Parse the name of a pass, and return `phases` without passes of this name; fail if there are none."""
        removed = self.expect("name")
        remaining = [replace(ph, passes=tuple(p for p in ph.passes if p.name != removed.text)) for ph in phases]
        if remaining == phases:
            self.fail(
                f"there is no earlier pass {removed.text!r} to remove: write -name after the pass, as in "
                f"'default, -{removed.text.replace('_', '-')}', or without - to add it",
                removed.at,
            )
        return remaining

    def parse_pass(self) -> Pass:
        word = self.expect("name")
        if word.text == "default":
            self.fail("'default' has no meaning here: it depends on a graph, and none was passed", word.at)
        try:
            return lookup(word.text).make(self.parse_arguments())
        except WeftError as e:
            if str(e).startswith("pipeline "):
                raise
            raise WeftError(f"pipeline {self.text!r}, column {word.at + 1}: {e}") from None

    def parse_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if not self.accept("{"):
            return arguments
        while not self.accept("}"):
            if arguments:
                self.expect(",", "}")
            name = self.expect("name")
            if name.text in arguments:
                self.fail(f"argument {name.text!r} is given twice", name.at)
            self.expect("=")
            arguments[name.text] = self.parse_value()
        return arguments

    def parse_value(self) -> Any:
        if self.accept("["):
            items: list[Any] = []
            while not self.accept("]"):
                if items:
                    self.expect(",", "]")
                items.append(self.parse_scalar())
            return tuple(items)
        return self.parse_scalar("[")

    def parse_scalar(self, *otherwise: str) -> Any:
        """Parse and return one scalar; an error also lists `otherwise`, the tokens that the caller accepts instead."""
        token = self.expect("number", "string", "name", *otherwise)
        try:
            if token.kind == "string":
                return parse_json_at(token.text, 0)[0]
            if token.kind == "number" and re.fullmatch(r"[+-]?\d+", token.text):
                return int(token.text)
            if token.kind == "number":
                if math.isinf(number := float(token.text)):
                    raise ValueError("the number is too large")
                return number
        except (ValueError, WeftError) as e:
            self.fail(f"{token.text[:20]} cannot be read: {e}", token.at)
        return _CONSTANTS.get(token.text, token.text)
