"""Sizes of tensor axes: integers, or polynomials with integer coefficients over named sizes.

``batch``, ``seq`` and ``past + seq`` are sizes. Polynomials are kept expanded: ``(a + b) * 2 == 2*b + 2*a``. A ``min``,
a ``max`` or a division with a remainder becomes an opaque term (`SizeCall`) that can be printed, parsed and evaluated.
A size without names is always an ``int``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import WeftError
from ..lexer import Lexer, compile_language


@dataclass(frozen=True)
class SizeCall:
    """A term ``min(a, b)``, ``max(a, b)`` or ``floordiv(a, b)`` of symbolic sizes, which is not simplified."""

    fn: str
    args: tuple[Size, ...]

    def __str__(self) -> str:
        return f"{self.fn}({', '.join(map(str, self.args))})"


MOST_TERMS = 512  # of a polynomial; sizes in real models have a handful
MOST_DEGREE = 64
MOST_BITS = 512  # of a number in the text of a size
MOST_NESTED = 64  # parentheses in the text of a size

Atom = str | SizeCall
Monomial = tuple[tuple[Atom, int], ...]


@dataclass(frozen=True)
class Poly:
    """A non-constant polynomial: `terms` are (monomial, non-zero coefficient) pairs, sorted by `_sort_key`."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Size) -> Size:
        if not isinstance(other, int | Poly):
            return NotImplemented  # a `Value`: no op converts sizes to values
        if other == 0:
            return self
        sums = dict(self.terms)
        for mono, c in _list_terms(other):
            sums[mono] = sums.get(mono, 0) + c
        return _build_size(sums)

    def __mul__(self, other: Size) -> Size:
        if not isinstance(other, int | Poly):
            return NotImplemented
        if isinstance(other, int):
            if other == 1:
                return self
            return Poly(tuple((mono, c * other) for mono, c in self.terms)) if other else 0
        # Checked before the loops, which would take long for sizes that only a damaged file holds.
        if len(self.terms) * len(other.terms) > MOST_TERMS**2:
            raise WeftError(_TOO_LARGE)
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                mono = _multiply_monomials(m1, m2)
                out[mono] = out.get(mono, 0) + c1 * c2
        return _build_size(out)

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        if not isinstance(other, int | Poly):
            return NotImplemented
        return self + (-other)

    def __rsub__(self, other: int) -> Size:
        return -self + other

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __reduce__(self) -> tuple[type[Poly], tuple[object, ...]]:
        return Poly, (self.terms,)  # without the hash: string hashes differ from process to process

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        text = ""
        for mono, c in self.terms:
            factors = [str(atom) + (f"^{p}" if p != 1 else "") for atom, p in mono]
            if abs(c) != 1 or not factors:
                factors.insert(0, str(abs(c)))
            sign = "-" if c < 0 else "+"
            text += (f" {sign} " if text else ("-" if c < 0 else "")) + "*".join(factors)
        return text

    __repr__ = __str__


Size = int | Poly
_TOO_LARGE = f"a size has more than {MOST_TERMS} terms, or a degree above {MOST_DEGREE}: no model's sizes grow so"


def _list_terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    return size.terms if isinstance(size, Poly) else (((), size),)


@functools.lru_cache(maxsize=4096)  # the sizes of a model have few monomials, repeated in every layer
def _multiply_monomials(m1: Monomial, m2: Monomial) -> Monomial:
    powers = dict(m1)
    for atom, p in m2:
        powers[atom] = powers.get(atom, 0) + p
    # Sorted by text: an atom is a str or a `SizeCall`, and Python cannot compare the two.
    return tuple(sorted(powers.items(), key=lambda t: str(t[0])))


@functools.lru_cache(maxsize=4096)
def _sort_key(mono: Monomial) -> tuple[int, str]:
    return -sum(p for _, p in mono), str(mono)


def _build_size(terms: Mapping[Monomial, int]) -> Size:
    nonzero = [term for term in terms.items() if term[1]]
    if not nonzero:
        return 0
    if len(nonzero) == 1 and not nonzero[0][0]:
        return nonzero[0][1]
    # Sorted: one spelling per polynomial.
    order = sorted(nonzero, key=lambda term: _sort_key(term[0]))
    if len(order) > MOST_TERMS or -_sort_key(order[0][0])[0] > MOST_DEGREE:
        raise WeftError(_TOO_LARGE)
    return Poly(tuple(order))


@functools.lru_cache(maxsize=1024)
def sym(name: str) -> Poly:
    """Return the symbolic size called `name`."""
    return Poly(((((name, 1),), 1),))


def _build_call(fn: str, *args: Size) -> Poly:
    return Poly(((((SizeCall(fn, args), 1),), 1),))


def floordiv(a: Size, b: Size) -> Size:
    """Return ``a // b``, as an opaque term unless both are integers or equal, or `b` is one term that divides each term
    of `a`. WeftError if `b` is 0."""
    if isinstance(b, int) and b == 0:
        raise WeftError(f"the size {a} is divided by 0")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if a == b:
        return 1
    (mono_b, c_b), *rest = _list_terms(b)
    # A divisor of one term divides `a` if it divides each term of `a`; other divisors stay opaque.
    if not rest:
        out: dict[Monomial, int] = {}
        for mono, c in _list_terms(a):
            powers = dict(mono)
            if c % c_b or any(powers.get(atom, 0) < p for atom, p in mono_b):
                return _build_call("floordiv", a, b)
            for atom, p in mono_b:
                powers[atom] -= p
            out[tuple((atom, p) for atom, p in powers.items() if p)] = c // c_b
        return _build_size(out)
    return _build_call("floordiv", a, b)


