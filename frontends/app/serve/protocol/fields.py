"""Fields of JSON requests: the base of their pydantic models, types of fields, errors as the API reports them."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError, ValidationError

from .errors import ApiError, bad_request

T = TypeVar("T")
MAX_FIELDS = 100  # per object, since pydantic collects an error for each unknown field
# Fields about an account, storage or hints: they have no effect.
IGNORED = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity"}
_KINDS = {"bool": "a boolean", "int": "an integer", "float": "a number", "str": "a string", "string": "a string"}
_KINDS |= {"list": "an array", "dict": "an object", "model": "an object", "NoneType": "null"}


def convert_error(error: ValidationError) -> ApiError:
    """Return pydantic's first error in a request as an ApiError."""
    first = error.errors(include_url=False)[0]
    kind, path, value, context = first["type"], first["loc"], first["input"], first.get("ctx", {})
    if path[-1:] == ("[key]",):
        path = path[:-2]  # an invalid key is an error of its object
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
    if kind not in ("dict_type", "model_type", "part"):
        name = re.sub(r"(\[\d+\])+$", "", name)  # an invalid string or number in an array is an error of the array
    match kind:
        case "missing":
            return bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        case "extra_forbidden":
            return bad_request(f"Unrecognized request argument supplied: {path[-1]}", name, "unknown_parameter")
        case "none_required":
            return bad_request(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
        case "literal_error" if isinstance(value, str):
            return bad_request(f"Invalid value: {value!r:.80}. Supported values are: {context['expected']}.", name)
        case "too_short":
            return bad_request(f"Invalid '{name}': the array is empty.", name)
        case "too_long":
            return bad_request(f"Invalid '{name}': at most {context['max_length']} items are allowed.", name)
    if expected := _KINDS.get(kind.removesuffix("_type"), context.get("expected")):
        actual = _KINDS[type(value).__name__]
        return bad_request(f"Invalid type for '{name}': expected {expected}, but got {actual}.", name, "invalid_type")
    reason, actual = first["msg"], "null" if value is None else f"{value!r:.80}"
    return bad_request(f"Invalid '{name or 'body'}': {reason[0].lower()}{reason[1:]}, but got {actual}.", name or None)


def field_error(key: str, kind: str | PydanticCustomError) -> ValidationError:
    """Return a pydantic error of type `kind` in the field `key`, for validators of the object that contains it."""
    return ValidationError.from_exception_data("", [{"type": kind, "loc": (key,), "input": None}])


class RequestObject(BaseModel):
    """An object of a request with strict types; null counts as an absent field, and `read` drops `ignored` fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    ignored: ClassVar[Set[str]] = IGNORED

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise PydanticCustomError("fields", f"expected at most {MAX_FIELDS} fields")
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in fields}

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Return the request in `data`; raise ApiError for unknown, missing, invalid or unsupported fields."""
        try:
            return cls.model_validate({key: value for key, value in data.items() if key not in cls.ignored})
        except ValidationError as error:
            raise convert_error(error) from None


def allow_only(*values: Any) -> PlainValidator:
    """Return a validator that rejects a field as unsupported unless it has one of `values`."""

    def check(value: Any) -> Any:
        if value not in values:
            raise PydanticKnownError("none_required")
        return value

    return PlainValidator(check)


def choose_type(chosen: Callable[[Any], bool], hint: Any, otherwise: Any) -> PlainValidator:
    """Return a validator that checks a value against type `hint` if `chosen(value)`, else against `otherwise`."""
    adapters = TypeAdapter(otherwise), TypeAdapter(hint)
    return PlainValidator(lambda value: adapters[chosen(value)].validate_python(value))


Items = Annotated[list[T], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[Items[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
