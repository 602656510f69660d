"""Conversion of shapes to JSON data for a page. A repeat is stored once, with the differences of its other rounds."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.ir.readable import format_bytes

from ..layout.arrange import Box, Branches, Column, Item, LineGap
from ..layout.scene import Shape, unroll_repeat
from ..model import part_costs
from ..model.network import KEPT, Mark, Vertex, Weight

QUOTED = re.compile(r"""(['"])(.*?)\1""")
NUMBER = re.compile(r"\d+")
NUMBERED = re.compile(r"\d+(-\d+)?")


def convert_shape(s: Shape) -> dict[str, Any]:
    """Convert a shape and all shapes in it to JSON data."""
    plain: dict[str, Any] = {
        "key": s.key,
        "title": s.label.title,
        "lines": s.label.lines,
        "kind": s.label.kind,
        "closed": [round(s.closed.width, 2), s.closed.height, round(s.closed.axis, 2)],
    }
    optional = {
        "symbol": s.label.symbol,
        "notes": s.captions,
        "ops": [_convert_vertex(v) for v in s.part.vertices],
        "facts": part_costs.convert_costs(part_costs.sum_costs(s.part)),
    }
    plain |= {name: value for name, value in optional.items() if value}
    if s.arrangement is not None:
        plain["head"] = round(s.head, 2)
        plain |= {"rails": s.arrangement.rails} if s.arrangement.rails else {}
        plain["box"] = _convert_box(s.arrangement.box)
        plain["wires"] = [[x.source, x.target, x.values, x.bend, x.region, x.lanes] for x in s.arrangement.lines]
        plain["inner"] = [convert_shape(i) for i in s.inner]
    if s.part.count > 1:
        plain["repeat"] = _convert_repeat(s)
    return plain


def _convert_box(box: Box) -> Any:
    """Convert a box to JSON data: a number for a part, ["c", …] for a column, ["b" or "p", …] for branches without or
    with a bypass, ["r", lanes, rows…] for rows, ["|", source, target] for a line that passes."""
    if isinstance(box, Item):
        return box.index
    if isinstance(box, LineGap):
        return ["|", box.source, box.target]
    if isinstance(box, Column):
        return ["c", *map(_convert_box, box.boxes)]
    if isinstance(box, Branches):
        return ["p" if box.bypass else "b", *map(_convert_box, box.boxes)]
    return ["r", box.lanes, *([_convert_box(x) for x in row] for row in box.rows)]


def _convert_vertex(v: Vertex) -> dict[str, Any]:
    return {
        "name": v.name,
        "op": v.op,
        "attrs": dict(v.attrs),
        "reads": list(itertools.zip_longest(v.roles, v.reads, fillvalue="")),
        "makes": list(zip(v.makes, v.types, strict=False)),
        "weights": [[w.name, w.shape, w.dtype, w.bytes, w.recipe, *_describe_packing(w)] for w in v.weights],
        **({"mark": _convert_mark(v.mark)} if v.mark and v.mark.sign != KEPT else {}),
    }


def _describe_packing(w: Weight) -> list[str]:
    return [] if w.bits is None else [f"{w.bits:.3g} bits: {w.packing}; {format_bytes(w.bytes)}"]


def _convert_mark(mark: Mark) -> dict[str, Any]:
    fields = {"changes": [[c.what, c.before, c.after] for c in mark.changes], "other": mark.other}
    return {"sign": mark.sign} | {name: value for name, value in fields.items() if value}


# -- repeats


@dataclass(frozen=True)
class Move:
    """The renaming from one round of a repeat to a later round, which increases layer numbers.

    In a name that begins with `prefix`, the layer number is in the component (separated by dots) with index `depth`. In
    other strings, such as recipes, it is the first number from `low` to `high` in each quoted name.
    """

    prefix: str
    depth: int
    low: int
    high: int

    def rename(self, text: str, by: int) -> str:
        """Return `text` with `by` added to the layer number in its names."""
        if not text.startswith(self.prefix) or "." not in text:
            return QUOTED.sub(lambda m: f"{m[1]}{self._key(m[2], by)}{m[1]}", text)
        words = text.split(".")
        if len(words) > self.depth and NUMBERED.fullmatch(words[self.depth]):
            words[self.depth] = NUMBER.sub(lambda m: str(int(m[0]) + by), words[self.depth])
        return ".".join(words)

    def _key(self, key: str, by: int) -> str:
        words = key.split(".")
        for i, word in enumerate(words):
            if word.isdecimal() and self.low <= int(word) <= self.high:
                return ".".join([*words[:i], str(int(word) + by), *words[i + 1 :]])
        return key


def _convert_repeat(s: Shape) -> dict[str, Any]:
    """Convert a repeat to JSON data. "once" is the first round, without its contents if each round is a single part.
    The second round is the first with "period" added to layer numbers; round i (from 0) is the second with (i − 1) ·
    period added. "changed" maps i to the (path, value) pairs in which round i differs from that."""
    unrolled = unroll_repeat(s)
    assert unrolled.arrangement is not None
    rails = {line.region: line.values for line in unrolled.arrangement.lines if line.bend == "rail"}
    rounds = [json.loads(json.dumps(convert_shape(i))) for i in unrolled.inner]  # tuples become lists
    low, high = _read_layer_span(rounds[0]["key"])
    period = _read_layer_span(rounds[1]["key"])[0] - low
    prefix = ".".join([*rounds[0]["key"].split(".")[:-1], ""])
    move = Move(prefix, prefix.count("."), low, high)
    later = replace(move, low=low + period, high=high + period)
    changed = {1: _find_changes(rounds[0], rounds[1], lambda text: move.rename(text, period))}
    for i in range(2, len(rounds)):
        changed[i] = _find_changes(rounds[1], rounds[i], functools.partial(later.rename, by=(i - 1) * period))
    folded = len(s.part.children) == 1  # then the first round and the folded part have the same contents
    return {
        "count": s.part.count,
        "parallel": s.part.parallel,
        "period": period,
        "rails": list(rails.values()),
        "moves": [vars(move), vars(later)],
        "once": {k: v for k, v in rounds[0].items() if not folded or k not in ("inner", "box", "wires")},
        "changed": {i: differences for i, differences in changed.items() if differences},
    }


def _read_layer_span(key: str) -> tuple[int, int]:
    numbers = [int(n) for n in NUMBER.findall(key.rpartition(".")[2])]
    return numbers[0], numbers[-1]


def _find_changes(before: Any, after: Any, rename: Callable[[str], str]) -> list[tuple[list[str | int], Any]]:
    """Return (path, new value) wherever `after` differs from `before` with its strings mapped by `rename`."""
    differences: list[tuple[list[str | int], Any]] = []
    path: list[str | int] = []

    # Types are compared by identity: a page of 60 layers compares a million values, all of JSON types.
    def walk(before: Any, after: Any) -> None:
        kind = type(before)
        if kind is str:
            if rename(before) != after:
                differences.append(([*path], after))
        elif kind is dict and type(after) is dict and before.keys() == after.keys():
            for name, value in after.items():
                path.append(name)
                walk(before[name], value)
                path.pop()
        elif kind is list and type(after) is list and len(before) == len(after):
            for i, value in enumerate(after):
                path.append(i)
                walk(before[i], value)
                path.pop()
        elif before != after:
            differences.append(([*path], after))

    walk(before, after)
    return differences
