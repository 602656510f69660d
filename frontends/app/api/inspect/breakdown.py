"""A model part by part: what each has and costs, as the page of `weft viz` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.backends.viz.model.facts import facts
from weft.backends.viz.model.labels import label
from weft.backends.viz.model.network import network
from weft.backends.viz.model.outline import Part, outline
from weft.ir import Graph


@dataclass(frozen=True)
class PartCost:
    """A part of the picture: the parts of the model and, of layers, theirs; equal layers in a row are one part.

    `path` names the part, "layers.0-31" all of those layers together, and numbers are of all that it names; `times` is
    how often the like of it comes. `flops`, `read` and `written` (bytes) are of all tokens at once, those with `step_`
    of one token, the last of as many, with the others in a cache; None where the model does not generate. `cache` and
    `state` are bytes that are kept for the next token.
    """

    path: str
    title: str
    times: int
    parameters: int
    flops: int
    read: int
    written: int
    step_flops: int | None
    step_read: int | None
    step_written: int | None
    cache: int
    state: int


def breakdown(graph: Graph, tokens: int, item: int) -> tuple[PartCost, ...]:
    """The parts of `graph` for a text of so many tokens, where a number takes `item` bytes; the whole comes first."""
    root = outline(network(graph))
    whole = facts(root)
    steps = bool(whole.cache or any(whole.state))
    return tuple(_cost(part, times, tokens, item, steps) for part, times in [(root, 1), *_shown(root, 1)])


def _shown(part: Part, times: int) -> Iterator[tuple[Part, int]]:
    """The parts in `part` and how often each comes, inputs and outputs left out."""
    for child in part.body.children:
        if not child.vertices or child.vertices[0].op not in ("input", "output"):
            yield child, times * child.count
            if child.layered:
                yield from _shown(child, times * child.count)


def _cost(part: Part, times: int, tokens: int, item: int, steps: bool) -> PartCost:
    numbers = facts(part).to_dict(tokens, item)
    values: dict[str, Any] = {
        name: None if name.startswith("step_") and not steps else n for name, n in numbers.items()
    }
    return PartCost(part.path, label(part).title, times, **values)
