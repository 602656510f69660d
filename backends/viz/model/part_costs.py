"""Parameters, FLOPs and bytes of each part of a picture, and totals for comparisons, as `weft inspect` reports them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Poly, Size, SizeCall

from .network import Network, Vertex
from .outline import PicturePart
from .work import NONE, Work, sum_work


@dataclass(frozen=True)
class PartCosts:
    """Costs of a part. A parameter that several parts read counts in the first of them.

    `work`, `step`: the work of a prefill and of a decode step.
    `cache`: window (None: all tokens) → cached elements per token.
    `state`: the size of recurrent states: (elements in the model's dtype, bytes in other dtypes).
    `complete`: the costs of all operations are known; an unknown cost counts as 0.
    """

    parameters: int
    work: Work
    step: Work
    cache: dict[int | None, int]
    state: tuple[int, int]
    complete: bool

    def to_dict(self, tokens: int, item: int) -> dict[str, int]:
        """Return the costs that a page shows for a sequence of `tokens` tokens and elements of `item` bytes.

        "parameters" is their number. "flops", "read" and "written" (bytes) belong to a prefill of all tokens; the same
        keys with "step_" to the decode step of the last; "cache" and "state" are bytes of KV caches and states.
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


def sum_costs(part: PicturePart) -> PartCosts:
    """Return the costs of `part` summed over all its operations, including all repetitions."""
    vertices = list(part.all_vertices())
    cache: dict[int | None, int] = {}
    for v in vertices:
        if v.cache is not None:
            width, window = v.cache
            cache[window] = cache.get(window, 0) + width
    return PartCosts(
        sum(w.learned for v in vertices for w in v.weights),
        sum_work(map(_work_of, vertices)),
        sum_work(v.step for v in vertices),
        cache,
        (sum(v.state[0] for v in vertices), sum(v.state[1] for v in vertices)),
        all(v.cost is not None or v.op in ("input", "output") for v in vertices),
    )


def _work_of(v: Vertex) -> Work:
    """Return the work of `v`; if only its `cost` is known, all traffic counts as bytes."""
    if v.work is not None or v.cost is None:
        return v.work or NONE
    return Work(v.cost.flops, 0, 0, v.cost.read, v.cost.written)


def convert_costs(facts: PartCosts) -> dict[str, Any]:
    """Convert costs to JSON data, with sizes as in `convert_polynomial`; omit zeros and empty fields."""
    plain = {
        "parameters": facts.parameters,
        "work": _to_list(facts.work),
        "step": _to_list(facts.step),
        "cache": [[width, window] for window, width in facts.cache.items()],
        "state": list(facts.state) if any(facts.state) else None,
        "unknown": not facts.complete,
    }
    return {name: value for name, value in plain.items() if value}


def _to_list(work: Work) -> list[Any]:
    return [] if work == NONE else [convert_polynomial(getattr(work, f.name)) for f in fields(work)]


def convert_polynomial(size: Size) -> Any:
    """Return `size` as JSON data: a number, or a list of terms [coefficient, [factor, power], …]. A factor is the name
    of a size, or ["min" | "max" | "floordiv", polynomial, polynomial]."""
    if not isinstance(size, Poly):
        return size
    return [[c, *([_convert_atom(atom), power] for atom, power in mono)] for mono, c in size.terms]


def _convert_atom(atom: str | SizeCall) -> Any:
    return atom if isinstance(atom, str) else [atom.fn, *map(convert_polynomial, atom.args)]


ITEM = 2  # bytes of a cached element, as f16


@dataclass(frozen=True)
class Totals:
    """Totals of a model: the number of `operations` and of learned `parameters`, and the fields below.

    `flops`: FLOPs of a sequence of `tokens` tokens.
    `cache`, `state`: bytes of the KV cache per token and of states per sequence, if the model's dtype is f16.
    `weights`: bytes of the weights as stored; `dtypes` are those of at least 1 % of the bytes, largest share first.
    `open`: the number of f32 elements of weights; no pass has cast them yet, so they may get any dtype.
    """

    operations: int
    parameters: int
    flops: int
    cache: int
    state: int
    weights: int
    tokens: int
    open: int = 0
    dtypes: tuple[str, ...] = ()


def compute_totals(network: Network, tokens: int) -> Totals:
    """Return the totals of `network` for a sequence of `tokens` tokens."""
    totals = sum_costs(PicturePart(network.name, "", network.vertices))
    binding = dict.fromkeys(sizes.list_names(totals.work.flops), tokens) | {"batch": 1, "past": 0}
    elements, other_bytes = totals.state
    weights = {w.name: w for w in (*network.unread, *(w for v in network.vertices for w in v.weights))}.values()
    stored: Counter[str] = Counter()
    for weight in weights:
        stored[weight.dtype] += weight.bytes
    return Totals(
        len(network.vertices),
        totals.parameters + sum(w.learned for w in network.unread),
        sizes.evaluate(totals.work.flops, binding),
        sum(totals.cache.values()) * ITEM,
        elements * ITEM + other_bytes,
        stored.total(),
        tokens,
        stored["f32"] // 4,
        tuple(dtype for dtype, part in stored.most_common() if 100 * part >= stored.total()),
    )
