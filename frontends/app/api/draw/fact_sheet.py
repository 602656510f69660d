"""The facts of a model as rows of a table: the values of `weft inspect --json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.backends.block_weights import count_packed_bytes, find_quantized_layout
from weft.backends.viz.formats.style import Sheet
from weft.backends.viz.model.network import Network
from weft.ir import Graph
from weft.ir.readable import format_bytes, format_count
from weft.ir.types import sizes
from weft.passes.analysis.costs import count_elements

from ....model import Model
from ....models.presets import PRESETS
from ..inspect.counting import inspect
from ..inspect.dimensions import Dimensions
from ..inspect.inspection import Inspection

MIXERS = {"selective_scan": "Mamba", "ssd": "Mamba-2"}  # other recurrences have the names of their ops


def build_fact_sheet(model: Model, inspection: Inspection | None = None) -> Sheet:
    """Return the fact sheet for a picture of `model`; `inspection` is computed if None."""
    inspection = inspection or inspect(model)
    about = PRESETS[model.spec].about if model.spec in PRESETS else model.description
    return Sheet(
        make_title(model), f"{about} · {inspection.kind}", (*_list_rows(inspection), *_list_quantized_rows(model.graph))
    )


def make_title(model: Model) -> str:
    """Return a model's title: its preset, folder or file without suffix (FILE · NAME for code), else its graph."""
    file, _, name = model.spec.partition(".py:")
    if name:
        return Path(file).name if name == "model" else f"{Path(file).name} · {name}"
    has_suffix = Path(model.spec).suffix in (".py", ".gguf", ".weft")
    return (Path(model.spec).stem if has_suffix else Path(model.spec).name) or model.graph.name


def _list_rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    sizes = inspection.dimensions
    yield "Parameters", f"{inspection.parameters:,}"
    if inspection.active_parameters != inspection.parameters:
        yield "Active for a token", f"{inspection.active_parameters:,}"
    yield "Layers", str(inspection.layers)
    facts = {
        "Width": _join_numbers(sizes.width),
        "Attention": _describe_attention(sizes),
        "Window": _join_numbers(sizes.windows),
        "Recurrence": ", ".join(MIXERS.get(name, name.replace("_", " ")) for name in sizes.recurrences),
        "Feed-forward": _join_numbers(sizes.hidden),
        "Experts": "; ".join(
            f"{e.count} of {e.hidden:,}" + (f", {e.active} active" if e.active else "") for e in sizes.experts
        ),
        "Shared expert": _join_numbers(sizes.shared),
        "Vocabulary": f"{inspection.vocab:,}" if inspection.vocab else "",
        "Context": f"{inspection.context:,}" if inspection.context else "",
        "Positions": "; ".join(sizes.positions),
    }
    yield from ((name, value) for name, value in facts.items() if value)
    sizes_by_dtype = inspection.json()
    for name, key in (("KV cache per token", "cache_per_token_bytes"), ("State of a sequence", "state_bytes")):
        if n_bytes := (sizes_by_dtype[key] or {}).get("f16"):
            yield name, f"{format_bytes(n_bytes)} in f16"
    yield "FLOPs per token", f"{format_count(inspection.flops_per_token)} with {inspection.tokens:,} tokens of context"


def _list_quantized_rows(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield two rows if a weight is quantized: number and bits of quantized weights, and the bytes of all weights."""
    params = [p for p in graph.params.values() if p.uses and not p.recipe.is_constant]
    layouts = {p: layout for p in params if (layout := find_quantized_layout(p)) is not None}
    if not layouts:
        return
    packed = sum(count_packed_bytes(p, layout) for p, layout in layouts.items())
    n_weights = sum(map(count_elements, layouts))
    rest = sum(sizes.evaluate(p.type.bytes, {}) for p in params if p not in layouts)
    words = {f"{'fp' if layout.floats else 'int'}{layout.bits} groups of {layout.group}" for layout in layouts.values()}
    kinds = " and ".join(sorted(words))
    yield "Quantized", f"{format_count(n_weights)} weights of {8 * packed / n_weights:.3g} bits, {kinds}"
    yield "Weights", f"{format_bytes(packed + rest)}: {format_bytes(packed)} quantized, {format_bytes(rest)} of others"


def _describe_attention(sizes: Dimensions) -> str:
    numbers = {
        "{} heads": sizes.heads,
        "{} KV heads": sizes.kv_heads if sizes.kv_heads != sizes.heads else (),
        "{} wide": sizes.head_dim,
        "latent of {}": sizes.latent,
    }
    return ", ".join(form.format(_join_numbers(values)) for form, values in numbers.items() if values)


def _join_numbers(numbers: Iterable[int]) -> str:
    return " and ".join(f"{n:,}" for n in numbers)


def build_short_sheet(network: Network) -> Sheet:
    """Return the fact sheet of a network without a weft model: name, number of operations and of parameters."""
    parameters = sum(w.learned for v in network.vertices for w in v.weights)
    rows = (("Operations", f"{len(network.vertices):,}"), ("Parameters", f"{parameters:,}"))
    return Sheet(network.name, f"{network.name} as it was compiled or exported", rows)
