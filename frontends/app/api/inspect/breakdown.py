"""Costs of a model part by part, as on the page of `weft viz`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.backends.viz.model.labels import label_part
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.model.part_costs import sum_costs
from weft.ir import Graph


@dataclass(frozen=True)
class PartCost:
    """The costs of a part of the picture: of the model, of a layer, or of a run of equal layers.

    path: name, such as "layers.0-31" for a run. times: number of equal layers; all values are sums over them.
    flops, read, written: operations and bytes of one forward pass over all tokens.
    step_flops, step_read, step_written: the same for one decode step at the last token; None without generation.
    cache, state: bytes of KV caches and recurrent states after all tokens.
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


def compute_part_costs(graph: Graph, tokens: int, item: int) -> tuple[PartCost, ...]:
    """Return the costs of `graph` for `tokens` tokens and `item` bytes per value: the entire model, then its parts."""
    root = build_outline(build_network(graph))
    totals = sum_costs(root)
    no_steps = {} if totals.cache or any(totals.state) else dict.fromkeys(("step_flops", "step_read", "step_written"))
    costs = []
    for part, times in [(root, 1), *_list_parts(root, 1)]:
        values: dict[str, Any] = sum_costs(part).to_dict(tokens, item) | no_steps
        costs.append(PartCost(part.path, label_part(part).title, times, **values))
    return tuple(costs)


def _list_parts(part: PicturePart, times: int) -> Iterator[tuple[PicturePart, int]]:
    """Yield (part, occurrences) for the parts in `part` except inputs and outputs, recursively in parts with layers."""
    for child in part.body.children:
        if not child.vertices or child.vertices[0].op not in ("input", "output"):
            yield child, times * child.count
            if child.has_layers:
                yield from _list_parts(child, times * child.count)
