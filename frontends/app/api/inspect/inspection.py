"""An inspection: the sizes and costs of a model, as data, as text and as HTML tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from weft.ir.readable import escape_controls, format_bytes, format_count

from .dimensions import Dimensions

CACHE_DTYPES = {"f32": 4, "f16": 2}  # bytes per value
COLUMNS = ("block", "times", "parameters", "FLOPs/token", "cache", "ops")
NUMERIC = ("times", "parameters", "FLOPs/token", "cache")  # aligned to the right
MAX_WIDTH = 72  # maximum characters of a column


@dataclass(frozen=True)
class RepeatedPart:
    """Structurally equal parts of a model: their scopes, and the counts of a single part.

    flops: of one token with `Inspection.tokens` visible tokens. cache: values that one token adds to the cache.
    """

    scopes: tuple[str, ...]
    parameters: int
    flops: int
    cache: int
    ops: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Inspection:
    """Dimensions and costs of a model. Printed, it is the tables of ``weft inspect``; notebooks show HTML tables.

    A multiply-add is two FLOPs. The cache fields and state_bytes are None for models that do not generate.

    active_parameters: without experts that a token is not routed to.
    flops_per_token: of one token with `tokens` visible tokens, itself included. flops_prefill: of `tokens` tokens.
    cache_per_token: values, not bytes. cache_at_context: values after `context` tokens, of which layers with a window
    cache at most its length. cache_per_source_token: values that attention to an encoder caches. state_bytes: of
    recurrent states, keyed by dtype.
    """

    source: str
    kind: str
    task: str | None
    model_type: str | None
    vocab: int | None
    context: int | None
    parameters: int
    active_parameters: int
    parameters_by_storage: Mapping[str, int]
    tokens: int
    flops_per_token: int
    flops_prefill: int
    cache_per_token: int | None
    cache_at_context: int | None
    cache_per_source_token: int | None
    state_bytes: Mapping[str, int] | None
    layers: int
    dimensions: Dimensions
    blocks: tuple[RepeatedPart, ...]
    unread: tuple[str, ...]
    ignored: tuple[str, ...]
    left_out: tuple[str, ...]
    random: bool

    def __repr__(self) -> str:
        return format_text(self)

    def _repr_html_(self) -> str:
        return format_html(self)

    def json(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible data, with caches also in bytes."""
        data = asdict(self)
        for key in ("cache_per_token", "cache_at_context", "cache_per_source_token"):
            n_values = data[key]
            data[f"{key}_bytes"] = n_values and {d: n_values * b for d, b in CACHE_DTYPES.items()}
        return data


def list_facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield facts about the entire model as (name, text)."""
    stored = ", ".join(f"{format_count(n)} as {dtype}" for dtype, n in inspection.parameters_by_storage.items())
    kind, family = inspection.kind, inspection.model_type
    yield "model", f"{inspection.source}: {f'{family} ' if family and family not in inspection.source else ''}{kind}"
    if inspection.task is not None:
        yield "head", inspection.task
    yield "parameters", f"{inspection.parameters:,} ({stored}{'; random, no checkpoint' if inspection.random else ''})"
    if inspection.active_parameters != inspection.parameters:
        yield "active", f"{inspection.active_parameters:,} per token ({format_count(inspection.active_parameters)})"
    yield "layers", str(inspection.layers)
    yield "vocabulary", f"{inspection.vocab:,}" if inspection.vocab else "none"
    yield "context", f"{inspection.context:,} tokens" if inspection.context else "not stated"
    yield "FLOPs per token", f"{format_count(inspection.flops_per_token)} with {inspection.tokens} tokens of context"
    yield "FLOPs of a prefill", f"{format_count(inspection.flops_prefill)} ({inspection.tokens} tokens)"
    numbers = {
        "cache per token": inspection.cache_per_token,
        "cache of the context": inspection.cache_at_context,
        "cache per source token": inspection.cache_per_source_token,
    }
    caches = {name: {d: (n or 0) * b for d, b in CACHE_DTYPES.items()} for name, n in numbers.items()}
    for name, n_bytes in {**caches, "constant state": inspection.state_bytes or {}}.items():
        if any(n_bytes.values()):
            yield name, ", ".join(f"{format_bytes(b)} in {d}" for d, b in n_bytes.items())


def list_rows(inspection: Inspection) -> list[tuple[str, ...]]:
    """Return a row of `COLUMNS` for every distinct block."""
    return [
        (
            format_ranges(b.scopes),
            f"× {len(b.scopes)}" if len(b.scopes) > 1 else "",
            format_count(b.parameters),
            format_count(b.flops),
            format_count(b.cache) if b.cache else "",
            ", ".join(b.ops),
        )
        for b in inspection.blocks
    ]


def list_remarks(inspection: Inspection) -> list[tuple[str, tuple[str, ...]]]:
    """Return (title, names) for each nonempty list of parts and tensors of the source that the graph lacks."""
    lists = {
        "left out": inspection.left_out,
        "checkpoint tensors that nothing reads": inspection.unread,
        "checkpoint tensors of no use": inspection.ignored,
    }
    return [(title, lines) for title, lines in lists.items() if lines]


def format_text(inspection: Inspection) -> str:
    """Return the facts, the blocks and the remarks as aligned text."""
    lines = [*align_pairs(list_facts(inspection)), "", *_align_table([COLUMNS, *list_rows(inspection)])]
    for title, keys in list_remarks(inspection):
        lines += ["", f"{title}:", *(f"  {key}" for key in keys)]
    return escape_controls("\n".join(lines))  # names in a checkpoint may contain control sequences for terminals


def align_pairs(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each (name, value), with the values aligned."""
    pairs = list(facts)
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]


def _align_table(table: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [[*(c if len(c) <= MAX_WIDTH else f"{c[: MAX_WIDTH - 1]}…" for c in row[:-1]), row[-1]] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        texts = (c.rjust(w) if name in NUMERIC else c.ljust(w) for c, w, name in zip(row, widths, COLUMNS, strict=True))
        yield "  ".join(texts).rstrip()


def format_html(inspection: Inspection) -> str:
    """Return the facts, the blocks and the remarks as HTML tables."""
    fact_rows = "".join(
        f"<tr>{_format_cell('th', name)}{_format_cell('td', value)}</tr>" for name, value in list_facts(inspection)
    )
    head = "".join(_format_cell("th", column, column) for column in COLUMNS)
    blocks = "".join(
        f"<tr>{''.join(_format_cell('td', *pair) for pair in zip(row, COLUMNS, strict=True))}</tr>"
        for row in list_rows(inspection)
    )
    lists = "".join(
        f"<p>{html.escape(title)}:</p><ul>{''.join(f'<li><code>{html.escape(key)}</code></li>' for key in keys)}</ul>"
        for title, keys in list_remarks(inspection)
    )
    return f"<table>{fact_rows}</table><table><thead><tr>{head}</tr></thead><tbody>{blocks}</tbody></table>{lists}"


def _format_cell(tag: str, value: str, column: str = "") -> str:
    side = "right" if column in NUMERIC else "left"
    return f"<{tag} style='text-align: {side}'>{html.escape(value)}</{tag}>"


def format_ranges(scopes: tuple[str, ...]) -> str:
    """Return scopes in a short form: layers.0, layers.1, layers.5 as layers.0-1,5; names without number are listed."""
    stem, _, first = scopes[0].rpartition(".")
    if not first.isdigit():
        return ", ".join(scopes)
    numbers = [int(s.rpartition(".")[2]) for s in scopes]
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"{stem}.{','.join(parts)}"
