from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ir import WeftError
from weft.ir.types import sizes
from weft.ir.types.sizes import Poly, Size, evaluate, floordiv, maximum, minimum, parse, sym

NAMES = ("batch", "past", "seq", "n_2")
b, n, s = sym("batch"), sym("past"), sym("seq")


def _grow(children: st.SearchStrategy[Size]) -> st.SearchStrategy[Size]:
    pair = st.tuples(children, children)
    return st.one_of(
        pair.map(lambda p: p[0] + p[1]),
        pair.map(lambda p: p[0] - p[1]),
        pair.map(lambda p: p[0] * p[1]),
        pair.map(lambda p: minimum(*p)),
        pair.map(lambda p: maximum(*p)),
        st.tuples(children, st.integers(1, 8)).map(lambda p: floordiv(*p)),
    )


SIZES: st.SearchStrategy[Any] = st.recursive(st.integers(-5, 9) | st.sampled_from(NAMES).map(sym), _grow, max_leaves=6)
BINDINGS = st.fixed_dictionaries({name: st.integers(1, 12) for name in NAMES})


@given(SIZES, SIZES, SIZES)
def test_ring(x: Any, y: Any, z: Any) -> None:
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) + z == x + (y + z)
    assert (x * y) * z == x * (y * z)
    assert x * (y + z) == x * y + x * z
    assert x + 0 == x == x * 1
    assert x - x == 0 == x * 0
    assert -(x * -1) == x
    assert hash(x + y) == hash(y + x)
    assert (
        sizes.sum_sizes((x, y, z)) == x + y + z and sizes.sum_sizes(()) == 0 and sizes.sum_sizes((2, x, x)) == 2 * x + 2
    )


@given(SIZES)
def test_constants_are_ints(x: Any) -> None:
    assert isinstance(x, int) or sizes.list_names(x)
    assert isinstance(x, int | Poly)


@given(SIZES)
def test_text_round_trips(x: Any) -> None:
    assert parse(str(x)) == x


@given(SIZES, SIZES, BINDINGS)
def test_evaluation_is_a_homomorphism(x: Any, y: Any, at: dict[str, int]) -> None:
    vx, vy = evaluate(x, at), evaluate(y, at)
    assert evaluate(x + y, at) == vx + vy
    assert evaluate(x - y, at) == vx - vy
    assert evaluate(x * y, at) == vx * vy
    assert evaluate(minimum(x, y), at) == min(vx, vy)
    assert evaluate(maximum(x, y), at) == max(vx, vy)
    if vy:
        assert evaluate(floordiv(x, y), at) == vx // vy


@given(SIZES, BINDINGS)
def test_partial_substitution(x: Any, at: dict[str, int]) -> None:
    half = {"batch": at["batch"], "seq": at["seq"]}
    assert evaluate(sizes.substitute(x, half), at) == evaluate(x, at)
    assert sizes.list_names(sizes.substitute(x, half)) <= sizes.list_names(x) - set(half)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (n + s, "past + seq"),
        ((b + s) * 2 - b - b, "2*seq"),
        (s * s * 3 - s + 1, "3*seq^2 - seq + 1"),
        (-s, "-seq"),
        (floordiv(b * s * 6, s * 2), "3*batch"),
        (floordiv(s + 1, 2), "floordiv(seq + 1, 2)"),
        (minimum(s, 4096), "min(4096, seq)"),
        (floordiv(s * 4, s * 4), "1"),
        (sizes.multiply_sizes((b, 3, s)), "3*batch*seq"),
    ],
)
def test_canonical_text(size: Size, text: str) -> None:
    assert str(size) == text
    assert parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "seq +", "2 seq", "(seq", "seq)", "min(seq)", "seq ** 2", "a ? b", "seq^", "seq^b"]
)
def test_bad_text(text: str) -> None:
    with pytest.raises(WeftError, match="size"):
        parse(text)


def test_evaluation_names_the_missing_sizes() -> None:
    with pytest.raises(WeftError, match=r"batch\*seq needs a value for seq") as e:
        evaluate(b * s, {"batch": 2, "past": 3})
    assert "batch," not in str(e.value)
