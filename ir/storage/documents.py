"""Untrusted files, read with limits: bytes, text, JSON, and the values in JSON by type.

Any file that weft reads may be truncated, edited or malicious. So only regular files are opened (reading a FIFO may
wait forever), the size, depth and number of values of JSON are limited (a list of lists takes 60 times the memory of
its text), and errors of `Record` name the file and the key of a value of the wrong type.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from ..errors import WeftError

MOST_BYTES = 256 << 20  # of a text file; the largest tokenizer.json is 35 MB
MOST_VALUES = 8_000_000  # of a document; 1 GB where all of them are objects
DEEPEST = 100  # nested lists and objects
MOST_DIGITS = 100  # of an integer; tokenizers write 10^30 for "no limit"
REQUIRED: Any = object()
_CUT = 60  # characters of a value that an error shows
_STRUCTURE = ",[{"  # each is followed by a value
_BLANKS = " \t\r\n"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"


def expand_home(path: str | Path) -> Path:
    """Return `path` with a leading ~ replaced by the home folder; raise WeftError if that is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise WeftError(f"{path}: there is no home folder to replace ~; write the full path") from None


def check_regular(path: Path) -> None:
    """Raise WeftError if `path` is a pipe, socket or device, whose reading may never end; it need not exist."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise WeftError(f"{path} is {_name_file_kind(mode)}, not a file: write its contents to a file")


def _name_file_kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def open_regular(path: Path) -> int:
    """Open the file at `path` for reading and return its file descriptor.

    Raises:
        WeftError: if it is not a regular file.
        OSError: if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a FIFO would wait for a writer
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else _name_file_kind(mode)
            raise WeftError(f"{path} is {kind}, not a file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of the file at `path`.

    Raises:
        WeftError: if it is not a regular file, has more than `most` bytes, or cannot be read.
    """
    try:
        with open(open_regular(path), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise WeftError(f"{path} has {size} bytes, but such a file may have at most {most}")
            return file.read(most)
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return the UTF-8 text in the file at `path`, with line ends \\n; WeftError as `read_bytes`, `decode_utf8`."""
    return decode_utf8(read_bytes(path, most), str(path))


def decode_utf8(raw: bytes, name: str) -> str:
    """Return the UTF-8 text in `raw`, with line ends \\n; WeftError, naming the file `name`, if it is not UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeftError(f"{name} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to the file `path` as indented JSON in UTF-8."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path, kind: type = dict, most: int = MOST_BYTES) -> Any:
    """Return the JSON value in the file at `path`, which must be an instance of `kind`: dict or list.

    Raises:
        WeftError: if the file cannot be read or has more than `most` bytes, or as `parse_json`.
    """
    return parse_json(read_bytes(path, most), str(path), kind)


def parse_json(raw: bytes | str, name: str, kind: type = dict, unique: bool = False, values: int = MOST_VALUES) -> Any:
    """Return the JSON value in `raw`, which must be an instance of `kind`; errors call the document `name`.

    With `unique` objects must not repeat a key, and numbers must not be NaN or infinite.

    Raises:
        WeftError: if it is not JSON, is nested too deep, is of another kind, or has more than `values` commas and
            opening brackets, which bound the number of values.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        # An upper bound, counted before Python creates any object; characters in strings count as well.
        if (count := sum(map(text.count, _STRUCTURE))) > values:
            raise WeftError(f"{count} values are more than the {values} that are allowed")
        value, end = parse_json_at(text, len(text) - len(text.lstrip(_BLANKS)), unique)
    except UnicodeDecodeError as error:
        raise WeftError(f"{name}: not valid JSON: byte {error.start} is not UTF-8") from None
    except (WeftError, json.JSONDecodeError) as error:
        raise WeftError(f"{name}: not valid JSON: {error}") from None
    if text[end:].strip(_BLANKS):
        raise WeftError(f"{name}: not valid JSON: more text follows the JSON value, at character {end}")
    if not isinstance(value, kind):
        raise WeftError(f"{name}: a JSON {_JSON_NAMES[kind]} was expected, not {_JSON_NAMES[type(value)]}")
    return value


def parse_json_at(text: str, start: int, unique: bool = False) -> tuple[Any, int]:
    """Return the JSON value that begins at offset `start` of `text`, and its end offset; `unique` as in `parse_json`.

    Raises:
        json.JSONDecodeError: if there is no JSON value.
        WeftError: if the value is nested too deep, has an integer of over 100 digits or half of a
            surrogate pair, or violates `unique`.
    """
    try:
        value, end = (_UNIQUE if unique else _DECODER).raw_decode(text, start)
    except RecursionError:
        raise WeftError(_TOO_DEEP) from None
    level = [value]
    # Level by level instead of recursively: the depth cannot exhaust Python's stack.
    for _ in range(DEEPEST):
        level = [item for outer in level for item in _nested_containers(outer)]
        if not level:
            break
    else:
        raise WeftError(_TOO_DEEP)
    # Only such an escape can produce half a pair; without one the slow check by encoding is skipped.
    if _HALF.search(text, start, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise WeftError(
                "a string has half of a surrogate pair (\\ud800 to \\udfff), which is not valid text"
            ) from None
    return value, end


def _nested_containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, (dict, list)):
                yield item


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise WeftError(f"the key {quote_value(twice)} is given twice")
    return unique_pairs


def _parse_integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise WeftError(f"an integer has {len(text)} digits, but at most {MOST_DIGITS} are allowed")
    return int(text)


def _reject_constant(text: str) -> float:
    raise WeftError(f"the value {text} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_int=_parse_integer)  # knows NaN and Infinity, which transformers writes
_UNIQUE = json.JSONDecoder(
    parse_int=_parse_integer, parse_constant=_reject_constant, object_pairs_hook=_reject_duplicates
)


# -- values by type

_JSON_NAMES: dict[Any, str] = {
    dict: "object", list: "array", str: "text", int: "integer", float: "number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def quote_value(value: Any) -> str:
    """Return the repr of `value` for an error message, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _CUT else f"{text[: _CUT - 1]}…"


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether `value` has the annotated type `hint`. An int is also a float; a bool is neither int nor float."""
    if hint is Any or hint is None:
        return hint is Any or value is None
    if isinstance(hint, type):  # the usual case
        number = hint is int or hint is float
        return isinstance(value, (int, float) if hint is float else hint) and not (number and isinstance(value, bool))
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, UnionType) or origin is Union:
        return any(matches_type(value, option) for option in arguments)
    if origin is list:
        if isinstance(value, list) and set(map(type, value)) <= {arguments[0]}:  # vocabularies have 100,000 items
            return True
        return isinstance(value, list) and all(matches_type(item, arguments[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and all(matches_type(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(matches_type(item, arguments[1]) for item in value.values())
    return isinstance(value, hint)


class Record:
    """A JSON object, or other metadata: the mapping `data`, whose values are read with a type check.

    Errors name the file `source` and the key. `prefix` precedes the key: the path to this object in the file, such as
    "rope.". `read_keys` has the keys that `get` was called with.
    """

    def __init__(self, source: str | Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.source, self.data, self.prefix, self.read_keys = str(source), data, prefix, set[str]()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the JSON object in the file at `path`; raise WeftError as `read_json` does."""
        return cls(path, read_json(path))

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def get(self, key: str, hint: Any, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, of the annotated type `hint`. For a missing or null key return None if `hint`
        includes None, else `default`.

        Raises:
            WeftError: if the value has another type, or is missing or null and there is no default.
        """
        self.read_keys.add(key)
        value = self.data.get(key)
        if value is None and not matches_type(None, hint):
            if default is not REQUIRED:
                return default
            if key not in self.data:
                raise WeftError(f"{self.source}: the key {self.prefix + key!r} is missing")
        if not matches_type(value, hint):
            raise self.build_type_error(key, f"it must be of type {name_type(hint)}")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the string at `key`; default and errors as in `get`."""
        return self.get(key, str, default)

    def integer(self, key: str, default: Any = REQUIRED, least: int | None = None, most: int | None = None) -> Any:
        """Return the integer at `key`, from `least` to `most` (both included, None: no bound); else as `get`."""
        value = self.get(key, int, default)
        if value is not default and least is not None and value < least:
            raise self.build_type_error(key, f"it must be at least {least}")
        if value is not default and most is not None and value > most:
            raise self.build_type_error(key, f"it must be at most {most}")
        return value

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the boolean at `key`; default and errors as in `get`."""
        return self.get(key, bool, default)

    def choice(self, key: str, choices: tuple[str, ...], default: Any = REQUIRED) -> Any:
        """Return the string at `key`, which must be one of `choices`; default and errors as in `get`."""
        value = self.text(key, default)
        if value is not default and value not in choices:
            *most, last = map(repr, choices)
            raise self.build_type_error(key, f"it must be {', '.join(most)} or {last}")
        return value

    def record(self, key: str, default: Any = REQUIRED) -> Record:
        """Return the object at `key` as a `Record`; `default` is a dict; errors as in `get`."""
        return Record(self.source, self.get(key, dict, default), f"{self.prefix}{key}.")

    def records(self, key: str, default: Any = REQUIRED) -> list[Record]:
        """Return the objects in the list at `key` as `Record`s; `default` is a list of dicts; errors as in `get`."""
        listed = self.get(key, list[dict[str, Any]], default)
        return [Record(self.source, item, f"{self.prefix}{key}.{i}.") for i, item in enumerate(listed)]

    def tokens(self, key: str) -> list[int]:
        """Return the token ids (≥ 0) at `key`: an id or a list of ids; [] if missing or null; else raise WeftError."""
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(matches_type(i, int) and i >= 0 for i in ids):
            raise self.build_type_error(key, "it must hold token ids")
        return ids

    def build_type_error(self, key: str, expected: str) -> WeftError:
        """Return the error that quotes the value of `key` and then `expected`, such as "it must be at least 1"."""
        return WeftError(f"{self.source}: {self.prefix}{key} is {quote_value(self.data.get(key))}, but {expected}")


def name_type(hint: Any) -> str:
    """Return the name of the annotated type `hint` for error messages, such as ``list of int`` or ``int or str``."""
    if isinstance(hint, UnionType):
        return " or ".join(map(name_type, get_args(hint)))
    if (origin := get_origin(hint)) is not None:
        return f"{name_type(origin)} of {name_type(get_args(hint)[-1])}"
    return "null" if hint is type(None) else str(hint.__name__)


def format_error(error: BaseException) -> str:
    """Return the message of `error`. If its ``__str__`` raises, as foreign code may, return a note of that."""
    try:
        return str(error)
    except (Exception, SystemExit, GeneratorExit) as failure:
        return f"(its text cannot be made: {type(failure).__name__})"
