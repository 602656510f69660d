"""Pipelines as text: ``"mha-to-gqa{kv_heads=4, method=svd}, default, -last-token-logits"``.

Passes are separated by commas, with arguments in braces. ``default`` stands for the default pipeline of the graph;
``-name`` takes out every pass of that name before it. ``fuse: a, b; cache: c`` groups passes into named phases.
Values are numbers, ``true``, ``false``, ``none``, plain words, "quoted text", and lists in brackets.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from weft.ir import WeftError
from weft.ir.documents import json_at

from .base import Pass, lookup
from .pipeline import Phase, Pipeline

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?![\w.]))
      | (?P<word>[A-Za-z_0-9./~][A-Za-z0-9_.\-/]*)
      | (?P<punct>[{}\[\],:;=\-])""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "none": None}


def parse_pipeline(text: str, default: Pipeline | None = None) -> Pipeline:
    """The pipeline that `text` spells; `default` is what the word ``default`` stands for.

    Raises:
        WeftError: on a syntax error (with its column), an unknown pass, or an argument that does not fit.
    """
    return _Parser(text, default).pipeline()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, text: str, default: Pipeline | None) -> None:
        self.text = text
        self.default = default
        self.tokens: list[_Token] = []
        at = 0
        while at < len(text):
            m = _TOKEN.match(text, at)
            if m is None:
                self.fail(f"unexpected character {text[at]!r}", at)
            if m.lastgroup != "space":
                self.tokens.append(_Token(str(m.lastgroup), m.group(), at))
            at = m.end()
        self.tokens.append(_Token("end", "the end", len(text)))
        self.pos = 0

    def fail(self, message: str, at: int) -> NoReturn:
        raise WeftError(f"pipeline {self.text!r}, column {at + 1}: {message}")

    @property
    def token(self) -> _Token:
        return self.tokens[self.pos]

    def take(self, *expected: str) -> _Token:
        """The next token, if it is of one of these kinds or texts."""
        token = self.token
        if expected and token.kind not in expected and token.text not in expected:
            what = token.text if token.kind == "end" else repr(token.text)
            self.fail(f"expected {' or '.join(expected)} but found {what}", token.at)
        self.pos = min(self.pos + 1, len(self.tokens) - 1)
        return token

    def accept(self, text: str) -> bool:
        if self.token.kind == "punct" and self.token.text == text:
            self.take()
            return True
        return False

    def pipeline(self) -> Pipeline:
        phases: list[Phase] = []
        name, passes = self.label(), list[Pass]()

        def close() -> None:
            if passes:
                phases.append(Phase(name, tuple(passes)))

        while self.token.kind != "end":
            if self.accept("-"):
                gone = self.take("word")
                if not self.remove(gone.text, phases, passes):
                    self.fail(
                        f"there is no pass {gone.text!r} before this to take out; a name behind - takes that pass out, "
                        f"as in 'default, -{gone.text.replace('_', '-')}'; without - it adds it",
                        gone.at,
                    )
            elif self.token.text == "default" and self.default is not None:
                self.take()
                close()
                phases += self.default.phases
                name, passes = "", []
            else:
                passes.append(self.one())
            if self.accept(";"):
                close()
                name, passes = self.label(), []
            elif self.token.kind != "end":
                self.take(",", ";")
                if self.token.kind == "end":
                    self.fail("expected a pass after the comma", self.token.at)
        close()
        return Pipeline(tuple(phase for phase in phases if phase.passes))

    def label(self) -> str:
        if self.tokens[min(self.pos + 1, len(self.tokens) - 1)].text != ":" or self.token.kind != "word":
            return ""
        name = self.take().text
        self.take(":")
        return name

    @staticmethod
    def remove(name: str, phases: list[Phase], passes: list[Pass]) -> bool:
        kept = [Phase(ph.name, tuple(p for p in ph.passes if p.name != name)) for ph in phases]
        left = [p for p in passes if p.name != name]
        found = kept != phases or left != passes
        phases[:], passes[:] = kept, left
        return found

    def one(self) -> Pass:
        word = self.take("word")
        if word.text == "default":
            self.fail("'default' has no meaning here: no graph says which pipeline is meant", word.at)
        try:
            cls = lookup(word.text)
            return cls.make(self.arguments())
        except WeftError as e:
            if str(e).startswith("pipeline "):
                raise
            raise WeftError(f"pipeline {self.text!r}, column {word.at + 1}: {e}") from None

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if not self.accept("{"):
            return given
        while not self.accept("}"):
            if given:
                self.take(",", "}")
            name = self.take("word")
            if name.text in given:
                self.fail(f"argument {name.text!r} is given twice", name.at)
            self.take("=")
            given[name.text] = self.value()
        return given

    def value(self) -> Any:
        if self.accept("["):
            items: list[Any] = []
            while not self.accept("]"):
                if items:
                    self.take(",", "]")
                items.append(self.one_value())
            return tuple(items)
        return self.one_value("[")

    def one_value(self, *otherwise: str) -> Any:
        """A value that is no list; what is none is told to be expected, or `otherwise`."""
        token = self.take("number", "string", "word", *otherwise)
        try:
            if token.kind == "string":
                return json_at(token.text, 0)[0]
            if token.kind == "number":
                return int(token.text) if re.fullmatch(r"[+-]?\d+", token.text) else _finite(token.text)
        except (ValueError, WeftError) as e:
            self.fail(f"{token.text[:20]} cannot be read: {e}", token.at)
        return _CONSTANTS.get(token.text, token.text)


def _finite(text: str) -> float:
    """The number `text`.

    Raises:
        ValueError: if no float is so large.
    """
    if math.isinf(number := float(text)):
        raise ValueError("the number is too large")
    return number
