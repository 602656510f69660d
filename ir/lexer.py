"""The lexer of weft's small languages: IR text, pipelines, sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from .errors import WeftError

BLANK = r"[ \t\r\n]+|\#[^\n]*"  # separates tokens: white space, comments to the end of the line


class Token(NamedTuple):
    """A token: its `kind` (the name of a group in the pattern), its characters `text`, and its offset `at`."""

    kind: str
    text: str
    at: int


def compile_language(pattern: str) -> re.Pattern[str]:
    """Return the compiled `pattern` for a `Lexer`: an alternation of named groups (re.VERBOSE), one per token kind."""
    # The blank after a token is part of its match: one match per token.
    return re.compile(rf"(?:{pattern})(?:{BLANK})*", re.VERBOSE)


class Lexer:
    """A lexer of `text`: `token` is the current token, at first the first one.

    `pattern` comes from `compile_language`. `where` formats a position in `text` for errors (``file:3:7``). A number
    token may have at most `most` characters.
    """

    def __init__(self, text: str, pattern: re.Pattern[str], where: Callable[[int], str], most: int = 1 << 62) -> None:
        self.text, self.where = text, where
        self.tokens: list[Token] = []
        blank = re.match(rf"(?:{BLANK})*", text)
        at = blank.end() if blank else 0
        for match in pattern.finditer(text, at):
            start, end = match.span()
            if start != at:
                break
            kind = str(match.lastgroup)
            token = match[kind]
            if kind == "number" and len(token) > most:
                self.fail(f"a number of {len(token)} characters", at)
            self.tokens.append(Token(kind, token, at))
            at = end
        if at != len(text):
            self.fail(f"unexpected character {text[at]!r}", at)
        self.tokens.append(Token("end", "the end", len(text)))
        self.pos = 0
        self.token = self.tokens[0]  # always the token at `pos`

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise WeftError with `message` and the location of the offset `at`, by default that of the current token."""
        raise WeftError(f"{self.where(self.token.at if at is None else at)}: {message}")

    def goto(self, pos: int) -> None:
        """Make the token with index `pos` the current one."""
        self.pos = pos
        self.token = self.tokens[pos]

    def peek(self, count: int = 1) -> Token:
        """Return the token `count` tokens after the current one, or the end token if there are fewer."""
        return self.tokens[min(self.pos + count, len(self.tokens) - 1)]

    def next(self) -> Token:
        """Return the current token and advance to the next one; the end token is never passed."""
        token = self.token
        if token.kind != "end":
            self.goto(self.pos + 1)
        return token

    def accept(self, text: str) -> bool:
        """Consume the current token if it is the name or punctuation `text`; return whether it was."""
        if self.token.text == text and self.token.kind in ("punct", "name"):
            self.next()
            return True
        return False

    def expect(self, *expected: str) -> Token:
        """Consume and return the current token; fail unless its kind, or text of a name or punct, is in `expected`."""
        token = self.token
        if token.kind not in expected and not (token.kind in ("punct", "name") and token.text in expected):
            self.fail(f"expected {' or '.join(expected)} but found {self.spelling}")
        return self.next()

    def expect_kind(self, kind: str, description: str) -> str:
        """Consume the current token and return its text; fail with `description` unless it is of `kind`."""
        if self.token.kind != kind:
            self.fail(f"expected {description} but found {self.spelling}")
        return self.next().text

    @property
    def spelling(self) -> str:
        """The current token as errors quote it: its repr, or `the end`."""
        return self.token.text if self.token.kind == "end" else repr(self.token.text)
