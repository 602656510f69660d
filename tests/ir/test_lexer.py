"""Tokens, and the errors of a lexer."""

from __future__ import annotations

import pytest

from weft.ir.errors import WeftError
from weft.ir.lexer import Lexer, Token, compile_language

LANGUAGE = compile_language(r"(?P<number>\d+)|(?P<name>[a-z]+)|(?P<string>\"[a-z]*\")|(?P<punct>[(),])")


def lex(text: str, most: int = 99) -> Lexer:
    """Return a lexer that reports positions as ``at N``."""
    return Lexer(text, LANGUAGE, lambda at: f"at {at}", most)


def test_tokens_have_kind_text_and_offset() -> None:
    tokens = lex(" # first\nabs(12) # last").tokens
    assert tokens == [
        Token("name", "abs", 9),
        Token("punct", "(", 12),
        Token("number", "12", 13),
        Token("punct", ")", 15),
        Token("end", "the end", 23),
    ]
    assert [t.kind for t in lex("").tokens] == ["end"]


def test_the_end_token_is_never_passed() -> None:
    lexer = lex("a b")
    assert (lexer.peek().text, lexer.peek(9).kind) == ("b", "end")
    assert [lexer.next().text for _ in range(4)] == ["a", "b", "the end", "the end"]
    lexer.goto(1)
    assert lexer.token.text == "b"


def test_accept_consumes_names_and_punctuation_only() -> None:
    lexer = lex('12 "a" (')
    assert not lexer.accept("12")
    assert lexer.expect("number").text == "12"
    assert not lexer.accept('"a"')
    assert lexer.expect_kind("string", "a string") == '"a"'
    assert lexer.accept("(") and lexer.token.kind == "end"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f ? g", "at 2: unexpected character '?'"),
        ("f 12345", "at 2: a number of 5 characters"),
        ("f 1", "at 2: expected ) or name but found '1'"),
        ("f", "at 1: expected ) or name but found the end"),
    ],
)
def test_errors_name_the_position(text: str, message: str) -> None:
    def parse() -> None:
        lexer = lex(text, most=4)
        lexer.next()
        lexer.expect(")", "name")

    with pytest.raises(WeftError) as error:
        parse()
    assert str(error.value) == message


def test_expect_kind_describes_the_missing_token() -> None:
    with pytest.raises(WeftError, match="at 0: expected a size but found 'f'"):
        lex("f").expect_kind("number", "a size")