def minimum(a: Size, b: Size) -> Size:
    """Return the smaller of two sizes: an opaque term ``min(a, b)`` if one is symbolic and they differ."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    # Sorted: min(a, b) and min(b, a) are the same size and must compare equal.
    return a if a == b else _build_call("min", *sorted((a, b), key=str))


def multiply_sizes(shape: Iterable[Size]) -> Size:
    """Return the product of the sizes of `shape`: the number of elements of such a tensor; 1 for ()."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def sum_sizes(sizes: Iterable[Size]) -> Size:
    """Return the sum of `sizes`, 0 if there are none; faster than repeated ``+``."""
    terms: dict[Monomial, int] = {}
    for size in sizes:
        for mono, c in _list_terms(size):
            terms[mono] = terms.get(mono, 0) + c
    return _build_size(terms)


def list_names(size: Size) -> set[str]:
    """Return the names of all symbolic sizes in `size`."""
    symbols: set[str] = set()
    for mono, _ in _list_terms(size):
        for atom, _p in mono:
            symbols |= {atom} if isinstance(atom, str) else {n for a in atom.args for n in list_names(a)}
    return symbols


def substitute(size: Size, binding: Mapping[str, Size]) -> Size:
    """Return `size` with each name in `binding` replaced by its size; other names stay."""
    if isinstance(size, int):
        return size
    total: Size = 0
    for mono, c in _list_terms(size):
        value: Size = c
        for atom, p in mono:
            if isinstance(atom, str):
                base: Size = binding.get(atom, sym(atom))
            else:
                args = [substitute(a, binding) for a in atom.args]
                base = _CALLS[atom.fn](*args)
            for _ in range(p):
                value = value * base
        total = total + value
    return total


def evaluate(size: Size, binding: Mapping[str, Size]) -> int:
    """Return the integer value of `size` with its names replaced by `binding`.

    Raises:
        WeftError: if `binding` lacks a name.
    """
    value = substitute(size, binding)
    if not isinstance(value, int):
        raise WeftError(f"size {size} needs a value for {', '.join(sorted(list_names(value)))}")
    return value


def maximum(a: Size, b: Size) -> Size:
    """Return the larger of two sizes: an opaque term ``max(a, b)`` if one is symbolic and they differ."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else _build_call("max", *sorted((a, b), key=str))


_CALLS = {"min": minimum, "max": maximum, "floordiv": floordiv}
_LANGUAGE = compile_language(r"(?P<number>\d+) | (?P<name>[A-Za-z_]\w*) | (?P<punct>[-+*^(),])")


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Size:
    """Parse a size as ``str(size)`` prints it: sums, products, powers, parentheses, ``min``/``max``/``floordiv``.

    Raises:
        WeftError: if `text` is not a size, or exceeds a limit (digits, nesting, signs, terms, degree).
    """
    if any(len(digits) > MOST_BITS // 4 for digits in re.findall(r"\d+", text)):
        raise WeftError(f"a size holds a number of more than {MOST_BITS // 4} digits")
    # The parser recurses for every parenthesis and every leading minus; Python's stack is limited.
    depths = itertools.accumulate((sign == "(") - (sign == ")") for sign in text)
    if max(depths, default=0) > MOST_NESTED or text.count("-") > MOST_TERMS:
        raise WeftError(f"a size is nested more than {MOST_NESTED} deep, or has more than {MOST_TERMS} signs")
    parser = _SizeParser(text, _LANGUAGE, lambda at: f"size {text!r}, column {at + 1}")
    size = parser.sum()
    parser.expect("end")
    return size


class _SizeParser(Lexer):
    def sum(self) -> Size:
        size = self.product()
        while self.token.text in ("+", "-"):
            size = size + self.product() if self.next().text == "+" else size - self.product()
        return size

    def product(self) -> Size:
        size = self.power()
        while self.accept("*"):
            size = size * self.power()
        return size

    def power(self) -> Size:
        size = self.factor()
        if not self.accept("^"):
            return size
        power = int(self.expect_kind("number", "a power"))
        if power > MOST_DEGREE:
            raise WeftError(f"a size has the power {power}, above {MOST_DEGREE}")
        result = multiply_sizes([size] * power)
        if isinstance(result, int) and result.bit_length() > MOST_BITS:
            raise WeftError(f"a size holds a number of more than {MOST_BITS} bits")
        return result

    def factor(self) -> Size:
        if self.accept("-"):
            # -a^2 is -(a^2), as in Python.
            return -self.power()
        if self.accept("("):
            size = self.sum()
            self.expect(")")
            return size
        if self.token.kind == "number":
            return int(self.next().text)
        name = self.expect_kind("name", "a size")
        if name not in _CALLS or not self.accept("("):
            return sym(name)
        first = self.sum()
        self.expect(",")
        second = self.sum()
        self.expect(")")
        return _CALLS[name](first, second)
