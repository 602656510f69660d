"""Files from elsewhere: JSON and text within limits, values by type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weft.ir.errors import WeftError
from weft.ir.storage.documents import (
    DEEPEST,
    MOST_VALUES,
    Record,
    check_regular,
    expand_home,
    format_error,
    matches_type,
    parse_json,
    read_bytes,
    read_text,
)

BAD: dict[str, tuple[bytes | str, str]] = {
    "deep": ("[" * 100_000, "nested more than 100 deep"),
    "deep objects": ('{"a":' * 100_000, "nested more than 100 deep"),
    "a little too deep": ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "nested more than 100 deep"),
    "many": ("[" + "[]," * MOST_VALUES, "are more than the 8000000 that are allowed"),
    "long integer": ('{"a": ' + "9" * 5000 + "}", "an integer has 5000 digits"),
    "half a pair": (r'{"a": "\ud800"}', "half of a surrogate pair"),
    "raw half of a pair": (b'{"a": "\xed\xa0\x80"}', "byte 7 is not UTF-8"),
    "cut": ('{"a": 1', "not valid JSON: Expecting"),
    "two": ("{} {}", "more text follows the JSON value, at character 2"),
    "empty": ("", "not valid JSON: Expecting value"),
    "a list": ("[1]", "a JSON object was expected, not array"),
}


@pytest.mark.parametrize("name", BAD)
def test_json_beyond_the_limits_is_one_sentence(name: str) -> None:
    text, words = BAD[name]
    with pytest.raises(WeftError, match=words) as e:
        parse_json(text, "x.json")
    assert str(e.value).startswith("x.json: ") and len(str(e.value)) < 200


def test_json_within_the_limits() -> None:
    deep = '{"a":' * DEEPEST + "1" + "}" * DEEPEST
    assert parse_json(deep, "x.json")["a"]
    assert parse_json(r'{"a": "\ud83d\ude00", "b": 1000000000000000000000000000000}', "x") == {"a": "😀", "b": 10**30}
    assert parse_json('{"a": 1, "a": 2}', "x") == {"a": 2}
    with pytest.raises(WeftError, match="the key 'a' is given twice"):
        parse_json('{"a": 1, "a": 2}', "x", unique=True)
    assert parse_json('{"a": Infinity}', "x") == {"a": float("inf")}
    with pytest.raises(WeftError, match="the value Infinity is not a number of JSON"):
        parse_json('{"a": Infinity}', "x", unique=True)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(WeftError, match=f"{path} is {what}, not a file"):
            read_bytes(path)
    check_regular(tmp_path)
    check_regular(tmp_path / "nothing")
    with pytest.raises(WeftError, match="cannot be read: no such file"):
        read_bytes(tmp_path / "nothing")
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(WeftError, match="has 100 bytes, but such a file may have at most 99"):
        read_bytes(tmp_path / "large", 99)


def test_text_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é\r\nx\ry".encode())
    assert read_text(tmp_path / "a") == "é\nx\ny"
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(WeftError, match="is not UTF-8 text: byte 2 is 0xff"):
        read_text(tmp_path / "a")


def test_a_home_folder_that_nobody_knows() -> None:
    with pytest.raises(WeftError, match="~nobody_of_that_name/x: there is no home folder"):
        expand_home("~nobody_of_that_name/x")


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (True, float, False),
        (1.0, int, False),
        (None, int | None, True),
        ([1, 2], list[int], True),
        ([1, "x"], list[int], False),
        ({"a": 1}, list[int], False),
        ({"a": "b"}, dict[str, str], True),
        ({"a": 1}, dict[str, str], False),
        ((1, None), tuple[int | None, ...], True),
        ("x", Any, True),
    ],
)
def test_values_fit_types(value: Any, hint: Any, wanted: bool) -> None:
    assert matches_type(value, hint) is wanted


def test_records_name_file_and_key() -> None:
    record = Record(
        "x.json", {"n": 3, "s": "a", "o": {"n": True}, "l": [{"n": -1}], "eos": 2, "ids": [1, 2], "none": None}
    )
    assert (record.integer("n"), record.text("s"), record.integer("none", 7), record.integer("lost", 8)) == (
        3,
        "a",
        7,
        8,
    )
    assert (record.tokens("eos"), record.tokens("ids"), record.tokens("none")) == ([2], [1, 2], [])
    for call, words in (
        (lambda: record.integer("lost"), "x.json: the key 'lost' is missing"),
        (lambda: record.integer("none"), "x.json: none is None, but it must be of type int"),
        (lambda: record.text("n"), "x.json: n is 3, but it must be of type str"),
        (lambda: record.integer("n", least=4), "x.json: n is 3, but it must be at least 4"),
        (lambda: record.integer("n", most=2), "x.json: n is 3, but it must be at most 2"),
        (lambda: record.record("o").integer("n"), "x.json: o.n is True, but it must be of type int"),
        (lambda: record.records("l")[0].integer("n", least=0), "x.json: l.0.n is -1, but it must be at least 0"),
        (lambda: record.records("ids"), "x.json: ids is [1, 2], but it must be of type list of dict of Any"),
        (lambda: record.choice("s", ("b", "c")), "x.json: s is 'a', but it must be 'b' or 'c'"),
        (lambda: record.tokens("s"), "x.json: s is 'a', but it must hold token ids"),
        (lambda: Record("y", {"a": "x" * 500}).integer("a"), "…, but it must be of type int"),
    ):
        with pytest.raises(WeftError) as e:
            call()
        assert words in str(e.value) and len(str(e.value)) < 150


def test_exceptions_whose_str_fails_are_formatted() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert format_error(Silent()) == "(its text cannot be made: ValueError)"
