"""`weft gallery`: pictures of several models on one page, by default of all presets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.backends.viz.layout.scene import build_scene, list_default_open
from weft.backends.viz.model.network import build_network
from weft.backends.viz.web.page import Card, render_gallery
from weft.ir.errors import WeftError
from weft.ir.storage import replace_file

from ....models.presets import PRESETS
from ..inspect.counting import inspect
from ..inspect.inspection import Inspection
from ..source.sources import load_source
from .drawable import list_files
from .fact_sheet import build_fact_sheet


def write_gallery(
    out: Path, sources: Sequence[Any] = (), step: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> int:
    """Write the page of `sources` (all presets if empty) to `out` atomically; return the number of models.

    Raises:
        WeftError: if a source cannot be read, or `out` does not end in .html or cannot be written.
    """
    if out.suffix != ".html":
        raise WeftError(f"a gallery is a page: {out} must end in .html")
    to_draw = list(sources) or list(PRESETS)
    cards = []
    for i, source in enumerate(to_draw):
        step("drawing", i, len(to_draw))
        cards.append(build_card(source))
    step("drawing", len(to_draw), len(to_draw))
    with replace_file(out, list_files(*to_draw)) as path:
        path.write_text(render_gallery(cards, "Architectures"), encoding="utf-8")
    return len(cards)


def build_card(source: Any) -> Card:
    """Return the gallery card of a source."""
    model = load_source(source)
    inspection = inspect(model)
    root = build_scene(build_network(model.graph))
    sheet, opened = build_fact_sheet(model, inspection), list_default_open(root)
    return Card(sheet, root, opened, dict(_list_groups(inspection)), _list_numbers(inspection))


def _list_groups(inspection: Inspection) -> Iterator[tuple[str, list[str]]]:
    """Yield (property, values of the model) for each property by which a gallery filters models."""
    sizes = inspection.dimensions
    yield "Kind", [inspection.kind]
    features = {"experts": sizes.experts, "recurrent": sizes.recurrences}
    yield "Built", [name for name, has in features.items() if has] or ["dense"]
    shared = any(kv < max(sizes.heads) for kv in sizes.kv_heads)
    kinds = {
        "multi-head": any(kv in sizes.heads for kv in sizes.kv_heads),
        "grouped-query": shared,
        "latent": sizes.latent,
        "window": sizes.windows,
        "none": not sizes.heads,
    }
    yield "Attention", [name for name, has in kinds.items() if has]
    yield "Positions", list(dict.fromkeys(p.partition(",")[0] for p in sizes.positions)) or ["none"]


def _list_numbers(inspection: Inspection) -> dict[str, int]:
    """Return the quantities by which a gallery sorts models, keyed by name; absent if the model lacks one."""
    numbers = {
        "parameters": inspection.parameters,
        "active parameters": inspection.active_parameters,
        "context": inspection.context,
        "KV cache per token": inspection.cache_per_token,
        "FLOPs per token": inspection.flops_per_token,
    }
    return {name: number for name, number in numbers.items() if number is not None}
