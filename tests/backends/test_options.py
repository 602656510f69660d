"""Options of targets: flags, types, checks of values, and the passes that they request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from weft.backends.options import (
    BlockOptions,
    CacheOptions,
    Options,
    list_cache_passes,
    make_no_effect_error,
    option,
)
from weft.ir import WeftError


@dataclass(frozen=True)
class Example(Options):
    """Options of every kind."""

    form: Literal["", "small", "large"] = option("", "Choose a form")
    up_to: int = option(3, "Count up to this number")
    loud: bool = option(False, "Say more")


OPTIONS = Example.list_all()


def test_options_are_listed_with_flags_and_types() -> None:
    assert [o.flag for o in OPTIONS.values()] == ["--form", "--up-to", "--loud"]
    assert [o.type_text for o in OPTIONS.values()] == ["small | large", "int", "bool"]
    assert [o.is_choice for o in OPTIONS.values()] == [True, False, False]
    assert [o.choices for o in OPTIONS.values()] == [("small", "large"), (), ()]
    assert (OPTIONS["up_to"].default, OPTIONS["up_to"].help) == (3, "Count up to this number")


@pytest.mark.parametrize(("name", "value"), [("form", ""), ("form", "large"), ("up_to", 7), ("loud", True)])
def test_fitting_value_is_accepted(name: str, value: Any) -> None:
    assert OPTIONS[name].check(value) == value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("form", "medium", "--form 'medium' is unknown: choose small or large"),
        ("up_to", "many", "up_to"),
        ("loud", "very", "loud"),
    ],
)
def test_other_value_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        OPTIONS[name].check(value)


def test_cache_dtype_requests_quantize_cache() -> None:
    assert list_cache_passes("int8") == {"cache_dtype": "quantize-cache{bits=8}"}
    assert list_cache_passes("int4") == {"cache_dtype": "quantize-cache{bits=4}"}
    assert list_cache_passes("") == list_cache_passes("fp8") == {}
    assert CacheOptions("int4").passes() == list_cache_passes("int4") and CacheOptions().passes() == {}


def test_keep_blocks_requests_its_pass() -> None:
    assert BlockOptions("head").passes() == {"keep_blocks": "keep-blocks{which=head}"}
    assert BlockOptions().passes() == {}


def test_option_without_effect_is_an_error_with_the_reason() -> None:
    error = make_no_effect_error("--arithmetic f32", "no weights are quantized")
    assert str(error) == "--arithmetic f32 has no effect here, so leave it out: no weights are quantized"
