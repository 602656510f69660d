"""What a part of a picture has and costs: the numbers of `weft inspect`, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ir.sizes import Call, Poly, Size

from .outline import Part


@dataclass(frozen=True)
class Facts:
    """A part: its learned numbers, its work (FLOPs, bytes read and written, as polynomials over batch, seq, …), what it
    keeps of a token, by how many tokens at most, and of a text.

    A parameter that several parts read counts in the first of them. `cache` is in numbers, `state` in bytes, where a
    number takes two. What has no known cost counts as nothing; `known` says whether there is none of that.
    """

    parameters: int
    flops: Size
    read: Size
    written: Size
    cache: dict[int | None, int]
    state: int
    known: bool


def facts(part: Part) -> Facts:
    """The sums over everything in `part`, all its repetitions among them."""
    flops: Size = 0
    read: Size = 0
    written: Size = 0
    parameters = state = 0
    cache: dict[int | None, int] = {}
    known = True
    for v in part.all_vertices():
        known &= v.cost is not None or v.op in ("input", "output")
        if v.cost is not None:
            flops, read, written = flops + v.cost.flops, read + v.cost.read, written + v.cost.written
        parameters += sum(w.learned for w in v.weights)
        state += v.state
        if v.cache is not None:
            width, window = v.cache
            cache[window] = cache.get(window, 0) + width
    return Facts(parameters, flops, read, written, cache, state, known)


def data(found: Facts) -> dict[str, Any]:
    """Facts as plain data, sizes as `polynomial` has them; what is nothing is left out."""
    plain = {
        "parameters": found.parameters,
        "flops": polynomial(found.flops),
        "read": polynomial(found.read),
        "written": polynomial(found.written),
        "cache": [[width, window] for window, width in found.cache.items()],
        "state": found.state,
        "unknown": not found.known,
    }
    return {name: value for name, value in plain.items() if value}


def polynomial(size: Size) -> Any:
    """A size as plain data: a number, or a list of [coefficient, [size, power], …], where a size is a name or
    ["min" | "max" | "floordiv", polynomial, polynomial]."""
    if not isinstance(size, Poly):
        return size
    return [[c, *([_atom(atom), power] for atom, power in mono)] for mono, c in size.terms]


def _atom(atom: str | Call) -> Any:
    return atom if isinstance(atom, str) else [atom.fn, *map(polynomial, atom.args)]
