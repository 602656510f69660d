"""Parameters, FLOPs and bytes of each part of a picture: the numbers of `weft inspect`, part by part."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from weft.ir.types.sizes import Call, Poly, Size

from .network import Vertex
from .outline import Part
from .work import NONE, Work, total


@dataclass(frozen=True)
class Facts:
    """A part: its learned numbers, its work for all tokens of a text and for one more (`step`), what it keeps of a
    token, by how many tokens at most, and of a text.

    A parameter that several parts read counts in the first of them. `cache` is in numbers; `state` is what recurrences
    keep, in numbers and in bytes of others. What has no known cost counts as nothing; `known` says whether there is
    none of that.
    """

    parameters: int
    work: Work
    step: Work
    cache: dict[int | None, int]
    state: tuple[int, int]
    known: bool

    @property
    def flops(self) -> Size:
        """FLOPs for all tokens of a text."""
        return self.work.flops

    def to_dict(self, tokens: int, item: int) -> dict[str, int]:
        """The numbers that a page shows for a text of so many tokens, where a number takes `item` bytes.

        `flops`, `read` and `written` (bytes) are of all tokens at once; `step_flops`, … of one token that is the last
        of so many; `cache` is what their cache takes in bytes, `state` what recurrences keep.
        """
        binding = {"batch": 1, "seq": tokens, "past": 0, "total": tokens, "capacity": tokens, "source": tokens}
        step = self.step.evaluate(binding, item)
        cached = sum(width * min(window or tokens, tokens) for window, width in self.cache.items())
        return {
            "parameters": self.parameters,
            **self.work.evaluate(binding, item),
            **{f"step_{name}": value for name, value in step.items()},
            "cache": cached * item,
            "state": self.state[0] * item + self.state[1],
        }


def facts(part: Part) -> Facts:
    """The sums over everything in `part`, all its repetitions among them."""
    vertices = list(part.all_vertices())
    cache: dict[int | None, int] = {}
    for v in vertices:
        if v.cache is not None:
            width, window = v.cache
            cache[window] = cache.get(window, 0) + width
    return Facts(
        sum(w.learned for v in vertices for w in v.weights),
        total(map(_work, vertices)),
        total(v.step for v in vertices),
        cache,
        (sum(v.state[0] for v in vertices), sum(v.state[1] for v in vertices)),
        all(v.cost is not None or v.op in ("input", "output") for v in vertices),
    )


def _work(v: Vertex) -> Work:
    """The work of an operation: in the bytes that it is known to move, where it is not known which are the model's."""
    if v.work is not None or v.cost is None:
        return v.work or NONE
    return Work(v.cost.flops, 0, 0, v.cost.read, v.cost.written)


def data(facts: Facts) -> dict[str, Any]:
    """Facts as plain data, sizes as `polynomial` has them; what is nothing is left out."""
    plain = {
        "parameters": facts.parameters,
        "work": _listed(facts.work),
        "step": _listed(facts.step),
        "cache": [[width, window] for window, width in facts.cache.items()],
        "state": list(facts.state) if any(facts.state) else None,
        "unknown": not facts.known,
    }
    return {name: value for name, value in plain.items() if value}


def _listed(work: Work) -> list[Any]:
    """FLOPs, numbers read and written, bytes read and written besides; nothing where there is no work."""
    return [] if work == NONE else [polynomial(getattr(work, f.name)) for f in fields(work)]


def polynomial(size: Size) -> Any:
    """A size as plain data: a number, or a list of [coefficient, [size, power], …], where a size is a name or
    ["min" | "max" | "floordiv", polynomial, polynomial]."""
    if not isinstance(size, Poly):
        return size
    return [[c, *([_atom(atom), power] for atom, power in mono)] for mono, c in size.terms]


def _atom(atom: str | Call) -> Any:
    return atom if isinstance(atom, str) else [atom.fn, *map(polynomial, atom.args)]
