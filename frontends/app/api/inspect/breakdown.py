"""Costs of a model part by part, as on the page of `weft viz`."""

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
    """A part of the picture: of the model or of a layer; equal layers in a row are one part.

    `path` names the part, "layers.0-31" all of these layers together, and values are sums over them; `times` counts
    equal parts. `flops`, `read` and `written` (bytes) are for all tokens at once, values with `step_` for one decode
    step at the last token with the others in a cache, None if the model does not generate. `cache` and `state` are
    bytes kept for the next token.
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
    """Return the parts of `graph` for a sequence of `tokens`, at `item` bytes per value; the entire model is first."""
    root = outline(network(graph))
    totals = facts(root)
    steps = bool(totals.cache or any(totals.state))
    return tuple(_cost(part, times, tokens, item, steps) for part, times in [(root, 1), *_list_parts(root, 1)])


def _list_parts(part: Part, times: int) -> Iterator[tuple[Part, int]]:
    """Yield the parts in `part` and the number of times each occurs, without inputs and outputs."""
    for child in part.body.children:
        if not child.vertices or child.vertices[0].op not in ("input", "output"):
            yield child, times * child.count
            if child.layered:
                yield from _list_parts(child, times * child.count)


def _cost(part: Part, times: int, tokens: int, item: int, steps: bool) -> PartCost:
    costs = facts(part).to_dict(tokens, item)
    values: dict[str, Any] = {name: None if name.startswith("step_") and not steps else n for name, n in costs.items()}
    return PartCost(part.path, label(part).title, times, **values)
