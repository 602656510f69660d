"""Fields of a JSON request by type and range; every refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from .errors import ApiError, invalid

T = TypeVar("T", int, float)
_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "an object"}


class Fields:
    """The fields of an object, whose names begin with `prefix` in errors; null is as good as absent."""

    def __init__(self, data: dict[str, Any], prefix: str = "") -> None:
        self._data, self._prefix = data, prefix

    def name(self, key: str) -> str:
        """Return the full name of a field."""
        return f"{self._prefix}.{key}" if self._prefix else key

    def check_known(self, known: Collection[str]) -> None:
        """Raise ApiError if there are others than the `known` fields."""
        if unknown := next((key for key in self._data if key not in known), None):
            raise invalid(f"Unrecognized request argument supplied: {unknown}", self.name(unknown), "unknown_parameter")

    def given(self, key: str) -> bool:
        """Return whether a field has a value."""
        return self._data.get(key) is not None

    def raw(self, key: str) -> Any:
        """Return a field of any type, or None."""
        return self._data.get(key)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a field of a `kind`. Raises ApiError where it is another."""
        value = self._data.get(key)
        if value is None:
            return default
        good = isinstance(value, (int, float) if kind is float else kind)
        if not good or (isinstance(value, bool) and kind is not bool):
            raise self.wrong_type(key, _NAMES[kind])
        return value

    def need(self, key: str, kind: type) -> Any:
        """Return a field that must be there. Raises ApiError where it is not, or of another kind."""
        if self._data.get(key) is None:
            raise invalid(
                f"Missing required parameter: '{self.name(key)}'.", self.name(key), "missing_required_parameter"
            )
        return self.get(key, kind)

    def wrong_type(self, key: str, expected: str) -> ApiError:
        """Return the error of a field of another type than `expected`."""
        name, got = self.name(key), kind_of(self._data.get(key))
        return invalid(f"Invalid type for '{name}': expected {expected}, but got {got} instead.", name, "invalid_type")

    def within(self, key: str, low: T, high: T, default: T | None = None) -> Any:
        """Return a number between `low` and `high`, of their type. Raises ApiError where it is not."""
        value = self.get(key, type(low), default)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise invalid(f"Invalid '{self.name(key)}': {value} is not between {low} and {high}.", self.name(key))
        return value

    def one_of(self, key: str, values: Sequence[str], default: str | None = None) -> str | None:
        """Return one of `values`. Raises ApiError where it is another."""
        value: str | None = self.get(key, str, default)
        if value is not None and value not in values:
            known = ", ".join(map(repr, values))
            raise invalid(f"Invalid value: {value!r:.80}. Supported values are: {known}.", self.name(key))
        return value

    def only(self, key: str, *values: Any) -> None:
        """Raise ApiError if a field has another value than those: it asks for what this server cannot do."""
        if self.given(key) and self._data[key] not in values:
            raise invalid(
                f"'{self.name(key)}' is not supported by this server.", self.name(key), "unsupported_parameter"
            )

    def texts(self, key: str, most: int) -> list[str]:
        """Return a text, or at most `most`, none of them empty, as a list. Raises ApiError on anything else."""
        value = self._data.get(key)
        found = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.wrong_type(key, "a string or an array of strings")
        if len(found) > most:
            raise invalid(
                f"Invalid '{self.name(key)}': at most {most} strings, but {len(found)} given.", self.name(key)
            )
        if not all(found):
            raise invalid(f"Invalid '{self.name(key)}': it holds an empty string.", self.name(key))
        return found


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type, with its article."""
    return next((name for kind, name in _NAMES.items() if type(value) is kind), "null")
